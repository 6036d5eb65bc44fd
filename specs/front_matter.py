"""The front matter of a spec as text."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import NamedTuple

from coda_agent.specs.layout import Entry


class Face(NamedTuple):
    """A tensor as it is declared; only inputs have a draw."""

    shape: tuple[Entry, ...]
    dtype: str
    draw: str = ""


def front_matter(
    name: str,
    summary: str,
    types: Sequence[str],
    units: Mapping[str, int],
    gemm: tuple[Sequence[str], Sequence[str]],
    pairs: Sequence[str],
    inputs: Mapping[str, Face],
    outputs: Mapping[str, Face],
) -> str:
    """All but the shapes.

    Args:
        name: Of the spec.
        summary: One line, or "" for the default.
        types: Choices of T; none where tensors have types of their own.
        units: What each dim is a multiple of.
        gemm: The inputs that are A, and those that are B.
        pairs: Lines that say which columns of the product go together.
        inputs: By name.
        outputs: By name.
    """
    lines = [f"name: {name}"]
    if summary:
        lines.append("summary: '{}'".format(summary.replace("'", "''")))
    if types:
        lines.append(f"types: {{T: [{', '.join(types)}]}}")
    dims = (f"  {x}: {{{f'multiple_of: {unit}' * (unit > 1)}}}" for x, unit in units.items())
    sides = (f"[{', '.join(side)}]" if len(side) > 1 else side[0] for side in gemm)
    lines += ["dims:", *dims, f"gemm: [{', '.join(sides)}]", *pairs]
    for key, tensors in (("inputs", inputs), ("outputs", outputs)):
        lines.append(f"{key}:")
        for x, (shape, dtype, draw) in tensors.items():
            dtype = "bfloat16" if dtype == "T" and not types else dtype
            face = f"shape: [{', '.join(map(str, shape))}], dtype: {dtype}"
            lines.append(f"  {x}: {{{face}{f', draw: {draw}' * bool(draw)}}}")
    return "".join(f"{line}\n" for line in lines)


def sizes_listed(key: str, shapes: Iterable[Mapping[str, int]]) -> str:
    """`check_shapes` or `bench_shapes`."""
    listed = (", ".join(f"{x}: {size}" for x, size in sizes.items()) for sizes in shapes)
    return f"{key}:\n" + "".join(f"  - {{{sizes}}}\n" for sizes in listed)
