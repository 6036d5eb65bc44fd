"""What a front matter may leave out, and what stands for it."""

from __future__ import annotations

import ast
import math
from typing import Any

from coda_agent.specs.canonical import readable
from coda_agent.specs.format import DTYPES, Dim, Draw, Header, Input
from coda_agent.specs.gemm import Gemm
from coda_agent.specs.layout import factors, parts
from coda_agent.specs.names import functions_in

TYPES = ("bfloat16", "float16")
_M, _N, _K, _OTHER = (1, 77, 200, 384), (16, 272, 336, 512), (8, 64, 136, 256), (1, 2, 3, 5)
_BENCH, _FEW = (4096, 8192), 2
_HEAD = 16
"""From such a multiplier on, as in `64*H`, a dim counts heads, and is as much smaller."""
_LONGEST = 100


def completed(header: Header, source: str) -> dict[str, Any]:
    """Complete the fields of `header` by defaults.

    - `types`: T, the type of a tensor that names none, is bfloat16 or float16.
    - `dims`: those of the shapes; N in multiples of 16 and K of 16 bytes, as any kernel can take.
    - `draw`: normal; of B with deviation K**-0.5, so that a product is of order one; an index
      chooses among the N columns.
    - `check_shapes`: one row, and ragged ones; `bench_shapes`: 4096 and 8192 of each
      dim, but 2 of leading ones.
    - `summary`: the first line of the reference's docstring, or else the formula it returns.
    """
    given = {name: getattr(header, name) for name in Header.model_fields}
    tensors = [*header.inputs.values(), *header.outputs.values()]
    types = dict(header.types)
    if "T" not in types and any(tensor.dtype == "T" for tensor in tensors):
        types["T"] = TYPES
    rows, columns, inner = _letters(header)
    heads = {dim: n for dim, n in (columns | inner).items() if n >= _HEAD}
    dims = dict(header.dims)
    if not dims:
        shapes = [case for tensor in tensors for case in tensor.shape.cases.values()]
        words = [e for shape in shapes for e in shape if isinstance(e, str)]
        entries = [parts(x) for word in words for x in factors(word)]
        operand = header.gemm[0].split()[0]
        element = _bytes(header.inputs[operand].dtype, types) if inner else 2
        for name in dict.fromkeys([*rows, *columns, *inner, *(dim for _, dim, _ in entries)]):
            least = 16 if name in columns else max(8, 16 // element) if name in inner else 1
            least //= math.gcd(least, heads.get(name, 1))
            divisors = [divisor for _, dim, divisor in entries if dim == name]
            dims[name] = Dim(multiple_of=math.lcm(least, *divisors))
    whole = dict.fromkeys([*rows][-1:], _M) | dict.fromkeys(columns, _N) | dict.fromkeys(inner, _K)
    sizes = {d: [max(1, size // heads.get(d, 1)) for size in x] for d, x in whole.items()}
    checks = [
        {d: dim.only or up(sizes.get(d, _OTHER)[i], dim.multiple_of) for d, dim in dims.items()}
        for i in range(len(_M))
    ]
    benches = [
        {
            d: dim.only or up(size // heads.get(d, 1) if d in sizes else _FEW, dim.multiple_of)
            for d, dim in dims.items()
        }
        for size in _BENCH
    ]
    return {
        **given,
        "types": types,
        "dims": dims,
        "inputs": {name: _drawn(header, name, types, columns, inner) for name in header.inputs},
        "summary": header.summary or _summary(header.name, source),
        "check_shapes": header.check_shapes or tuple(checks),
        "bench_shapes": header.bench_shapes or tuple(benches),
    }


def _letters(header: Header) -> tuple[dict[str, int], dict[str, int], dict[str, int]]:
    """Find the dims of rows, columns and sums, of a sound `gemm`, with their multipliers."""
    if not readable(header):
        return {}, {}, {}
    product = Gemm(header)
    rows, columns, inner = (
        {dim: n for n, dim, _ in (parts(factors(e)[-1]) for e in entries if isinstance(e, str))}
        for entries in (product.lead, product.columns, product.inner)
    )
    return rows, columns, inner


def _bytes(dtype: str, types: dict[str, tuple[str, ...]]) -> int:
    """Find the smallest element that a declared type may be."""
    return min(DTYPES.get(choice, 2) for choice in types.get(dtype, (dtype,)))


def up(size: int, unit: int) -> int:
    """Round up to a multiple of `unit`."""
    return -(-size // unit) * unit


def _drawn(
    header: Header,
    name: str,
    types: dict[str, tuple[str, ...]],
    columns: dict[str, int],
    inner: dict[str, int],
) -> Input:
    tensor = header.inputs[name]
    if "draw" in tensor.model_fields_set or not inner:
        return tensor
    draw = tensor.draw
    if tensor.dtype.startswith("int") and columns:
        draw = Draw("integers", (0, next(iter(columns))))
    elif name in header.gemm[1].split() and _bytes(tensor.dtype, types) > 1:
        draw = Draw("normal", (f"{next(iter(inner))}**-0.5",))
    return tensor.model_copy(update={"draw": draw})


def _summary(name: str, source: str) -> str:
    found = f"{name}, as its reference computes it."
    try:
        node = functions_in(source).get("reference")
    except SyntaxError:  # the parser says so
        node = None
    if node:
        said = (ast.get_docstring(node) or "").strip()
        returns = [n.value for n in node.body if isinstance(n, ast.Return) and n.value]
        formula = ast.unparse(returns[-1]) if returns else ""
        found = said or (formula if "(" in formula.removeprefix("(") else found)
    line = found.splitlines()[0].strip()
    return line if len(line) <= _LONGEST else f"{line[: _LONGEST - 1].rstrip()}…"
