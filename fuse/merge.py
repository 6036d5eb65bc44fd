"""Gradients' products that become one, for weights of one operand.

Where y₁ = x W₁ᵀ, y₂ = x W₂ᵀ, …, the gradient of x is one product, (dy₁ | dy₂ | …) (W₁; W₂; …), and
those of the weights are the rows of (dy₁ | dy₂ | …)ᵀ x. To lay the dy side by side costs little
where most of them are made pointwise: attention's gradients are rotated in any case. What a product
gives stays as it is.
"""

from __future__ import annotations

import operator
from collections.abc import Sequence

import torch
from torch import fx
from torch._inductor.pattern_matcher import stable_topological_sort

from coda_agent.agent.authors.composer.calls import reached
from coda_agent.fuse.nodes import (
    PRODUCTS,
    TURNS,
    VIEWS,
    are_products,
    is_backward,
    is_cheap,
    is_turn,
    make,
    numel,
    root,
)

aten = torch.ops.aten


def merge_gradients(graph: fx.Graph) -> list[str]:
    """Merge gradients' products of one operand; name the first of each."""
    groups: dict[fx.Node, list[tuple[fx.Node, fx.Node]]] = {}
    for node in graph.find_nodes(op="call_function", target=aten.mm.default):
        turned, x = node.args
        if isinstance(turned, fx.Node) and is_turn(turned) and isinstance(x, fx.Node):
            (dy,) = turned.all_input_nodes
            # Beside a bias's sum, made with it, one product for three took 1 % more on an H100.
            if is_backward(node) and _is_made(dy) and are_products(dy.users):
                groups.setdefault(x, []).append((node, dy))
    merged: list[str] = []
    for x, found in groups.items():
        dys = [dy for _, dy in found]
        shapes = {(dy.meta["val"].shape[0], dy.meta["val"].dtype) for dy in dys}
        new = sum(numel(dy) for dy in dys if root(dy).target not in (operator.getitem, *VIEWS))
        if len({*dys}) == len(dys) > 1 and len(shapes) == 1 and 2 * new >= sum(map(numel, dys)):
            merged.append(found[0][0].name)
            _merge(graph, x, [weight for weight, _ in found], dys)
    if merged:
        stable_topological_sort(graph)
    return merged


def _is_made(node: fx.Node) -> bool:
    """Whether a value is computed, but not pointwise of a product."""
    makers = reached(
        [node], lambda n: n.all_input_nodes if is_cheap(n) or n.target is aten.clone.default else ()
    )
    if any(n.target in PRODUCTS for n in makers):
        return False
    start = root(node)
    return start not in makers or start.op == "call_function"


def _merge(graph: fx.Graph, x: fx.Node, weights: Sequence[fx.Node], dys: Sequence[fx.Node]) -> None:
    """Merge gradients of weights, and the operand's where they are summed."""
    like = weights[0]
    with graph.inserting_after(max([x, *dys])):
        side = make(graph, aten.cat.default, [*dys], 1, like=like)
    with graph.inserting_after(side):
        turned = make(graph, aten.permute.default, side, [1, 0], like=like)
    with graph.inserting_after(turned):
        whole = make(graph, aten.mm.default, turned, x, like=like)
    start = 0
    for weight, dy in zip(weights, dys, strict=True):
        end = start + dy.meta["val"].shape[1]
        with graph.inserting_after(whole):
            part = make(graph, aten.slice.Tensor, whole, 0, start, end, like=weight)
        weight.replace_all_uses_with(part)
        start = end
    found = [pair for dy in dys if (pair := _summed(dy))]
    if len(found) < len(dys) or len({end for _, end in found}) > 1:
        return
    first, *others = (product for product, _ in found)
    matrices = [product.all_input_nodes[1] for product in (first, *others)]
    with graph.inserting_after(max([side, *matrices])):
        stacked = make(graph, aten.cat.default, matrices, 0, like=like)
    with graph.inserting_after(stacked):
        total = make(graph, aten.mm.default, side, stacked, like=like)
    for product in others:
        view, add = _added(product) or (product, product)
        (other,) = (node for node in add.all_input_nodes if node is not view)
        add.replace_all_uses_with(other)
        graph.erase_node(add)
    first.replace_all_uses_with(total)


def _summed(dy: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Find a gradient's product with its weight, and the sum's end."""
    products = [u for u in dy.users if u.target is aten.mm.default and u.args[0] is dy]
    if len(products) != 1 or _added(products[0]) is None:
        return None
    end = products[0]
    while (step := _added(end)) is not None:
        end = step[1]
    return products[0], end


def _added(node: fx.Node) -> tuple[fx.Node, fx.Node] | None:
    """Find a node's view and the sum, if that alone reads it."""
    while len(node.users) == 1:
        (user,) = node.users
        if user.target is aten.add.Tensor and not user.kwargs and len(user.all_input_nodes) == 2:
            values = [x.meta["val"] for x in (user, *user.all_input_nodes)]
            alike = len({(v.dtype, tuple(v.shape)) for v in values}) == 1
            return (node, user) if alike else None
        if user.target not in VIEWS or user.target in TURNS:
            return None
        node = user
    return None
