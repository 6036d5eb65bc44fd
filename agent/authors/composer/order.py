"""Tensors whose dims are in another order, such as heads first."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from operator import itemgetter
from typing import Any, cast

import torch
from torch import fx

from coda_agent.agent.authors.composer.axes import REDUCTIONS, Axes, Axis, Dim
from coda_agent.agent.authors.composer.calls import argument, name_of, shape_of, valued
from coda_agent.agent.authors.composer.ports import Stand, applied
from coda_agent.agent.authors.composer.problem import View
from coda_agent.agent.authors.composer.resize import Roles
from coda_agent.agent.authors.composer.retrace import Retraced

_PERMUTE = torch.ops.aten.permute.default


class Order:
    """Order of rows and columns; with `halves` the last column axis leads."""

    def __init__(self, roles: Roles, *, halves: bool) -> None:
        self.rank = {axis: float(i) for i, axis in enumerate((*roles.rows, *roles.columns))}
        if halves:
            self.rank[roles.columns[-1]] = len(roles.rows) - 0.75

    def sorted(self, axes: Sequence[Axis]) -> list[Axis]:
        """Axes in this order; a count of parts stands before the part."""
        ranks = [self.rank.get(a, -1.0) for a in axes]
        for i in reversed(range(len(axes) - 1)):
            ranks[i] = ranks[i] if ranks[i] >= 0 else ranks[i + 1] - 0.5
        return [a for _, a in sorted(zip(ranks, axes, strict=True), key=itemgetter(0))]

    def moved(
        self, axes: Axes, nodes: Mapping[fx.Node, fx.Node], sizes: Mapping[Axis, int]
    ) -> dict[fx.Node, tuple[View, View]]:
        """Find nodes to be put in order, and the views for that."""
        result: dict[fx.Node, tuple[View, View]] = {}
        for node, original in nodes.items():
            if original not in axes.dims:
                continue
            dims = axes.of(original)
            flat = [a for dim in dims for a in dim]
            ordered = self.sorted(flat)
            if ordered != flat and len({*flat}) == len(flat):
                stand = Stand(dims, [[a] for a in ordered], None)
                there, back = stand.steps(sizes), stand.back(sizes)
                result[node] = partial(applied, there), partial(applied, back)
        return result

    def reductions(self, traced: Retraced, axes: Axes) -> bool:
        """Let reductions take their tensors in order; whether that changed the graph."""
        changed = False
        for node in [*traced.graph.nodes]:
            if node.op == "call_function" and name_of(node) in REDUCTIONS:
                changed |= self._reduction(traced, axes, node)
        return changed

    def _reduction(self, traced: Retraced, axes: Axes, node: fx.Node) -> bool:
        graph, target = traced.graph, cast("Callable[..., Any]", node.target)
        source = node.args[0]
        over = argument(node, 1, "dim")
        if not isinstance(source, fx.Node) or not over:
            return False
        dims: list[Dim] = axes.of(source)
        first = [dim[0] for dim in dims if dim]
        if any(self.sorted(dim) != dim for dim in dims):
            return False
        ordered = self.sorted(first)
        if ordered == first or len({*first}) < len(first):
            return False
        places = [i for i, dim in enumerate(dims) if dim]
        order = [i for i, dim in enumerate(dims) if not dim]
        order += sorted(places, key=lambda i: ordered.index(dims[i][0]))
        count = len(dims)
        reduced = {d % count for d in ([over] if isinstance(over, int) else over)}
        shape = shape_of(source)
        with graph.inserting_before(node):
            straight = graph.call_function(_PERMUTE, (source, order))
            args = (straight, [order.index(d) for d in sorted(reduced)], *node.args[2:])
            again = graph.call_function(target, args, dict(node.kwargs))
        keep = len(shape_of(node)) == count
        left = order if keep else [i for i in order if i not in reduced]
        final = range(count) if keep else sorted(left)
        with graph.inserting_before(node):
            back = graph.call_function(_PERMUTE, (again, [left.index(i) for i in final]))
        valued(straight, source, [shape[i] for i in order])
        kept = [1 if i in reduced else shape[i] for i in left]
        valued(again, node, kept)
        back.meta = dict(node.meta)
        traced.replace({node: back})
        return True
