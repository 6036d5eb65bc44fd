"""A product whose columns are taken apart, as a product for each range of them.

A packed weight gives queries, keys and values at once. Each range is read as a product with its
rows of the weight, so that one of them may be rotated and another not. Joined, the rows are the
weight again (`join`).
"""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from coda_agent.agent.authors.composer.calls import (
    CASTS,
    COPIES,
    RESHAPES,
    argument,
    bounds,
    is_elementwise,
    name_of,
    shape_of,
    valued,
    widens,
)
from coda_agent.agent.authors.composer.merge import products
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.retrace import ORIGIN, Retraced

aten = torch.ops.aten
_SAME = (*CASTS, *COPIES)
Dim = tuple[int, int]
"""A dim of a value that counts blocks of columns, and how many columns each has."""


def is_parted(traced: Retraced) -> bool:
    """Whether ranges of columns are all that is taken of the only product."""
    return _parted(traced) is not None


def _parted(traced: Retraced) -> _Whole | None:
    every = products(traced.graph)
    if len(every) != 1 or name_of(every[0]) != "mm":
        return None
    whole = _Whole(traced, every[0])
    return whole if whole.covers() else None


def take_apart(traced: Retraced) -> bool:
    """Make a product for each range of columns that is taken of the only one.

    Returns:
        Whether it is done; where not, the graph is not to be used any more.
    """
    if (whole := _parted(traced)) is None:
        return False
    made = dict[fx.Node, fx.Node]()
    try:
        with traced.graph.inserting_before(whole.product):  # in the order of the columns
            for start, stop in sorted({*whole.ranges.values()}):
                whole.part(whole.product, start, stop)
        for node, (start, stop) in whole.ranges.items():
            with traced.graph.inserting_before(node):
                part = whole.part(node.args[0], start, stop)
                made[node] = part if shape_of(part) == shape_of(node) else _reshaped(part, node)
                made[node].meta = dict(node.meta)
    except Refusal:  # part of what is no value of the original graph
        return False
    traced.replace(made)
    return True


class _Whole:
    """A product and what is computed of all its columns alike.

    Attributes:
        dims: Of each value that has all columns, the dim that is cut.
        ranges: First and last column of what is taken of one.
    """

    def __init__(self, traced: Retraced, product: fx.Node) -> None:
        self.traced, self.product = traced, product
        self.dims: dict[fx.Node, Dim] = {product: (1, 1)}
        self.ranges: dict[fx.Node, tuple[int, int]] = {}
        self._known: dict[tuple[fx.Node, int, int], fx.Node] = {}

    def covers(self) -> bool:
        """Whether ranges lie side by side and are all that leaves."""
        for node in self.traced.graph.nodes:
            sources = [x for x in node.all_input_nodes if x in self.dims]
            if not sources:
                continue
            if node.op != "call_function" or not self._follow(node, sources):
                return False
        edges = sorted({*self.ranges.values()})
        starts, stops = [a for a, _ in edges], [b for _, b in edges]
        return len(edges) > 1 and [*starts, shape_of(self.product)[1]] == [0, *stops]

    def _follow(self, node: fx.Node, sources: list[fx.Node]) -> bool:
        """Note what a call makes of whole values; False where a range is none."""
        op, source, (dim, block) = name_of(node), sources[0], self.dims[sources[0]]
        if op in ("slice", "select"):
            call: Any = node.meta["custom"][ORIGIN]
            others = tree_leaves((call.args[1:], call.kwargs))
            if not all(isinstance(x, int | None) for x in others):
                return False  # symbols, which have their hints here
            at, start, stop, step = bounds(node)
            if at == dim and step == 1 and start < stop:
                self.ranges[node] = start * block, stop * block
                return True
            if op == "select" or at == dim:
                return False
            self.dims[node] = dim, block
            return True
        found = self._moved(node, op, source)
        if found is None and is_elementwise(node):
            alike = {(shape_of(x), self.dims[x]) for x in sources}
            found = (dim, block) if alike == {(shape_of(node), (dim, block))} else None
        if found is not None:
            self.dims[node] = found
        return found is not None

    def _moved(self, node: fx.Node, op: str, source: fx.Node) -> Dim | None:
        """Where a view has the dim."""
        dim, block = self.dims[source]
        if op in _SAME:
            return dim, block
        if op == "permute":
            order = [d % len(shape_of(source)) for d in argument(node, 1, "dims")]
            return order.index(dim), block
        if op not in RESHAPES:
            return None
        old, new = shape_of(source), shape_of(node)
        before, size = math.prod(old[:dim]), old[dim]
        for i, extent in enumerate(new):
            if math.prod(new[:i]) == before and extent > 1 and size % extent == 0:
                return i, block * (size // extent)
        return None

    def part(self, node: Any, start: int, stop: int) -> fx.Node:
        """Some columns of a value that has all of them."""
        key = node, start, stop
        if key not in self._known:
            self._known[key] = self._part(*key)
        return self._known[key]

    def _part(self, node: fx.Node, start: int, stop: int) -> fx.Node:
        graph, (dim, block) = self.traced.graph, self.dims[node]
        shape = [*shape_of(node)]
        shape[dim] = (stop - start) // block
        if node is self.product:
            args = node.args[0], self._cut(node.args[1], -1, start, stop)
        elif name_of(node) in RESHAPES:
            return _reshaped(self.part(node.args[0], start, stop), node, shape)
        else:
            args = tuple(self._argument(x, node, start, stop) for x in node.args)
        part = graph.call_function(node.target, args, node.kwargs)  # pyright: ignore[reportArgumentType]
        return valued(part, node, shape)

    def _argument(self, x: object, node: fx.Node, start: int, stop: int) -> object:
        """An argument of a call as that of the call for some columns."""
        if x in self.dims:
            return self.part(x, start, stop)
        dim, block = self.dims[node]
        return self._cut(x, dim - len(shape_of(node)), start // block, stop // block)

    def _cut(self, x: Any, dim: int, start: int, stop: int) -> Any:
        """Part of what is computed without the product; `dim` counts from the end.

        Raises:
            Refusal: it is no value of the original graph, nor computed of one element by element.
        """
        if not isinstance(x, fx.Node) or len(shape_of(x)) < -dim or shape_of(x)[dim] == 1:
            return x
        op, shape, count = name_of(x), [*shape_of(x)], len(shape_of(x))
        shape[dim] = stop - start
        if op in RESHAPES and shape_of(x) == shape_of(x.args[0]):
            return self._cut(x.args[0], dim, start, stop)
        if op in ("permute", "t"):
            order = argument(x, 1, "dims", [1, 0])
            source = order[dim] % count - count
            args = self._cut(x.args[0], source, start, stop), *x.args[1:]
        elif is_elementwise(x) or (op in _SAME and (self.traced.user(x) is None or widens(x))):
            args = tuple(self._cut(y, dim, start, stop) for y in x.args)
        else:
            return self.traced.enter_range(x, dim % count, start, stop)
        part = self.traced.graph.call_function(x.target, args, x.kwargs)  # pyright: ignore[reportArgumentType]
        return valued(part, x, shape)


def _reshaped(x: fx.Node, like: fx.Node, shape: Any = None) -> fx.Node:
    """A value as of a node's shape, or of one alike."""
    shape = [*shape_of(like)] if shape is None else shape
    return valued(x.graph.call_function(aten.view.default, (x, shape)), like, shape)
