"""Shapes (M, N, K) as a user names them: one by one, in a file, or by a model's configuration."""

import re
from collections.abc import Iterable
from pathlib import Path

from coda_agent.agent.configuration import configuration, json_of, widths
from coda_agent.evals import definitions
from coda_agent.primitives.dispatch import Shape
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import text_of
from coda_agent.specs import Spec

EXPECTED = "M,N,K, such as 16384,4096,4096"


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


def numbers(option: str, text: str, expected: str, *, of: int = 1) -> list[int]:
    """`1,16,128` as a list, each a positive multiple of `of`.

    Raises:
        CodaError: something else.
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"0*[1-9][0-9]{0,17}", x) and int(x) % of == 0 for x in parts):
        raise CodaError(f"{option} is {text[:60]!r}, expected {expected}")
    return [int(part) for part in parts]


def in_file(path: Path) -> list[Shape]:
    """The shapes in a file: M,N,K a line, with `#` before comments, or a JSON list of [M, N, K].

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


def of_model(config: Path, spec: Spec, rows: Iterable[int]) -> list[Shape]:
    """The shapes at which a kernel stands in the layers of a Transformer.

    The products are those of `evals/suites/shapes.toml`.

    Args:
        config: A Hugging Face config.json, or the folder of one.
        spec: The kernel's spec.
        rows: Values of M.

    Raises:
        CodaError: the file cannot be read or lacks a width, or the kernel has no place there.
    """
    suite = definitions.load("shapes").measured()
    if spec.name not in suite.kernels:
        hint = f"give --shape; kernels with a place are {', '.join(suite.kernels)}"
        raise CodaError(f"{spec.name} has no place in a Transformer's layer", hint=hint)
    sizes = widths(configuration(config), config)
    places = [
        definitions.Place(spec.name, m, suite.products[product], "", product, sizes)
        for product in suite.kernels[spec.name].products
        for m in rows
    ]
    found = [place.sizes(spec) for place in places]
    m, n, k = spec.gemm_dims
    return list(dict.fromkeys((s[m], s[n], s[k]) for s in found))
