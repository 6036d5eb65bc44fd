"""Calls of an ATen graph, spelled as rules and composer read them.

- A part of a split tensor is a slice, a call of one result: so a region may have the halves that a
  rotation exchanges.
- What is taken of a dim of one, or put there, is a view, and so is where that dim moves.
- A batch of one product is that product.
- The largest of a row, with its place, is two reductions. A row's element at a whole number is
  gathered, also where rows are counted.
- What is scattered into zeros, one number a row, is a comparison with the column's number; of whole
  numbers it is one of float32.
- The logarithm of a row's sum of exponentials, whose largest is taken off before, is one statistic,
  which a kernel has as a whole. Where none takes it, it is spelled out again.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Callable
from typing import Any, cast

import torch
from torch import fx
from torch.fx.node import Argument

from coda_agent.agent.authors.composer.retrace import SYMBOLIC
from coda_agent.fuse.nodes import (
    CASTS,
    SCATTERED,
    SHORT,
    call_of,
    constant,
    device_of,
    is_fixed,
    is_one,
    is_zeros,
    make,
    number,
    numel,
    padded,
    root,
    shape_of,
)

aten = torch.ops.aten
_COUNTED = (torch.ops.prims.iota.default, aten.arange.start_step, aten.arange.default)
_EXACT = 2**24
_SQUEEZES = (aten.squeeze.dim, aten.squeeze.dims)
_SPLITS = (aten.split.Tensor, aten.split_with_sizes.default)
_ONES: dict[object, Callable[..., object]] = {
    aten.select.int: aten.squeeze.dim,
    aten.select_scatter.default: aten.unsqueeze.default,
}
_INDEXED = (aten.index.Tensor, aten.index_put.default)


def spell(graph: fx.Graph) -> None:
    """Spell parts, views, products, largest elements, indices and scatters of a graph."""
    spell_parts(graph)
    spell_views(graph)
    spell_products(graph)
    spell_largest(graph)
    spell_indices(graph)
    spell_scatter(graph)
    graph.eliminate_dead_code()


def spell_parts(graph: fx.Graph) -> None:
    """Spell a split or unbound tensor's parts as calls of one result."""
    for node in [n for n in graph.nodes if n.target in (*_SPLITS, aten.unbind.int)]:
        parts = [] if node.kwargs else _spelled(node)
        for part in [*node.users] if parts else []:
            with graph.inserting_before(part):
                piece = graph.call_function(*parts[part.args[1]])
            piece.meta = dict(part.meta)
            part.replace_all_uses_with(piece)


def _spelled(node: fx.Node) -> list[tuple[Callable[..., object], tuple[Argument, ...]]]:
    """List a call for each part, if split by numbers; else none."""
    count = len(node.meta["val"])
    if node.target is aten.unbind.int:
        x, dim = (*node.args, 0)[:2]
        return [(aten.select.int, (x, dim, i)) for i in range(count)]
    x, sizes, dim = (*node.args, 0)[:3]
    sizes = sizes if isinstance(sizes, list) else [sizes] * count
    if not all(isinstance(size, int) for size in sizes):
        return []
    ends = itertools.pairwise(itertools.accumulate(sizes, initial=0))
    return [(aten.slice.Tensor, (x, dim, start, stop)) for start, stop in ends]


def spell_views(graph: fx.Graph) -> None:
    """Spell as views what takes, puts or moves dims of one element."""
    for node in [n for n in graph.nodes if n.target in _ONES]:
        whole, (*_, x, dim, _) = node.args[0], node.args
        alike = whole.meta["val"].dtype == x.meta["val"].dtype
        if is_one(whole, dim) and alike and (x is whole or x.meta["val"].is_contiguous()):
            with graph.inserting_before(node):
                view = graph.call_function(_ONES[node.target], (x, dim))
            view.meta = dict(node.meta)
            node.replace_all_uses_with(view)
    for node in graph.find_nodes(op="call_function", target=aten.permute.default):
        x, order = node.args
        order = [d % len(order) for d in order]
        ones = [d for d in order if is_one(x, d)]
        places = [d for d in order if d not in ones]
        if not x.meta["val"].is_contiguous():  # what follows was traced with other strides
            continue
        if ones and places == sorted(places) and all(u.op != "output" for u in node.users):
            with graph.inserting_before(node):
                view = make(graph, aten.squeeze.dims, x, ones, like=node)
                for i in [i for i, d in enumerate(order) if d in ones]:
                    view = make(graph, aten.unsqueeze.default, view, i, like=node)
            node.replace_all_uses_with(view)


