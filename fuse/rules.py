"""Rules that change an ATen graph before it is cut into kernels.

- A row's factor moves past the product: (x · r · g) W = ((x · g) W) · r. So the norm between two
  products is a number a row: the first kernel stores x · g with the row's statistic, and the second
  one scales its rows.
- What is gathered of a difference to a number a row is gathered first: log-probabilities of some
  words need no logits. Where they were rounded before, gradients are made of unrounded ones, as
  Inductor has it for such a pair of casts.
- A softmax of scaled numbers scales them first, as the model does. Inductor takes the largest off
  before; the logarithm of the sum is no statistic of the scaled ones then.
- A row that is 0 but at one place sums to what is there: the gradient of a loss is then made in one
  pass over the logits.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import ancestors, reached
from coda_agent.agent.authors.composer.retrace import share
from coda_agent.fuse.fp8 import quantise_products
from coda_agent.fuse.head import hold_some_rows
from coda_agent.fuse.merge import merge_gradients
from coda_agent.fuse.nodes import (
    CASTS,
    PRODUCTS,
    call_of,
    cast_to,
    make,
    number,
    shape_of,
)
from coda_agent.fuse.spelling import compare_floats, join_logsumexp, spell
from coda_agent.fuse.tables import hold_tables

aten = torch.ops.aten
CARRIED = "a row's factor is carried past {}"
_VIEWS = (aten.view.default, aten._unsafe_view.default, aten.reshape.default, aten.clone.default)


def prepare(graph: fx.Graph, *, fp8: bool = False) -> list[str]:
    """Apply the rules, and the option `fp8`; list what changed."""
    scale_first(graph)
    spell(graph)
    share(graph)
    join_logsumexp(graph)
    rules: list[tuple[str, Callable[[fx.Graph], Iterable[str]]]] = [
        (CARRIED, carry),
        *[("{} is in FP8", quantise_products)] * fp8,
        ("{} gathers before a number a row is taken off", gather_first),
        ("{} sums rows of one number", sum_of_one),
        ("{} has gradients of other weights", merge_gradients),
    ]
    notes: list[str] = []
    for said, rule in rules:
        if changed := [*rule(graph)]:
            notes += map(said.format, changed)
            graph.eliminate_dead_code()
    compare_floats(graph)
    return notes + hold_some_rows(graph) + hold_tables(graph)


def scale_first(graph: fx.Graph) -> None:
    """Scale numbers before the largest of each row is taken off, where Inductor does not.

    It multiplies them by the factor's sign, a 1 that a model does not have.
    """
    for node in [n for n in graph.nodes if n.target in (aten.mul.Tensor, aten.div.Tensor)]:
        largest, factor = _taken_off(node.args[0]), node.args[1]
        if largest is None or not isinstance(factor, int | float) or factor <= 0:
            continue
        x: Any = largest.args[0]
        if x.target is not aten.mul.Tensor or x.args[1] != 1:
            continue
        x = x.args[0]
        for user in [*node.users]:  # from torch 2.13 on the model's own is beside it
            if user.target is aten.where.self and user.args[1] is node:
                if _is_scaled(user.args[2], node, x, largest.args[1:]):
                    user.replace_all_uses_with(user.args[2])  # pyright: ignore[reportArgumentType]
        with graph.inserting_before(node):
            scaled = make(graph, node.target, x, factor, like=node)
            peak = make(graph, aten.amax.default, scaled, *largest.args[1:], like=node)
            result = make(graph, aten.sub.Tensor, scaled, peak, like=node)
        node.replace_all_uses_with(result)


def _taken_off(node: object) -> fx.Node | None:
    """Find the largest of numbers that a node takes off them."""
    difference = call_of(node, aten.sub.Tensor)
    if difference is None or difference.kwargs:
        return None
    largest = call_of(difference.args[1], aten.amax.default)
    return largest if largest is not None and largest.args[0] is difference.args[0] else None


def _is_scaled(node: Any, scaling: fx.Node, x: fx.Node, dims: object) -> bool:
    """Whether a node takes the largest off a row of x, scaled as by `scaling`."""
    largest = _taken_off(node)
    if largest is None or largest.args[1:] != dims:
        return False
    scaled = _uncast(largest.all_input_nodes[0])
    if scaled.target is not scaling.target or scaled.args[1:] != scaling.args[1:]:
        return False
    return _uncast(scaled.all_input_nodes[0]) is _uncast(x)


def _uncast(node: fx.Node) -> fx.Node:
    while node.target in CASTS:
        (node,) = node.all_input_nodes
    return node


def carry(graph: fx.Graph) -> Iterator[str]:
    """Move rows' factors past a second product; names of the products."""
    operands: dict[object, fx.Node] = {}
    for product in [node for node in graph.nodes if node.target is aten.mm.default]:
        a = product.args[0]
        # Before their factor rows leave float16's range: a residual of 4000 by a weight of 20 did.
        held = product.meta["val"].dtype is torch.float16
        if not held and isinstance(a, fx.Node) and (parts := _parts(a)) is not None:
            wide, rows = parts
            first = operands.get(tuple(wide))
            with graph.inserting_before(product if first is None else first.next):
                x = first or operands.setdefault(tuple(wide), _multiplied(graph, a, wide))
            with graph.inserting_before(product):
                scaled = [make(graph, aten.mm.default, x, product.args[1], like=product)]
                for factor in rows:
                    row = _shaped(graph, factor, a, 1)
                    scaled.append(make(graph, aten.mul.Tensor, scaled[-1], row, like=product))
                end = cast_to(scaled[-1], product.meta["val"].dtype, like=product)
            exact: Any = x.args[0] if x not in wide and x.target in CASTS else x
            scaled[0].meta[_CARRIED] = product.name, exact, scaled[1:], end
            product.replace_all_uses_with(end)
            yield product.name


