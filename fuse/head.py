"""A head and its loss, some rows of logits at a time.

What both passes compute of a product row by row (a loss's statistics, and the gradients that
products read) is computed for some rows after the others, in the forward pass. It does not know
what the gradient of the loss will be; since all is proportional to that, it takes 1, and the
backward pass multiplies the two results. Gradients of weights are summed in float32.

Where all is not proportional to one number (log-probabilities that are a result, or that a loss of
whole sequences is made of), the forward pass computes what it knows of each row, and the backward
pass makes the product again, some rows at a time. That is one product more.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from functools import partial
from typing import Any

import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

from coda_agent.agent.authors.composer.calls import ancestors
from coda_agent.agent.authors.composer.retrace import SYMBOLIC
from coda_agent.fuse.nodes import (
    PLAIN,
    SCATTERED,
    SUM,
    TURNS,
    VIEWS,
    bytes_of,
    cast_to,
    constant,
    copied,
    is_pointwise,
    is_tangent,
    make,
    numel,
    padded,
)
from coda_agent.fuse.zone import REDUCED, SAME, SCALED, Whole, Zone, zones_of

aten = torch.ops.aten
LOGITS = 1 << 30
"""Bytes of logits that are held at a time. Each time the weight's gradient is read and written."""
_FLOAT16 = 4
"""Times as many bytes before a loss in float16 has them so: of 2 GiB on an H200 it took 1.21 times
as long as whole, in the same memory, since PyTorch writes gradients over logits."""
_TILE = 128
_HEAD = 4
"""Columns of a head at least, as a multiple of what it sums over."""


def hold_some_rows(graph: fx.Graph) -> list[str]:
    """Compute large products, and their losses, some rows at a time.

    Returns:
        A line for each such product: what was done, or why it was not.
    """
    notes: list[str] = []
    for product in [node for node in graph.nodes if node.target in PLAIN]:
        if SYMBOLIC in product.meta or bytes_of([product]) <= LOGITS or not product.users:
            continue
        if product.meta["val"].dtype is torch.float64:  # parts are summed in float32
            continue
        try:
            zones, reason = zones_of(product)
        except Whole as why:
            extent, columns = product.all_input_nodes[-1].meta["val"].shape
            if columns > _HEAD * extent:
                notes.append(f"{product.name} is computed whole: {why}")
            continue
        more = sum(n.target in PLAIN for zone in zones if zone.again for n in zone.nodes)
        if more and reason == SCALED and bytes_of([product]) < _FLOAT16 * LOGITS:
            notes.append(f"{product.name} is computed whole: {reason}, and that takes less time")
            continue
        steps = [_Rows(zone).replace() for zone in zones]
        if more:
            again = f"in both passes, by {more} product{'s' * (more > 1)} more: {reason}"
            notes.append(f"{product.name} is computed {steps[0]} rows at a time {again}")
        elif steps:
            notes.append(f"{product.name} and its loss are computed {steps[0]} rows at a time")
    return notes


