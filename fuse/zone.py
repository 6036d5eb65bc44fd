"""What is computed of a product row by row: losses, and gradients.

Both passes' calls are one zone where all gradients are multiples of one number. Else each pass has
its own: the forward pass's results are read by the backward pass's as values that are there.
"""

from __future__ import annotations

import math
import operator
from collections.abc import Sequence, Set
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import ancestors
from coda_agent.fuse.nodes import (
    CASTS,
    PLAIN,
    SCATTERED,
    TURNS,
    VIEWS,
    is_pointwise,
    is_tangent,
    is_zeros,
    made_of,
    number,
    padded,
)

aten = torch.ops.aten
SAME = (*VIEWS, aten.reshape.default, aten.clone.default, aten.squeeze.dim,
         aten.squeeze.dims, aten.expand.default)  # fmt: skip
REDUCED = (aten.sum.dim_IntList, aten.mean.dim, aten.amax.default, aten.amin.default,
            aten.logsumexp.default, aten.argmax.default)  # fmt: skip
_COMPARED = (aten.eq.Tensor, aten.ne.Tensor, aten.ge.Tensor, aten.gt.Tensor, aten.le.Tensor,
             aten.lt.Tensor)  # fmt: skip
SCALED = "float16 holds the gradients of a scaled loss alone"
"""Why the product of a loss in float16 is made again."""
_PICKING = (aten.gather.default, aten.topk.default)
_PROPORTIONAL = (
    aten.neg.default,
    aten.sum.dim_IntList,
    aten.div.Scalar,
    aten.mul.Scalar,
    *SAME,
    *CASTS,
    *TURNS,
)


def zones_of(product: fx.Node) -> tuple[list[Zone], str]:
    """Find a product's zone, or one for each pass, and why.

    Raises:
        Whole: something needs all rows of it at once.
    """
    zone = Zone(product)
    try:
        zone.find()
        if zone.has_gradients():
            return [zone], ""
        reason = ""
    except Whole as why:
        reason = str(why)
    late = made_of(product.graph, filter(is_tangent, product.graph.nodes))
    zones = [Zone(product, late), Zone(product, late, again=True)]
    for zone in zones:
        zone.find()
    forward, backward = zones
    if not forward.is_head():
        if reason:
            raise Whole(reason)
        return [], ""
    return (zones, reason) if backward.has_gradients() else ([forward], "")


class Whole(Exception):
    """Why some rows are not enough."""


class Layout:
    """A product's rows and columns, by which values are told apart.

    Attributes:
        rows: Of the product.
        columns: Of it.
        picked: As many columns as are gathered of it, or are its largest.
    """

    def __init__(self, product: fx.Node) -> None:
        self.rows, self.columns = product.meta["val"].shape
        if self.rows == self.columns:
            raise Whole("it has as many rows as columns, and what is of which is not told apart")
        values = [_first(n) for n in product.graph.nodes if n.target in _PICKING]
        self.picked = {value.shape[-1] for value in values if value.ndim}

    def kind(self, node: Any) -> int:
        """Count the columns of a value's rows; 0 without such rows."""
        value = _first(node) if isinstance(node, fx.Node) else None
        if not isinstance(value, torch.Tensor) or not value.ndim:
            return 0
        if value.numel() == self.rows:
            return 1
        width = value.shape[-1]
        if width == 1 and node.target in SAME:  # a view may have dims of one behind the columns
            width = next((n for n in reversed(value.shape) if n != 1), 1)
        known = width in {self.columns, *self.picked}
        return width if known and value.numel() == self.rows * width else 0

    def is_wide(self, node: object) -> bool:
        """Whether a node's value has the product's rows and columns."""
        return self.kind(node) == self.columns

    def is_narrow(self, node: fx.Node) -> bool:
        """Whether a node gives a tensor of these rows, with fewer columns."""
        return 0 < self.kind(node) < self.columns and node.target is not aten.topk.default

    def has_columns_last(self, node: fx.Node) -> bool:
        """Whether a node's value has several columns as its last dim."""
        return 1 < self.kind(node) == _first(node).shape[-1]

    def is_along_row(self, node: fx.Node) -> bool:
        """Whether a node reduces each row's columns, or gathers among them."""
        x: Any
        dims: Any
        x, dims, index = (*node.args, None, None)[:3]
        if node.target is aten.topk.default:
            dims = -1 if index is None else index
        if not self.has_columns_last(x) or dims is None:
            return False
        ndim = x.meta["val"].ndim
        if [d % ndim for d in (dims if isinstance(dims, list) else [dims])] != [ndim - 1]:
            return False
        if node.target is not aten.gather.default:
            return True
        rows = [_first(node).shape[:-1] for node in (x, *node.all_input_nodes[1:])]
        return self.kind(index) > 0 and rows[0] == rows[1]

    def is_scattered(self, node: fx.Node) -> bool:
        """Whether rows of numbers are scattered into rows of zeros."""
        args: Any = node.args
        zeros, dim, index, source = args[:4]
        shape = node.meta["val"].shape
        return (
            is_zeros(zeros)
            and dim % len(shape) == len(shape) - 1
            and index.meta["val"].shape == source.meta["val"].shape
            and index.meta["val"].shape[:-1] == shape[:-1]
            and self.kind(source) > 0
            and self.is_wide(node)
        )


