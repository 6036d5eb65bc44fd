"""Tables of a few costly numbers that many elements read, such as a rotation's cosines.

Inductor computes again in each kernel what it can: a cosine of each position and angle becomes one
of each element of all queries and keys, in each layer and pass. On an H200 the rotations of a step
of Llama-3.2-1B (4 × 4096 tokens) took 6.5 ms so, and take 1.7 ms.
"""

from __future__ import annotations

import torch
from torch import fx

from coda_agent.agent.authors.composer.retrace import SYMBOLIC
from coda_agent.fuse.nodes import is_cheap, make, numel, root

aten = torch.ops.aten
_COSTLY = (aten.cos.default, aten.sin.default)
_MANY = 8
"""How many times as many elements read a table as it has."""


def hold_tables(graph: fx.Graph) -> list[str]:
    """Compute tables once, before what reads them; a line for each."""
    costly = [node for node in graph.nodes if node.target in _COSTLY]
    ends = sorted({end for node in costly for end in _ends(node)})
    for end in ends:
        with graph.inserting_after(end):
            target = torch.ops.prims.inductor_force_stride_order.default
            held = make(graph, target, end, [*end.meta["val"].stride()], like=end)
        end.replace_all_uses_with(held, delete_user_cb=lambda user, held=held: user is not held)
    return [f"{end.name} is a table, computed once" for end in ends]


def _ends(node: fx.Node) -> set[fx.Node]:
    """The last nodes made of one, and of nothing larger, that many more elements are made of."""
    ends, pending = set[fx.Node](), [node]
    for x in pending:  # which grows
        for user in filter(is_cheap, x.users):
            if numel(user) >= _MANY * numel(node):
                ends.add(root(x))
            elif max(map(numel, user.all_input_nodes)) <= numel(x) and user not in pending:
                pending.append(user)
    return {x for x in ends if SYMBOLIC not in x.meta and x.meta["val"].is_floating_point()}
