"""What the rewriter is asked: a graph, and its tensors' roles."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass, field

import torch
from torch import fx

from coda_agent.agent.authors.composer.expression import Expr
from coda_agent.primitives import HalfTile, Tile, WideTile
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.groups import GROUP_TILES
from coda_agent.primitives.kinds import Resource

STORED = (Tile, HalfTile, WideTile, *GROUP_TILES)
"""Kinds of outputs over rows and columns."""


class Columns(Tile):
    """A range of the columns of a tile."""


View = Callable[[torch.Tensor], torch.Tensor]


@dataclass(frozen=True)
class Slot:
    """A tensor that enters or leaves the graph.

    Attributes:
        shape: At the extents of the trace.
        kind: What it is to the program: a resource; `Table` of one whose kind follows from how it
            is read; None of an operand of the product, and of what `reason` refuses.
        words: Its shape, for messages.
        dtype: Of an output, the element type that is stored.
        reason: Why no program reads it; empty of what one reads.
        straight: The canonical tensor, of the graph's one.
        restored: The inverse, where these differ.
        joined: Whether it is several outputs side by side.
    """

    shape: tuple[int, ...]
    kind: type[Resource] | None
    words: str = ""
    dtype: str = ""
    reason: str = ""
    straight: View = lambda x: x
    restored: View | None = None
    joined: bool = False


@dataclass(frozen=True)
class Problem:
    """A graph of one product and what is computed around it.

    Attributes:
        module: ATen nodes; placeholders in the order of `inputs`, outputs as a dict by name.
        extents: Of M, N and K in the trace; all that are derived of them differ.
        gemm: Names of A and B.
        narrow: Whether a cast to an element type is a rounding that is meant.
        kept: Casts that are meant, whatever their types.
        place: Where a node stands, for messages.
        source: Where the graph comes from, as messages begin.
        dims: Names of M, N and K.
        sides: A and B, for messages.
        counts: Of M and N in the call, where the trace has others.
        lead: Extents of the dims of rows.
        inner: Extents along K of products that are summed; empty of one.
        halves: Whether column j of the graph's pairs meets j + N/2.
        fixed: Whether N has no other extent.
        updated: Outputs that overwrite an input.
        moved: Of nodes whose dims stand in another order than rows and columns, what brings a
            tensor of that shape into this order, and the inverse.
    """

    name: str
    module: fx.GraphModule
    extents: Mapping[str, int]
    gemm: tuple[str, str]
    inputs: Mapping[str, Slot]
    outputs: Mapping[str, Slot]
    narrow: Callable[[torch.dtype], bool]
    place: Callable[[fx.Node], str]
    source: str = ""
    dims: tuple[str, str, str] = ("M", "N", "K")
    sides: tuple[str, str] = ("A", "B")
    counts: Mapping[str, int] = field(default_factory=dict)
    lead: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    halves: bool = False
    fixed: bool = False
    updated: Mapping[str, str] = field(default_factory=dict)
    kept: frozenset[fx.Node] = frozenset()
    moved: Mapping[fx.Node, tuple[View, View]] = field(default_factory=dict)

    def rounds(self, node: fx.Node) -> bool:
        """Whether a cast is a rounding that is meant."""
        return self.narrow(node.meta["val"].dtype) or node in self.kept

    def __str__(self) -> str:
        return "\n".join(str(node.format_node()) for node in self.module.graph.nodes)

    def shape_words(self, shape: Iterable[int]) -> str:
        """A shape of the trace in the names of its dims."""
        m, n, k = self.dims
        columns = self.extents["N"]
        names = {self.extents["K"]: k, columns // 2: f"{n}/2", 2 * columns: f"2*{n}"}
        names |= {columns: n, self.extents["M"]: m}
        return f"[{', '.join(names.get(x, '…' if x > 1 else '1') for x in shape)}]"


@dataclass(frozen=True)
class Rewritten:
    """What one binding computes.

    Attributes:
        operands: Name to annotation, of the inputs used, in the spec's order.
        outputs: Name to kind, in the spec's order.
        parts: Of the graph's outputs that are ranges of columns, the program's output, and the
            first column and the one after the last.
    """

    name: str
    operands: Mapping[str, str]
    outputs: Mapping[str, str]
    values: Mapping[str, Expr]
    parts: Mapping[str, tuple[str, int, int]] = field(default_factory=dict)


class Refusal(ProgramError):
    """No program computes a graph, for a reason at a node.

    Attributes:
        node: The node that is the reason, where it is one.
        output: The name of the output that is, where it is one.
    """

    def __init__(
        self, message: str, hint: str = "", node: fx.Node | None = None, output: str = ""
    ) -> None:
        super().__init__(message, hint=hint)
        self.node, self.output = node, output