@dataclass
class Zone:
    """What is computed of a product row by row.

    Attributes:
        product: It.
        late: What depends on gradients of the graph's results, where a zone is of one pass alone.
        again: Whether it is of the backward pass then, and what is as wide is made there again.
        nodes: Whose values have such rows, of as many columns or of one.
        ends: Products of these rows, and sums over them: gradients.
        turned: Transposes that `ends` read.
        needed: They, and what they are computed from.
        tangent: The gradient of the loss, which all results of the backward pass are multiples of.
        scaled: What depends on it, of the graph.
        layout: Of the product, by which values are told apart.
    """

    product: fx.Node
    late: Set[fx.Node] | None = None
    again: bool = False
    nodes: dict[fx.Node, None] = field(default_factory=dict)
    ends: list[fx.Node] = field(default_factory=list)
    turned: set[fx.Node] = field(default_factory=set)
    needed: set[fx.Node] = field(default_factory=set)
    tangent: fx.Node | None = None
    scaled: set[fx.Node] = field(default_factory=set)

    def __post_init__(self) -> None:
        self.layout = Layout(self.product)

    def find(self) -> None:
        """Find what is computed of the product row by row.

        Raises:
            Whole: something needs all rows of it at once.
        """
        self.nodes[self.product] = None
        for node in self.product.graph.nodes:
            if any(map(self.has, node.all_input_nodes)) and not self._is_left(node):
                self._add(node)
        self._add_as_wide()
        wide = {node for node in self.nodes if self.layout.is_wide(node)}
        inside = [n for n in self.nodes if n in wide or not wide.isdisjoint(n.all_input_nodes)]
        inside += [n for n in self.nodes if n.target is operator.getitem]
        inside = [n for n in inside if self.is_own(n)]
        self.needed = ancestors([*self.ends, *inside])
        self.nodes = {
            n: None for n in self.product.graph.nodes if n in self.nodes and n in self.needed
        }
        read = [x for node in (*self.nodes, *self.ends) for x in node.all_input_nodes]
        own = filter(self.is_own, self.nodes)
        if not ancestors(x for x in read if not self.has(x)).isdisjoint(own):
            raise Whole("a gradient needs a value of all rows")
        if self.late is None:
            self._find_tangent()
        if self.again:
            self._check_comparisons()

    def _check_comparisons(self) -> None:
        """Check that nothing made again is compared with what was kept."""
        # Rounded otherwise, the largest of a row may be none of its elements.
        made = made_of(self.product.graph, [self.product])
        for node in self.nodes:
            if node.target in _COMPARED and made.issuperset(node.all_input_nodes):
                if len({*map(self.layout.kind, node.all_input_nodes)}) > 1:
                    raise Whole(f"{node.name} compares it with what was made of it before")

    def is_own(self, node: fx.Node) -> bool:
        """Whether a node is of the zone's pass, not made there again."""
        return self.late is None or (node in self.late) == self.again

    def _is_left(self, node: fx.Node) -> bool:
        """Whether a node is the other pass's, and not made again."""
        made_again = self.again and (self.layout.is_wide(node) or node.target in TURNS)
        return not self.is_own(node) and not made_again

    def _add(self, node: fx.Node) -> None:
        """Add what reads a node of the zone, or leave it behind."""
        read = filter(self.has, node.all_input_nodes)
        if self._is_row_by_row(node):
            self.nodes[node] = None
        elif self._is_turn(node):
            self.turned.add(node)
        elif self._is_end(node):
            self.ends.append(node)
        elif any(x in self.turned or self.layout.is_wide(x) for x in read):
            if node.op == "output":
                raise Whole("it is a result (of a graph break?)")
            raise Whole(f"{node.name} reads it whole")

    def _add_as_wide(self) -> None:
        """Add what is as wide and not the product's: a teacher's logits."""
        wide, is_wide = set[fx.Node](), self.layout.is_wide
        before = ancestors([self.product])  # a square weight's A is as wide
        for node in filter(lambda x: x not in before, self.product.graph.nodes):
            if is_wide(node) or not wide.isdisjoint(node.all_input_nodes):
                wide.add(node)
        for node in reversed(self.product.graph.nodes):
            read = node in wide and any(user in self.nodes for user in node.users)
            if read and not self.has(node) and not self._is_left(node):
                if self._is_row_by_row(node) or (node.target in PLAIN and is_wide(node)):
                    self.nodes[node] = None

    def _find_tangent(self) -> None:
        """Find the loss's gradient; check that all is proportional to it."""
        for node in self.product.graph.nodes:
            if is_tangent(node) and node in self.needed:
                if self.tangent is not None or node.meta["val"].ndim:
                    raise Whole("its gradient is not of one loss")
                self.tangent = node
                self.scaled.add(node)
            elif not self.scaled.isdisjoint(node.all_input_nodes):
                if node in self.needed and node.meta["val"].dtype is torch.float16:
                    raise Whole(SCALED)
                if node in self.needed and not _is_proportional(node, self.scaled):
                    raise Whole(f"{node.name} is not proportional to the loss's gradient")
                self.scaled.add(node)

    def has_gradients(self) -> bool:
        """Whether gradients of the product are among what is computed."""
        late = self.late or self.scaled
        return bool(self.turned) or any(n in late and self.layout.is_wide(n) for n in self.nodes)

    def is_head(self) -> bool:
        """Whether the product is wide, and no other reads what follows."""
        shorter = self.product.all_input_nodes[-1].meta["val"].shape[0] < self.layout.columns
        ends = [node for node in self.ends if node.target in PLAIN]
        return shorter and not ends and self.is_own(self.product)

    def has(self, node: object) -> bool:
        """Whether a node is computed some rows at a time."""
        return node in self.nodes or node in self.turned

    def _is_row_by_row(self, node: fx.Node) -> bool:
        """Whether a node makes each row of the same row of inputs."""
        kind, turned = self.layout.kind(node), not self.turned.isdisjoint(node.all_input_nodes)
        if node.op != "call_function" or not kind or turned:
            return False
        if node.target in SAME:
            (x,) = node.all_input_nodes[:1]
            wider = node.target is aten.expand.default and self._aligns(x, node.meta["val"].shape)
            return wider or (kind == self.layout.kind(x) and node.target not in TURNS)
        if node.target in (*REDUCED, *_PICKING):
            return self.layout.is_along_row(node)
        if node.target in SCATTERED:
            return self.layout.is_scattered(node)
        if node.target is operator.getitem:
            return node.args[0] in self.nodes
        shape = node.meta["val"].shape
        return is_pointwise(node) and all(self._aligns(x, shape) for x in node.all_input_nodes)

    def _aligns(self, node: fx.Node, shape: Sequence[int]) -> bool:
        """Whether a value is broadcast by whole rows or whole columns."""
        own = padded(node, shape)
        if own[:-1] == (*shape[:-1],) and own[-1] in (1, shape[-1]):
            return True
        return not self.has(node) and (own[-1] == 1 or math.prod(own[:-1]) == 1)

    def _is_turn(self, node: fx.Node) -> bool:
        """Whether a node is a matrix of these rows, transposed."""
        x: Any = node.args[0] if node.args else None
        shape = self.layout.rows, self.layout.columns
        return node.target in TURNS and x in self.nodes and padded(x, ()) == shape

    def _is_end(self, node: fx.Node) -> bool:
        """Whether a node multiplies these rows with others, or sums them."""
        if node.target in (aten.sum.default, aten.mean.default):
            return self.layout.kind(node.args[0]) > (self.late is not None)
        if node.target is aten.sum.dim_IntList:
            x: Any
            dims: Any
            x, dims = node.args[:2]
            rows = [*range(x.meta["val"].ndim - 1)]
            along = self.layout.is_wide(x) and self.layout.has_columns_last(x)
            return along and dims is not None and [*dims] == rows
        if node.target is not aten.mm.default:
            return False
        one, other = node.args
        if one in self.turned or self.layout.is_wide(one):
            return not self.has(other)
        return self.layout.is_wide(other) and not self.has(one)


def _is_proportional(node: fx.Node, scaled: Set[fx.Node]) -> bool:
    """Whether a value is the tangent's multiple, as those in `scaled` are."""
    read = [x in scaled for x in node.args if isinstance(x, fx.Node)]
    if node.target in _PROPORTIONAL:
        return True
    if node.target in (aten.mul.Tensor, aten.mm.default):
        return sum(read) == 1
    if node.target is torch.ops.prims.fma.default:
        return sum(read[:2]) == 1 and read[2]
    if node.target in SCATTERED:
        return is_zeros(node.all_input_nodes[0])
    if node.target is aten.div.Tensor:
        return node.args[0] in scaled and node.args[1] not in scaled
    if node.target in (aten.add.Tensor, aten.sub.Tensor):
        return read == [True, True]
    if node.target is aten.where.self:
        condition, *others = node.args
        zero = all(x in scaled or number(x) == 0 for x in others)
        return condition not in scaled and zero
    return False


def _first(node: fx.Node) -> Any:
    """A node's value, or the first of several."""
    value = node.meta.get("val")
    return value[0] if node.target is aten.topk.default else value  # pyright: ignore
