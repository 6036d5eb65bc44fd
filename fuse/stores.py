"""What a region stores: the fewest bytes to compute all else from."""

from __future__ import annotations

from collections.abc import Callable, Set

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import reached
from coda_agent.fuse.nodes import (
    CASTS,
    PRODUCTS,
    SHAPES,
    SUM,
    VIEWS,
    alike,
    are_products,
    bytes_of,
    call_of,
    copied,
    is_cheap,
    is_repeated,
    made_of,
    numel,
    root,
)

aten = torch.ops.aten
_EXTREMES = (aten.amax.default, aten.amin.default, aten.max.default, aten.min.default)
_SMOOTH = (aten.add.Tensor, aten.sub.Tensor, aten.mul.Tensor, aten.mul.Scalar, aten.add.Scalar,
           aten.div.Tensor, aten.div.Scalar, aten.neg.default, aten.exp.default, aten.tanh.default,
           aten.sigmoid.default, aten.where.self, aten.clamp.default, aten.maximum.default,
           aten.minimum.default, aten.abs.default, aten.relu.default)  # fmt: skip


def stored_of(nodes: set[fx.Node], wanted: Set[fx.Node]) -> set[fx.Node]:
    """Choose what a kernel of these nodes stores, in the fewest bytes.

    What other kernels want, and results of the graph; of other values the narrower ones that they
    are made of alone; and what the other pass needs, or what that is cheaply computed from, where
    it has fewer bytes.
    """
    region = sorted(nodes)
    read = {n: users for n in region if (users := _outside(n, nodes, later=False))}
    given = {n for n, users in read.items() if any(u.op == "output" for u in users)}
    stored = {
        _unturned(n, nodes) if n in given else _narrowest(n, nodes) for n in read if n not in wanted
    }
    stored |= wanted & nodes
    later = {_narrowest(n, nodes) for n in region if _outside(n, nodes, later=True)} - stored
    roots = {root for n in later for root in _roots(n, nodes, stored)} - stored
    return stored | (roots if bytes_of(roots) < bytes_of(later) else later)


def compared_extremes(graph: fx.Graph) -> set[fx.Node]:
    """Find the largest and smallest that are compared with what they are of, and that.

    A kernel takes them of values that are not rounded yet, and what is made again of what is stored
    is rounded otherwise: none may be equal. A gradient of `amax` was NaN by that.
    """
    found = set[fx.Node]()
    for node in [n for n in graph.nodes if n.target in _EXTREMES and not _is_guard(n)]:
        makers = reached([node], lambda n: () if n.target in PRODUCTS else n.all_input_nodes)
        products = {x for x in makers if x.target in PRODUCTS}
        own = reached([node], lambda n: [user for user in n.users if is_cheap(user)])
        made = made_of(graph, products)
        others = made - own
        mixed = {n for n in own - {node} if not others.isdisjoint(n.all_input_nodes)}
        if not all(map(_is_smooth, made_of(graph, mixed) & own)):
            found |= makers & made - products
    return found


def _is_guard(node: fx.Node) -> bool:
    """Whether a largest is read where it is infinite alone, beside a log-sum-exp."""
    return all(
        user.target is aten.abs.default
        or (user.target is aten.where.self and call_of(user.args[2], aten.logsumexp.default))
        for user in node.users
    )


def _is_smooth(node: fx.Node) -> bool:
    """Whether a call is as near as what it is given."""
    if node.target in CASTS:
        return node.meta["val"].is_floating_point()
    return node.target in (*_SMOOTH, *VIEWS, *SHAPES, torch.ops.prims.fma.default)