class _Rows:
    """The calls of a zone for some rows after the others.

    Attributes:
        ones: What is made of a tangent of 1, by what it stands for.
        ready: What products that are made again wait for: a gradient, and the rows before.
    """

    def __init__(self, zone: Zone) -> None:
        self.zone, self.graph = zone, zone.product.graph
        like = next(filter(zone.is_own, (zone.product, *zone.nodes, *zone.ends)))
        self.make = partial(make, self.graph, like=like)
        self.ones: dict[fx.Node, fx.Node] = {}
        self.ready: fx.Node | None = None

    def replace(self) -> int:
        """Replace the zone; rows at a time."""
        zone, graph = self.zone, self.graph
        count = -(-bytes_of([zone.product]) // LOGITS)
        step = -(-zone.layout.rows // count // _TILE) * _TILE
        leaving = [n for n in zone.nodes if zone.layout.is_narrow(n) and self._leaves(n)]
        parts: dict[fx.Node, list[fx.Node]] = {node: [] for node in (*leaving, *zone.ends)}
        with graph.inserting_before(graph.output_node()):
            self._make_ones()
            if zone.again:
                tangents = sorted(filter(is_tangent, ancestors([*zone.nodes, *zone.ends])))
                self.ready = self._known(tangents[:1])
            for start in range(0, zone.layout.rows, step):
                some = _Some(self, start, min(start + step, zone.layout.rows))
                for node, found in parts.items():
                    found.append(some.values[node])
                    if self._is_total(node) and len(found) > 1:
                        total = self.make(aten.add.Tensor, *found)
                        total.meta[SUM] = found[1]
                        found[:] = [total]
                if zone.again:
                    self.ready = self._known(found[-1] for found in parts.values())
            wholes = {node: self._whole(node, found) for node, found in parts.items()}
            self._tie(wholes)
            for node, x in wholes.items():
                new = self._scaled(node, x)
                node.replace_all_uses_with(new)
        stable_topological_sort(graph)
        graph.eliminate_dead_code()
        return step

    def _leaves(self, node: fx.Node) -> bool:
        if self.zone.late is not None:
            return True  # what is made again reads it, or nothing does
        return any(u not in self.zone.nodes and u not in self.zone.ends for u in node.users)

    def _is_total(self, node: fx.Node) -> bool:
        """Whether a result is summed over the rows."""
        zone = self.zone
        return node in zone.ends and not (node.target in PLAIN and node.args[0] in zone.nodes)

    def _make_ones(self) -> None:
        """Make of 1 what is made of the tangent outside the zone."""
        zone = self.zone
        if (tangent := zone.tangent) is None:
            return
        self.ones[tangent] = constant(self.graph, 1.0, like=tangent)
        inside = {*zone.nodes, *zone.turned, *zone.ends, tangent}
        needed = zone.needed & zone.scaled - inside
        for node in [n for n in self.graph.nodes if n in needed]:
            self.ones[node] = copied(self.graph, node, self.ones, like=zone.product)

    def _whole(self, node: fx.Node, found: list[fx.Node]) -> fx.Node:
        """Make a node's value of some rows' ones, or of their sum."""
        shape = [*node.meta["val"].shape]
        x = found[0] if len(found) == 1 else self.make(aten.cat.default, found)
        if node.target is aten.mean.default:
            x = self.make(aten.div.Tensor, x, numel(node.all_input_nodes[0]))
        return x if [*x.meta["val"].shape] == shape else self.make(aten.view.default, x, shape)

    def _tie(self, wholes: dict[fx.Node, fx.Node]) -> None:
        """Let the loss need the gradients."""
        # Else the partitioner has the last rows' ones, which the forward pass does not need, in the
        # backward pass, and keeps all that they are made of.
        zone = self.zone
        losses = [node for node in wholes if node not in zone.scaled]
        if losses and (ready := self._known(wholes[n] for n in zone.scaled.intersection(wholes))):
            loss = wholes[losses[0]]
            wholes[losses[0]] = self.make(aten.where.self, ready, loss, loss)

    def _known(self, values: Iterable[fx.Node]) -> fx.Node | None:
        """Make a truth value that is there when some values are."""
        ready: Any = None
        for x in values:
            while x.meta["val"].ndim:
                x = self.make(aten.select.int, x, 0, 0)
                x.meta[SUM] = x  # of no kernel
            known = self.make(aten.eq.Tensor, x, x)
            ready = self.make(aten.logical_or.default, ready, known) if ready else known
        return ready

    def _scaled(self, node: fx.Node, x: fx.Node) -> fx.Node:
        """Multiply by the tangent what is proportional to it; restore its type."""
        zone = self.zone
        if node in zone.scaled and zone.tangent is not None:
            x = cast_to(x, torch.float32, like=node)
            x = make(self.graph, aten.mul.Tensor, x, zone.tangent, like=node)
        return cast_to(x, node.meta["val"].dtype, like=node)


class _Some:
    """The calls of a zone for rows from one to before another.

    Attributes:
        values: What they give, by the zone's nodes.
    """

    def __init__(self, rows: _Rows, start: int, stop: int) -> None:
        self._rows, self._make = rows, rows.make
        self._zone, self._layout = rows.zone, rows.zone.layout
        self._start, self._stop = start, stop
        self.values: dict[fx.Node, fx.Node] = {}
        self._numbers: dict[fx.Node, fx.Node] = {}
        nodes = {*self._zone.nodes, *self._zone.ends}
        for node in [n for n in rows.graph.nodes if n in nodes]:
            self.values[node] = self._ended(node) if node in self._zone.ends else self._called(node)

    def _called(self, node: fx.Node) -> fx.Node:
        """Call what a node calls, on some rows."""
        give, make = partial(self._given, node=node), self._make
        args: Any = node.args
        kwargs: Any = node.kwargs
        target: Any = node.target
        if target in PLAIN:
            *bias, a, b = args
            a = self._slice(a, 0)
            if ready := self._rows.ready:
                a = make(aten.where.self, ready, a, a)  # or it were the forward pass's product
            return make(target, *map(give, bias), a, b, **kwargs)
        x = args[0]
        if target in SAME:
            x, shape = give(x), [self._stop - self._start, self._layout.kind(node)]
            return x if [*x.meta["val"].shape] == shape else make(aten.expand.default, x, shape)
        if target is aten.gather.default:
            return make(target, self._given(x, x), 1, give(args[2]))
        if target is aten.topk.default:
            return make(target, self._given(x, x), args[1], 1, *args[3:])
        if target in SCATTERED:
            source, shape = give(args[3]), [self._stop - self._start, self._layout.columns]
            zeros = constant(self._rows.graph, 0.0, like=source, shape=shape)
            return make(target, zeros, 1, give(args[2]), source)
        if target in REDUCED:
            dims = 1 if target is aten.argmax.default else [1]
            return make(target, self._given(x, x), dims, True, **kwargs)
        args, kwargs = fx.map_arg((args, kwargs), give)
        return make(target, *args, **kwargs)

    def _ended(self, node: fx.Node) -> fx.Node:
        """Multiply or sum some rows; sums over rows are float32 parts."""
        zone, values = self._zone, self.values
        args: Any = node.args
        target: Any = node.target
        if target not in PLAIN:
            kind = torch.float32 if args[0].meta["val"].is_floating_point() else torch.int64
            wide = cast_to(values[args[0]], kind, like=zone.product)
            columns = target is aten.sum.dim_IntList
            return self._make(target if columns else aten.sum.default, wide, *([[0]] * columns))
        one: Any = args[0]
        other: Any = self._rows.ones.get(args[1], args[1])
        if one in zone.nodes:
            return self._make(target, values[one], other)
        if one in zone.turned:
            turned = self._make(aten.permute.default, values[args[0].args[0]], [1, 0])
            part = self._make(target, turned, self._slice(other, 0))
        else:
            part = self._make(target, self._slice(one, 1), values[other])
        return cast_to(part, torch.float32, like=zone.product)

    def _given(self, x: fx.Node, node: fx.Node) -> fx.Node:
        """Give what a node reads for these rows, as a matrix."""
        if x in self.values:
            return self.values[x]
        shape, value = node.meta["val"].shape, x.meta["val"]
        x, own = self._rows.ones.get(x, x), padded(x, shape)
        if math.prod(own) == 1:
            return self._make(aten.view.default, x, [1]) if len(value.shape) > 2 else x
        columns = own[-1] if self._layout.kind(node) > 1 else 1
        if columns > 1 and math.prod(own[:-1]) == 1:
            return self._make(aten.view.default, x, [1, columns])
        if columns == 1 and math.prod(own) == self._layout.rows:
            return self._number(x)
        whole = [*shape[:-1], columns] if self._layout.kind(node) > 1 else [*shape]
        if [*value.shape] != whole:
            x = self._make(aten.expand.default, x, whole)
        if len(whole) != 2 or whole[1] != columns:
            x = self._make(aten.reshape.default, x, [self._layout.rows, columns])
        return self._slice(x, 0)

    def _number(self, x: fx.Node) -> fx.Node:
        """Compute these rows' numbers of those that they are made of."""
        # Where they were cut from a table of all rows, Inductor joined all rows' gradients.
        if x not in self._numbers:
            inputs, rows = x.all_input_nodes, self._layout.rows
            target: Any = x.target
            plain = {numel(i) for i in inputs if i.meta["val"].ndim} == {rows}
            if plain and target in VIEWS and target not in TURNS:
                found = self._number(inputs[0])
            elif plain and target not in VIEWS and is_pointwise(x):
                own = {i: self._number(i) if i.meta["val"].ndim else i for i in inputs}
                args: Any = fx.map_arg((x.args, x.kwargs), own.__getitem__)
                found = self._make(target, *args[0], **args[1])
            else:
                found = self._slice(self._make(aten.reshape.default, x, [rows, 1]), 0)
            self._numbers[x] = found
        return self._numbers[x]

    def _slice(self, x: Any, dim: int) -> fx.Node:
        return self._make(aten.slice.Tensor, x, dim, self._start, self._stop)
