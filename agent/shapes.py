"""Shapes as users name them: one by one, in files, by models."""

import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from coda_agent.agent.configuration import configuration, json_of, widths
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import text_of
from coda_agent.runtime.dispatch import Shape
from coda_agent.specs import Spec
from coda_agent.specs.format import evaluate

EXPECTED = "M,N,K, such as 16384,4096,4096"
# The products of a Transformer's layer over its widths; a gradient enters at the other side.
_PRODUCTS = {
    "qkv": {"N": "q + 2 * kv", "K": "hidden"},
    "o": {"N": "hidden", "K": "q"},
    "gate-up": {"N": "2 * mlp", "K": "hidden"},
    "down": {"N": "hidden", "K": "mlp"},
    "head": {"N": "vocabulary", "K": "hidden"},
    "qkv-backward": {"N": "hidden", "K": "q + 2 * kv"},
    "gate-up-backward": {"N": "hidden", "K": "2 * mlp"},
    "down-backward": {"N": "mlp", "K": "hidden"},
}
PLACES: Mapping[str, tuple[str, ...]] = {
    "gemm_rmsnorm_rope": ("qkv",),
    "gemm_residual_partial_rmsnorm": ("o", "down"),
    "gemm_rmsnorm_swiglu": ("gate-up",),
    "gemm_rmsnorm_partial_cross_entropy": ("head",),
    "gemm_partial_swiglu_bwd": ("down-backward",),
    "gemm_residual_partial_rmsnorm_bwd": ("gate-up-backward", "qkv-backward"),
    "gemm_rmsnorm": ("head",),
    "gemm_rope": ("qkv",),
    "gemm_swiglu": ("gate-up",),
    "gemm_partial_cross_entropy": ("head",),
    "gemm_fp8_rmsnorm_rope": ("qkv",),
    "gemm_fp8_residual_partial_rmsnorm": ("o", "down"),
    "gemm_fp8_rmsnorm_swiglu": ("gate-up",),
    "gemm_fp8_rmsnorm_swiglu_quantised": ("gate-up",),
    "gemm_fp8_swiglu": ("gate-up",),
    "gemm_fp8_swiglu_quantised": ("gate-up",),
    "gemm_fp8_rmsnorm": ("head",),
}
"""The products of a layer at which each kernel stands."""


def shape(text: str, where: str = "--shape") -> Shape:
    """`4096,8192,4096`, or with x, as (M, N, K).

    Raises:
        CodaError: something else; `where` it stands is said.
    """
    parts = re.split(r"\s*[,x]\s*|\s+", text.strip())
    if len(parts) != 3 or not all(re.fullmatch(r"[0-9]{1,18}", part) for part in parts):
        raise CodaError(f"{where} is {text.strip()[:60]!r}, expected {EXPECTED}")
    m, n, k = map(int, parts)
    if not m * n * k:
        raise CodaError(f"{where} is {text.strip()!r}, expected {EXPECTED}, all positive")
    return m, n, k


def numbers(option: str, text: str, expected: str) -> list[int]:
    """Read positive numbers, such as `1,16,128`.

    Raises:
        CodaError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,17}", x) for x in parts):
        raise CodaError(f"{option} is {text[:60]!r}, expected {expected}")
    return [int(part) for part in parts]


def in_file(path: Path) -> list[Shape]:
    """Read shapes: M,N,K a line, # before comments, or a JSON list.

    Raises:
        CodaError: it cannot be read, holds none, or something else.
    """
    text = text_of(path)
    lines = [line.partition("#")[0] for line in text.splitlines()]
    if text.lstrip().startswith("["):
        lines = [str(entry).strip("[]") for entry in json_of(path, text)]
    found = [shape(x, f"{path}, {i}:") for i, x in enumerate(lines, 1) if x.strip()]
    if not found:
        raise CodaError(f"{path} holds no shapes, expected {EXPECTED} a line")
    return found


def place_sizes(product: str, sizes: Mapping[str, int], rows: int) -> dict[str, int]:
    """Give a layer's product its M, N and K by widths."""
    dims = _PRODUCTS[product]
    return {"M": rows, **{dim: int(evaluate(text, sizes)) for dim, text in dims.items()}}


def of_model(config: Path, spec: Spec, rows: Iterable[int]) -> list[Shape]:
    """List the shapes at which a kernel stands in a Transformer's layers.

    Args:
        config: A Hugging Face config.json, or the folder of one.
        rows: Values of M.

    Raises:
        CodaError: the file cannot be read or lacks a width, or the kernel has no place there.
    """
    if spec.name not in PLACES:
        hint = f"give --shape; kernels with a place are {', '.join(PLACES)}"
        raise CodaError(f"{spec.name} has no place in a Transformer's layer", hint=hint)
    sizes = widths(configuration(config), config)
    found = [place_sizes(name, sizes, m) for name in PLACES[spec.name] for m in rows]
    return list(dict.fromkeys((s["M"], s["N"], s["K"]) for s in found))