def gathered_of(nodes: set[fx.Node], stored: set[fx.Node]) -> set[fx.Node]:
    """Find what is gathered from what is stored for the other pass.

    There it is read for nothing: a kernel that selects it beside the logarithm of a sum took 0.4 of
    1.7 ms for that, at K = 768 on an H200. What is not for the other pass is to be free as soon as
    it can be, as logits of a loop's parts are, and has no further reader.
    """
    picked = {node for node in nodes if node.target is aten.gather.default}
    later = [node for node in nodes if picked and _outside(node, nodes, later=True)]
    kept = {x for node in later for x in _roots(node, nodes, stored)}
    return {node for node in picked if root(node.all_input_nodes[0], *CASTS) in stored & kept}


def _outside(node: fx.Node, nodes: set[fx.Node], *, later: bool) -> list[fx.Node]:
    """List users beyond some nodes, in the other pass or its own."""
    return [u for u in node.users if u not in nodes and alike(u, node) != later]


def compute_again(graph: fx.Graph, nodes: set[fx.Node], stored: set[fx.Node]) -> None:
    """Let a region's readers compute what is not stored from what is."""
    # Later passes compute once what they find twice.
    for later in (False, True):
        kept, copies = _read_later(nodes, stored) if later else stored, {}
        for node in sorted(nodes):
            users, others = _outside(node, nodes, later=later), kept - {node}
            if users and (later or node not in stored) and _roots(node, nodes, others) <= others:
                copy = _again(graph, node, nodes - others, copies, users[0])
                node.replace_all_uses_with(copy, delete_user_cb=users.__contains__)


def _read_later(nodes: set[fx.Node], stored: set[fx.Node]) -> set[fx.Node]:
    """Find what the other pass reads of what is stored."""
    # What products alone read is made of the rest, rounded otherwise; what is compared may not be:
    # the largest of a row is one of its elements.
    read = set[fx.Node]()
    for node in sorted(nodes):
        if users := _outside(node, nodes, later=True):
            far = _roots(node, nodes, set()) if are_products(users) else {node}
            ways = (far, _roots(node, nodes, stored - {node}), _roots(node, nodes, stored))
            read |= next((way for way in ways if way <= stored), stored)
    return read if bytes_of(read) < bytes_of(stored) else stored


def _unturned(node: fx.Node, nodes: set[fx.Node]) -> fx.Node:
    """What of a region a node is a view of."""
    while node.target in VIEWS and node.all_input_nodes[0] in nodes:
        node = node.all_input_nodes[0]
    return node


def _narrowest(node: fx.Node, nodes: set[fx.Node]) -> fx.Node:
    """Find the narrowest value that a node is computed from alone.

    No other value of its extent enters; of values that views make of each other it is the first,
    else the last.
    """
    best, size = node, node.meta["val"].numel()
    while node in nodes and is_cheap(node):
        read = [x for x in node.all_input_nodes if not is_repeated(x)]
        whole = [x for x in read if numel(x) == size]
        if len(whole) != 1 or nodes.intersection(read) != {*whole}:
            break
        source = whole[0]
        if bytes_of([source]) < bytes_of([best]) or (best is node and node.target in VIEWS):
            best = source
        node = source
    return best


def _again(
    graph: fx.Graph,
    node: fx.Node,
    nodes: set[fx.Node],
    copies: dict[fx.Node, fx.Node],
    like: fx.Node,
) -> fx.Node:
    """Copy a node, and those of `nodes` that make it, for `like`."""
    if node not in nodes:
        return node
    if node not in copies:
        inputs = {x: _again(graph, x, nodes, copies, like) for x in node.all_input_nodes}
        with graph.inserting_after(max([node, *inputs.values()])):
            copies[node] = copied(graph, node, inputs, like=like)
    return copies[node]


def _roots(node: fx.Node, nodes: set[fx.Node], stored: set[fx.Node]) -> set[fx.Node]:
    """Find a region's nodes that one is cheaply computed from."""
    is_root: Callable[[fx.Node], bool] = lambda n: n in stored or not is_cheap(n) or SUM in n.meta
    makers = reached([node], lambda n: () if is_root(n) or n not in nodes else n.all_input_nodes)
    return {n for n in makers & nodes if is_root(n)}
