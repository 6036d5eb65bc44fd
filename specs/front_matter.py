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


class Front(NamedTuple):
    """All of a front matter but the shapes.

    Attributes:
        summary: One line, or "" for the default.
        types: Choices of T; none where tensors have types of their own.
        units: What each dim is a multiple of.
        gemm: The inputs that are A, and those that are B.
        pairs: Lines that say which columns of the product go together.
    """

    name: str
    summary: str
    types: Sequence[str]
    units: Mapping[str, int]
    gemm: tuple[Sequence[str], Sequence[str]]
    pairs: Sequence[str]
    inputs: Mapping[str, Face]
    outputs: Mapping[str, Face]

    def text(self) -> str:
        """Write it down."""
        lines = [f"name: {self.name}"]
        if self.summary:
            lines.append("summary: '{}'".format(self.summary.replace("'", "''")))
        if self.types:
            lines.append(f"types: {{T: [{', '.join(self.types)}]}}")
        units = self.units.items()
        dims = (f"  {x}: {{{f'multiple_of: {unit}' * (unit > 1)}}}" for x, unit in units)
        sides = (f"[{', '.join(side)}]" if len(side) > 1 else side[0] for side in self.gemm)
        lines += ["dims:", *dims, f"gemm: [{', '.join(sides)}]", *self.pairs]
        for key, tensors in (("inputs", self.inputs), ("outputs", self.outputs)):
            lines.append(f"{key}:")
            for x, (shape, dtype, draw) in tensors.items():
                dtype = "bfloat16" if dtype == "T" and not self.types else dtype
                face = f"shape: [{', '.join(map(str, shape))}], dtype: {dtype}"
                lines.append(f"  {x}: {{{face}{f', draw: {draw}' * bool(draw)}}}")
        return "".join(f"{line}\n" for line in lines)


def sizes_listed(key: str, shapes: Iterable[Mapping[str, int]]) -> str:
    """Write `check_shapes` or `bench_shapes`."""
    listed = (", ".join(f"{x}: {size}" for x, size in sizes.items()) for sizes in shapes)
    return f"{key}:\n" + "".join(f"  - {{{sizes}}}\n" for sizes in listed)