_CARRIED = "carried"
"""Of a product past which factors were moved: its former name, the operand before it was rounded,
the calls, and the result."""


def carried_ends(nodes: Iterable[fx.Node]) -> Iterator[tuple[fx.Node, fx.Node]]:
    """List products past which factors were carried, and what has these factors."""
    for node in nodes:
        if _CARRIED in node.meta:
            yield node, node.meta[_CARRIED][3]


def carried_for_nothing(graph: fx.Graph, taken: Container[fx.Node]) -> dict[str, fx.Node]:
    """Find products past which a factor was carried, and no kernel takes part; by former names.

    Args:
        graph: It.
        taken: Nodes that kernels compute.
    """
    found: dict[str, fx.Node] = {}
    for product in graph.find_nodes(op="call_function", target=aten.mm.default):
        name, _, calls, end = product.meta.get(_CARRIED, ("", None, (), None))
        x: Any = product.args[0]
        alike = all(_CARRIED in user.meta for user in x.users)
        if name and alike and not any(n in taken for n in (x, *x.users, *calls, end)):
            found[name] = product
    return found


def carry_back(products: Iterable[fx.Node]) -> None:
    """Give operands of products their rows' factors again, which were carried past them."""
    for product in products:
        graph, x, b = product.graph, *product.all_input_nodes
        _, a, calls, end = product.meta[_CARRIED]
        with graph.inserting_before(product):
            for call in calls:
                a = make(graph, aten.mul.Tensor, a, call.args[1], like=x)
            a = cast_to(a, x.meta["val"].dtype, like=x)
            end.replace_all_uses_with(make(graph, aten.mm.default, a, b, like=product))


def _parts(a: fx.Node) -> tuple[list[fx.Node], list[fx.Node]] | None:
    """Part factors that vary along a row from those of whole rows."""
    factors = [*_factors(a)]
    extent = a.meta["val"].shape[-1]
    wide = [x for x in factors if x.meta["val"].ndim and x.meta["val"].shape[-1] == extent]
    rows = [x for x in factors if x not in wide]
    count = a.meta["val"].shape[0]
    if not rows or any(x.meta["val"].numel() != count for x in rows):
        return None
    whole = [x for x in wide if x.meta["val"].numel() == count * extent]
    flat = all(x in whole or x.meta["val"].ndim == 1 for x in wide)
    # A factor that does not follow from the row itself is there before the row's own product.
    last = {product for x in whole for product in _last_products(x)}
    if not flat or not last or any(last.isdisjoint(ancestors([x])) for x in rows):
        return None
    return wide, rows


def _multiplied(graph: fx.Graph, a: fx.Node, wide: list[fx.Node]) -> fx.Node:
    """The product of factors, as an operand."""
    extent = a.meta["val"].shape[-1]
    shaped = [_shaped(graph, x, a, extent) if x.meta["val"].ndim > 1 else x for x in wide]
    x = shaped[0]
    for factor in shaped[1:]:
        x = make(graph, aten.mul.Tensor, x, factor, like=a)
    return cast_to(x, a.meta["val"].dtype, like=a)


def _factors(node: fx.Node) -> Iterator[fx.Node]:
    """List an operand's factors; what others need is not taken apart."""
    alone = all(user.target in (*PRODUCTS, *_VIEWS) for user in node.users) or len(node.users) == 1
    source = node.args[0] if node.args else None
    if alone and isinstance(source, fx.Node):
        if node.target in _VIEWS and node.meta["val"].shape[-1] == source.meta["val"].shape[-1]:
            yield from _factors(source)
            return
        types = [x.meta["val"].dtype for x in (node, source)]
        if node.target in CASTS and all(t.is_floating_point and t.itemsize > 1 for t in types):
            yield from _factors(source)
            return
        other = node.args[1] if node.target is aten.mul.Tensor else None
        if isinstance(other, fx.Node) and isinstance(other.meta["val"], torch.Tensor):
            yield from _factors(source)
            yield from _factors(other)
            return
    yield node


