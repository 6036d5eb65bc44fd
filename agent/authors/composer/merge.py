"""Products of a traced graph as one: side by side, or summed."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import fx

from coda_agent.agent.authors.composer.axes import PRODUCTS
from coda_agent.agent.authors.composer.calls import name_of, shape_of
from coda_agent.agent.authors.composer.ports import Port
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.retrace import TURN, Retraced, needs_product

aten = torch.ops.aten


@dataclass(frozen=True)
class Merged:
    """What became of several products.

    Attributes:
        packed: Of placeholders that stand for several values, these side by side.
        a: The one of A, where it is one.
        b: The one of B, where it is one.
        lengths: Of products that are summed, their extents along K.
    """

    packed: Mapping[fx.Node, Port] = field(default_factory=dict)
    a: fx.Node | None = None
    b: fx.Node | None = None
    lengths: tuple[int, ...] = ()


def products(graph: fx.Graph) -> list[fx.Node]:
    """The products of a traced graph."""
    return [n for n in graph.nodes if n.op == "call_function" and name_of(n) in PRODUCTS]


def merge(traced: Retraced) -> Merged:
    """Make one product of those that share A or are summed.

    Raises:
        Refusal: they are neither.
    """
    first, *others = products(traced.graph) or [None]
    if first is None:
        raise Refusal("has no product of two matrices")
    if not others:
        return Merged()
    every = [first, *others]
    for node in every:
        sides = [x for x in node.args if isinstance(x, fx.Node)]
        alike = shape_of(node) == shape_of(first) or sides[0] is first.args[0]
        if any(map(needs_product, sides)) or name_of(node) != "mm" or not alike:
            raise Refusal("is a second GEMM; a kernel has one", "make a kernel of each", node)
    if all(node.args[0] is first.args[0] for node in every):
        return _side_by_side(traced, every)
    return _summed(traced, every)


def _side_by_side(traced: Retraced, every: Sequence[fx.Node]) -> Merged:
    """Make slices of one product with all B side by side."""
    pieces = [_piece(traced, node, 1) for node in every]
    widths, (_, k) = [shape_of(n)[1] for n in every], shape_of(every[0].args[0])
    graph = traced.graph
    place = _place(graph, "packed_b", (sum(widths), k), every[0].args[1])
    with graph.inserting_before(every[0]):
        turned = graph.call_function(aten.permute.default, (place, [1, 0]))
        whole = graph.call_function(aten.mm.default, (every[0].args[0], turned))
    _value(turned, (k, sum(widths)), place)
    _value(whole, (shape_of(every[0])[0], sum(widths)), every[0])
    factor = _common_factor(every)
    if factor is not None:
        every = [next(iter(node.users)) for node in every]
        with graph.inserting_before(every[0]):
            scaled = graph.call_function(aten.mul.Tensor, (whole, factor))
        _value(scaled, shape_of(whole), every[0])
        whole = scaled
    start, parts = 0, dict[fx.Node, fx.Node]()
    for node, width in zip(every, widths, strict=True):
        with graph.inserting_before(node):
            part = graph.call_function(aten.slice.Tensor, (whole, 1, start, start + width))
        part.meta = dict(node.meta)
        parts[node] = part
        start += width
    traced.replace(parts)
    return Merged({place: _packed(pieces, 0)}, b=place)


def _common_factor(every: Sequence[fx.Node]) -> fx.Node | None:
    """The factor of rows of all these products, if there is one."""
    factors = set[fx.Node]()
    for node in every:
        users = [*node.users]
        if len(users) != 1 or users[0].target is not aten.mul.Tensor:
            return None
        others = [x for x in users[0].args if isinstance(x, fx.Node) and x is not node]
        if len(others) != 1 or shape_of(others[0]) != (shape_of(node)[0], 1):
            return None
        factors.add(others[0])
    return factors.pop() if len(factors) == 1 else None


def _summed(traced: Retraced, every: Sequence[fx.Node]) -> Merged:
    """Make each product one of a range of K of all."""
    lengths = tuple(shape_of(node.args[0])[1] for node in every)
    (m, n), k, graph = shape_of(every[0]), sum(lengths), traced.graph
    packed: dict[fx.Node, Port] = {}
    for side, rows in ((0, m), (1, n)):
        pieces = [_piece(traced, node, side) for node in every]
        place = _place(graph, f"packed_{'ab'[side]}", (rows, k), every[0].args[side])
        packed[place] = _packed(pieces, 1)
        start = 0
        for node, length in zip(every, lengths, strict=True):
            with graph.inserting_before(node):
                part = graph.call_function(aten.slice.Tensor, (place, 1, start, start + length))
                turned = graph.call_function(aten.permute.default, (part, [1, 0]))
            _value(part, (rows, length), place)
            _value(turned, (length, rows), place)
            node.update_arg(side, turned if side else part)
            start += length
    traced.clean()
    a, b = packed
    return Merged(packed, a, b, lengths)


def _piece(traced: Retraced, product: fx.Node, side: int) -> Port:
    """One side of a product as an original value, (rows, K)."""
    operand = product.args[side]
    assert isinstance(operand, fx.Node)
    turned = TURN * bool(side)
    if side and name_of(operand) in ("permute", "t", "transpose"):
        inner = operand.args[0]
        if isinstance(inner, fx.Node) and len(shape_of(inner)) == 2 and traced.user(inner):
            operand, turned = inner, ()
    if (user := traced.user(operand)) is None:
        raise Refusal("has an operand that is no value of the graph", "", product)
    return Port("AB"[side], user, traced.part(operand) + turned, (), operand.meta["val"].dtype)


def _packed(pieces: Sequence[Port], dim: int) -> Port:
    first = pieces[0]
    return Port(first.name, None, (), (), first.dtype, tuple(pieces), dim)


def _place(graph: fx.Graph, name: str, shape: Sequence[int], like: object) -> fx.Node:
    with graph.inserting_before(next(iter(graph.nodes))):
        place = graph.placeholder(name)
    _value(place, shape, like)
    return place


def _value(node: fx.Node, shape: Sequence[int], like: object) -> None:
    assert isinstance(like, fx.Node)
    dtype = like.meta["val"].dtype
    node.meta = {"val": torch.empty(tuple(shape), dtype=dtype, device="meta")}
