"""Shapes (M, N, K) as a user names them: one by one, in a file, or by a model's configuration."""

import json
import re
from collections.abc import Iterable, Mapping
from pathlib import Path
from typing import Any

from coda_agent.evals import definitions
from coda_agent.primitives.dispatch import Shape
from coda_agent.primitives.errors import CodaError
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
    text = _text(path)
    lines = [line.partition("#")[0] for line in text.splitlines()]
    if text.lstrip().startswith("["):
        lines = [str(entry).strip("[]") for entry in _json(path, text)]
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


def configuration(path: Path) -> dict[str, Any]:
    """A Hugging Face config.json, or that of a folder, as an object.

    Raises:
        CodaError: it cannot be read, or is something else.
    """
    path = path / "config.json" if path.is_dir() else path
    about = _json(path, _text(path))
    if not isinstance(about, dict):
        raise CodaError(f"{path} is no model's configuration, expected a JSON object")
    if isinstance(text := about.get("text_config"), dict):  # of a model that reads more than text
        about |= text
    return about


def widths(about: Mapping[str, Any], path: Path) -> dict[str, int]:
    """The widths of a model's layer, as suites name them, by a configuration's keys.

    Raises:
        CodaError: `path` lacks one.
    """

    def width(key: str, default: int | None = None) -> int:
        found = about.get(key)
        found = default if found is None else found
        if not isinstance(found, int) or found <= 0:
            raise CodaError(f"{path}: {key} is {found!r}, expected a positive number")
        return found

    hidden, heads = width("hidden_size"), width("num_attention_heads")
    head = width("head_dim", hidden // heads)
    return {
        "hidden": hidden,
        "q": heads * head,
        "kv": width("num_key_value_heads", heads) * head,
        "head": head,
        "mlp": width("intermediate_size"),
        "vocabulary": width("vocab_size"),
    }


def _text(path: Path) -> str:
    try:
        return path.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        said = getattr(error, "strerror", None) or error
        raise CodaError(f"{path} cannot be read as text: {said}") from error


def _json(path: Path, text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError as error:
        raise CodaError(f"{path} is not JSON: {error}") from error