def spell_products(graph: fx.Graph) -> None:
    """Spell a batch of one product (einsum's) as that product."""
    for node in graph.find_nodes(op="call_function", target=aten.bmm.default):
        if is_one(node, 0) and node.meta["val"].dtype in SHORT:
            with graph.inserting_before(node):
                a, b = (make(graph, aten.squeeze.dim, x, 0, like=node) for x in node.args)
                product = make(graph, aten.mm.default, a, b, like=node)
                result = make(graph, aten.unsqueeze.default, product, 0, like=node)
            node.replace_all_uses_with(result)


def spell_largest(graph: fx.Graph) -> None:
    """Spell the largest along a dim, and its place, as two calls."""
    for node in graph.find_nodes(op="call_function", target=aten.max.dim):
        x: Any
        x, dim, keep = (*node.args, False)[:3]
        if node.kwargs or x.meta["val"].dtype is torch.bool:  # which argmax does not take
            continue
        for part in [user for user in node.users if user.target is operator.getitem]:
            target = aten.argmax.default if part.args[1] else aten.amax.default
            with graph.inserting_before(part):
                found = make(graph, target, x, dim if part.args[1] else [dim], keep, like=part)
            part.replace_all_uses_with(found)


def spell_indices(graph: fx.Graph) -> None:
    """Spell an element of each row as what is gathered or scattered."""
    for node in [n for n in graph.nodes if n.target in _INDEXED]:
        x, indices, *rest = node.args
        columns = _columns(x.meta["val"].shape, indices)
        if columns is None or SYMBOLIC in node.meta:  # sizes that are alike now may be others
            continue
        if not rest and node.meta["val"].shape != columns.meta["val"].shape:
            continue
        if rest and (rest[1:] != [True] or rest[0].meta["val"].shape != columns.meta["val"].shape):
            continue
        with graph.inserting_before(node):
            behind = make(graph, aten.lt.Scalar, columns, 0, like=node)  # it counts from the end
            turned = make(graph, aten.add.Tensor, columns, x.meta["val"].shape[-1], like=node)
            place = make(graph, aten.where.self, behind, turned, columns, like=node)
            at = make(graph, aten.unsqueeze.default, place, -1, like=node)
            if rest:
                source = make(graph, aten.unsqueeze.default, rest[0], -1, like=node)
                found = make(graph, aten.scatter_add.default, x, -1, at, source, like=node)
            else:
                found = make(graph, aten.gather.default, x, -1, at, like=node)
                found = make(graph, aten.squeeze.dim, found, -1, like=node)
        node.replace_all_uses_with(found)


def _columns(shape: torch.Size, indices: Any) -> fx.Node | None:
    """Find the last of indices, where those before it count rows."""
    if len(indices) != len(shape) or not all(isinstance(x, fx.Node) for x in indices):
        return None
    *counts, columns = indices
    if columns.meta["val"].shape != shape[:-1] or columns.meta["val"].dtype != torch.int64:
        return None
    for dim, count in enumerate(counts):
        own = padded(count, counts)
        if not _is_counted(_source(count)) or numel(_source(count)) != shape[dim]:
            return None
        if [i for i, n in enumerate(own) if n != 1] != [dim] * (shape[dim] != 1):
            return None
    return columns


def _is_counted(node: fx.Node) -> bool:
    """Whether a node's value is 0, 1, 2, ..."""
    if node.target not in _COUNTED:
        return False
    if node.target is _COUNTED[0]:
        return (node.kwargs.get("start"), node.kwargs.get("step")) == (0, 1)
    return len(node.args) == 1 or (node.args[0], *node.args[2:]) in ((0,), (0, 1))


def spell_scatter(graph: fx.Graph) -> None:
    """Spell one number a row, scattered into zeros, by comparing columns."""
    for node in [n for n in graph.nodes if n.target in SCATTERED]:
        zeros, dim, index, source = node.args[:4]
        value = node.meta["val"]
        last = isinstance(zeros, fx.Node) and dim % max(value.ndim, 1) == value.ndim - 1
        if not last or not is_zeros(zeros):
            continue
        shape = [*shape_of(node)[:-1], 1]
        if not is_fixed(node, -1) or any(
            str([*shape_of(x)]) != str(shape) for x in (index, source)
        ):
            continue
        with graph.inserting_before(node):
            columns = graph.call_function(
                torch.ops.prims.iota.default, (value.shape[-1],),
                {"start": 0, "step": 1, "dtype": torch.int64, "device": device_of(node),
                 "requires_grad": False},
            )  # fmt: skip
            columns.meta["val"] = index.meta["val"].new_empty(value.shape[-1:])
            hit = make(graph, aten.eq.Tensor, index, columns, like=node)
            none = constant(graph, 0.0, like=node)
            result = make(graph, aten.where.self, hit, source, none, like=node)
        node.replace_all_uses_with(result)


