"""Tables of few numbers that many elements read, such as cosines.

Inductor computes again in each kernel what it can: a cosine of each position and angle becomes one
of each element of all queries and keys, in each layer and pass. On an H200 the rotations of a step
of Llama-3.2-1B (4 × 4096 tokens) took 6.5 ms so, and take 1.7 ms.

Gradients of logits are so many calls with what each row has (its label, its share of the loss) that
Inductor parts them. Then it writes them beside the logits instead of over them: on an H200 a loss
of 8192 rows in float16 took 3.9 GiB instead of 2.5.
"""

from __future__ import annotations

from collections import Counter

import torch
from torch import fx

from coda_agent.agent.authors.composer.retrace import SYMBOLIC
from coda_agent.fuse.nodes import CASTS, SHAPES, is_cheap, is_pointwise, make, numel, root

aten = torch.ops.aten
_COSTLY = (aten.cos.default, aten.sin.default)
WIDE = 1 << 24
"""Elements of logits: of a router's there are fewer, and nothing is gained."""
_IOTA = torch.ops.prims.iota.default
_MANY = 8
"""How many times as many elements read a table as it has."""
_READ = 1 << 21
"""By how many elements a table is read at least. Where 2²⁰ read each of two tables, in layers of
ModernBERT-large at 512 tokens, an H200 took 4 us longer with them, of 169."""


def hold_tables(graph: fx.Graph) -> list[str]:
    """Compute tables once, before what reads them; a line for each."""
    costly = [node for node in graph.nodes if node.target in _COSTLY]
    reads = Counter[fx.Node]()
    for node in costly:
        reads |= _ends(node)
    ends = sorted(end for end, count in reads.items() if count >= _READ)
    rows = {row for node in graph.nodes if node.target is aten.eq.Tensor for row in _rows(node)}
    for end in (*ends, *sorted(rows)):
        with graph.inserting_after(end):
            target = torch.ops.prims.inductor_force_stride_order.default
            strides = end.meta["val"].clone().stride()  # a view may leave gaps
            held = make(graph, target, end, [*strides], like=end)
        end.replace_all_uses_with(held, delete_user_cb=lambda user, held=held: user is not held)
    return [f"{end.name} is a table, computed once" for end in ends]


def _rows(node: fx.Node) -> set[fx.Node]:
    """Find numbers of rows, used where labels are compared with columns.

    They are what each row has of all that is computed pointwise with its label: the label itself,
    and its share of the loss.
    """
    counted = any(root(x, *SHAPES, *CASTS).target is _IOTA for x in node.all_input_nodes)
    if not counted or numel(node) < WIDE or node.meta["val"].shape[-1] % 16:
        return set()  # Inductor pads the products of odd columns, each with gradients of its own
    wide, found, size = [node], set[fx.Node](), numel(node)
    rows = size // node.meta["val"].shape[-1]
    for x in wide:  # which grows
        near = (*x.users, *x.all_input_nodes)
        wide += [y for y in near if numel(y) == size and is_pointwise(y) and y not in wide]
        found |= {root(y, aten.expand.default) for y in x.all_input_nodes}
    return {x for x in found if numel(x) == rows and is_pointwise(x) and SYMBOLIC not in x.meta}


def _ends(node: fx.Node) -> Counter[fx.Node]:
    """Find the last nodes, made of one, that many more elements read; and how many."""
    ends, pending = Counter[fx.Node](), [node]
    for x in pending:  # which grows
        for user in filter(is_cheap, x.users):
            if numel(user) >= _MANY * numel(node):
                ends[root(x)] += numel(user)
            elif max(map(numel, user.all_input_nodes)) <= numel(x) and user not in pending:
                pending.append(user)
    fixed = (x for x in ends if SYMBOLIC not in x.meta and x.meta["val"].is_floating_point())
    return Counter({x: ends[x] for x in fixed})