def _last_products(node: fx.Node) -> set[fx.Node]:
    """Find the last products that a value is computed from."""
    makers: Callable[[fx.Node], Iterable[fx.Node]] = lambda n: (
        () if n.target in PRODUCTS else [x for x in n.all_input_nodes if not _is_of_rows(x)]
    )
    return {n for n in reached([node], makers) if n.target in PRODUCTS}


def _is_of_rows(node: fx.Node) -> bool:
    value = node.meta.get("val")
    return isinstance(value, torch.Tensor) and value.ndim > 1 and value.shape[-1] == 1


def gather_first(graph: fx.Graph) -> Iterator[str]:
    """Gather before subtracting a number a row; names of what is gathered."""
    for node in [n for n in graph.nodes if n.target is aten.gather.default]:
        rounded, dim, index = node.args[:3]
        is_cast = isinstance(rounded, fx.Node) and rounded.target in CASTS
        source = call_of(rounded.args[0] if is_cast else rounded, aten.sub.Tensor)
        x, row = source.args[:2] if source is not None and not source.kwargs else (None, None)
        if source is None or not isinstance(x, fx.Node) or not isinstance(row, fx.Node):
            continue
        if row.meta["val"].ndim != x.meta["val"].ndim or row.meta["val"].shape[dim] != 1:
            continue
        if x.meta["val"].shape != source.meta["val"].shape or not _has_rows(index, x, dim):
            continue
        with graph.inserting_before(node):
            first = make(graph, aten.gather.default, x, dim, index, like=node)
            result = make(graph, aten.sub.Tensor, first, row, like=node)
            result = cast_to(result, node.meta["val"].dtype, like=node)
        node.replace_all_uses_with(result)
        for back in [u for u in rounded.users if u is not node] if is_cast else []:
            if back.target in CASTS and back.meta["val"].dtype == source.meta["val"].dtype:
                back.replace_all_uses_with(source)  # else the rounded ones were kept for it
        yield node.name


def _has_rows(index: fx.Node, x: fx.Node, dim: int) -> bool:
    """Whether an index has all rows of x, whatever symbols are."""
    sizes = [list(map(str, shape_of(node))) for node in (index, x)]
    for own in sizes:
        own[dim] = ""
    return sizes[0] == sizes[1]


def sum_of_one(graph: fx.Graph) -> Iterator[str]:
    """Sum rows of one number without the zeros; names of the sums."""
    for node in graph.find_nodes(op="call_function", target=aten.sum.dim_IntList):
        x, dims = node.args[:2]
        if not isinstance(x, fx.Node) or x.target is not aten.mul.Tensor or node.kwargs:
            continue
        ndim, keeps = x.meta["val"].ndim, node.args[2:] == (True,)
        pairs = [x.args, x.args[::-1]] if [d % ndim for d in dims] == [ndim - 1] and keeps else []
        for hot, row in pairs:
            if isinstance(row, fx.Node) and _width(row) == 1 and (found := _one_hot(hot)):
                index, value, columns = found
                with graph.inserting_before(node):
                    above = make(graph, aten.ge.Scalar, index, 0, like=node)
                    below = make(graph, aten.lt.Scalar, index, columns, like=node)
                    hit = make(graph, aten.logical_and.default, above, below, like=node)
                    whole = make(graph, aten.mul.Tensor, row, value, like=node)
                    result = make(graph, aten.mul.Tensor, whole, hit, like=node)
                    result = cast_to(result, node.meta["val"].dtype, like=node)
                if result.meta["val"].shape != node.meta["val"].shape:
                    continue
                node.replace_all_uses_with(result)
                yield node.name
                break


def _one_hot(node: Any) -> tuple[fx.Node, float, int] | None:
    """Read the index, number and columns of rows of one number."""
    if (node := call_of(node, aten.where.self)) is None:
        return None
    at, value, zero = call_of(node.args[0], aten.eq.Tensor), *map(number, node.args[1:])
    if at is None or value is None or zero != 0:
        return None
    index: Any
    places: Any
    for index, places in (at.args, at.args[::-1]):
        while isinstance(places, fx.Node) and places.target in _VIEWS:
            places = places.args[0]
        if isinstance(index, fx.Node) and index.target is aten.expand.default:
            index = index.args[0]
        is_row = isinstance(index, fx.Node) and _width(index) == 1
        is_row = is_row and not index.meta["val"].is_floating_point()
        if is_row and (places := call_of(places, torch.ops.prims.iota.default)) is not None:
            start, step = places.kwargs.get("start"), places.kwargs.get("step")
            if (start, step, places.args[0]) == (0, 1, _width(at)):
                return index, value, _width(at)
    return None


def _width(node: fx.Node) -> Any:
    """Columns of a node's value; 0 where it has none."""
    shape = node.meta["val"].shape
    return shape[-1] if shape else 0


def _shaped(graph: fx.Graph, node: fx.Node, a: fx.Node, columns: int) -> fx.Node:
    """A factor as a matrix of the operand's rows."""
    if [*node.meta["val"].shape] == [a.meta["val"].shape[0], columns]:
        return node
    with graph.inserting_after(node):
        return make(graph, aten.view.default, node, [-1, columns], like=node)