def compare_floats(graph: fx.Graph) -> None:
    """Compare rows' whole numbers with columns' as float32, where it is exact."""
    for node in graph.find_nodes(op="call_function", target=aten.eq.Tensor):
        counted = [x for x in node.all_input_nodes if _is_counted(_source(x))]
        whole = all(x.meta["val"].dtype == torch.int64 for x in node.all_input_nodes)
        two = len(node.all_input_nodes) == 2  # not a value and itself
        if whole and two and len(counted) == 1 and numel(_source(counted[0])) <= _EXACT:
            with graph.inserting_before(node):
                node.args = tuple(_float(graph, x) for x in node.all_input_nodes)


def _source(x: fx.Node) -> fx.Node:
    """Find what a value is views of, expanded or not."""
    return root(x, aten.expand.default)


def _float(graph: fx.Graph, x: fx.Node) -> fx.Node:
    """Cast before views."""
    if x is _source(x):
        return make(graph, CASTS[-1], x, torch.float32, like=x)
    inner = _float(graph, x.all_input_nodes[0])
    return make(graph, cast("Any", x.target), inner, *x.args[1:], like=x)


def join_logsumexp(graph: fx.Graph) -> None:
    """Join a logarithm of summed exponentials whose largest was taken off."""
    for log in graph.find_nodes(op="call_function", target=aten.log.default):
        total = call_of(log.args[0], aten.sum.dim_IntList)
        shifted = total and call_of(total.args[0], aten.exp.default)
        difference = shifted and call_of(shifted.args[0], aten.sub.Tensor)
        if total is None or difference is None or difference.kwargs or total.kwargs:
            continue
        x, shift = difference.args
        dims: Any = total.args[1]
        chosen = call_of(shift, aten.where.self)  # torch.logsumexp takes no infinity off
        largest = call_of(shift if chosen is None else chosen.args[2], aten.amax.default)
        if largest is None or largest.args[0] is not x or largest.args[1:] != (dims, True):
            continue
        if chosen is not None and not _is_finite(chosen, largest):
            continue
        users = [*log.users]
        if chosen is not None:
            shifts = [root(u.all_input_nodes[-1], *_SQUEEZES) for u in users]
            if {u.target for u in users} - {aten.add.Tensor} or {*shifts} - {chosen}:
                continue
            sizes = {str(shape_of(n)) for u in users for n in (u, *u.all_input_nodes)}
            if any(u.kwargs for u in users) or sizes - {str(shape_of(log))}:
                continue
        elif len(total.args) < 3 or any(
            u.target is not aten.sub.Tensor or u.kwargs or u.args != (difference, log)
            for u in users
        ):
            continue
        with graph.inserting_after(log):
            joined = make(graph, aten.logsumexp.default, x, dims, True, like=log)
        for user in users:
            if chosen is None:
                user.args = (x, joined)
                continue
            with graph.inserting_before(user):
                row = make(graph, aten.where.self, chosen.args[0], largest, joined, like=log)
                if len(total.args) < 3:  # it keeps no dims
                    row = make(graph, aten.squeeze.dims, row, dims, like=log)
            user.replace_all_uses_with(row)
    graph.eliminate_dead_code()


def _is_finite(chosen: fx.Node, largest: fx.Node) -> bool:
    """Whether 0 is chosen where the largest is infinite, and nowhere else."""
    infinite = call_of(chosen.args[0], aten.eq.Scalar)
    size = infinite and call_of(infinite.args[0], aten.abs.default)
    if infinite is None or size is None or number(chosen.args[1]) != 0:
        return False
    return infinite.args[1:] == (math.inf,) and size.args == (largest,)


def spell_logsumexp(graph: fx.Graph) -> None:
    """Spell out what `join_logsumexp` joined, for Inductor."""
    for node in graph.find_nodes(op="call_function", target=aten.logsumexp.default):
        x, *dims = node.args
        with graph.inserting_before(node):
            largest = make(graph, aten.amax.default, x, *dims, like=node)
            shifted = make(graph, aten.sub.Tensor, x, largest, like=node)
            exp = make(graph, aten.exp.default, shifted, like=node)
            total = make(graph, aten.sum.dim_IntList, exp, *dims, like=node)
            log = make(graph, aten.log.default, total, like=node)
            whole = make(graph, aten.add.Tensor, log, largest, like=node)
        for user in [*node.users]:
            if user.target is aten.sub.Tensor and user.args == (x, node):
                user.args = (shifted, log)
        node.replace_all_uses_with(whole)
        graph.erase_node(node)
    graph.eliminate_dead_code()
