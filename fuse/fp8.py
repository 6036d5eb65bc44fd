"""Products of weights in FP8 (e4m3): the option `fp8="forward"` of the backend.

- Each row of A and each of a weight is scaled by its own maximum, anew in each step: torchao's
  row-wise recipe. What quantises is Inductor's; the product is `_scaled_mm`, or a kernel.
- Gradients are those of 16-bit products at the values that FP8 gave.
- A product whose rows go into a softmax stays in 16 bits: a head's with its loss, a router's.
"""

from __future__ import annotations

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import reached
from coda_agent.fuse.nodes import CASTS, PLAIN, TURNS, is_backward, is_cheap, make, operands, root

aten = torch.ops.aten
E4M3 = torch.float8_e4m3fn
_LARGEST = torch.finfo(E4M3).max
_LEAST = 1e-12
"""Of a row's maximum: zeros stay zeros."""
_SOFTMAX = (
    aten.amax.default, aten.max.dim, aten.logsumexp.default,
    aten._softmax.default, aten._log_softmax.default, torch.ops.prims.amax.default,
)  # fmt: skip


def quantise_products(graph: fx.Graph) -> list[str]:
    """Multiply by a forward pass's weights in FP8; names of the products."""
    if not any(map(is_backward, graph.nodes)):
        return []
    found = [node for node in graph.nodes if node.target in PLAIN and not is_backward(node)]
    found = [node for node in found if _fits(node) and not _has_softmax(node)]
    rows: dict[fx.Node, tuple[fx.Node, fx.Node]] = {}
    for node in found:
        a, b = operands(node)
        with graph.inserting_before(node):
            weight = b.all_input_nodes[0] if b.target in TURNS else _turned(graph, b, node)
            for x in (a, weight):
                if x not in rows:
                    rows[x] = _quantised(graph, x, node)
            (left, one), (right, other) = rows[a], rows[weight]
            sides = left, _turned(graph, right, node), one, _turned(graph, other, node)
            dtype = node.meta["val"].dtype
            product = make(
                graph, aten._scaled_mm.default, *sides, None, None, dtype, True, like=node
            )
            if node.target is aten.addmm.default:
                product = make(graph, aten.add.Tensor, product, node.args[0], like=node)
        node.replace_all_uses_with(product)
    return [node.name for node in found]


def _turned(graph: fx.Graph, x: fx.Node, like: fx.Node) -> fx.Node:
    return make(graph, aten.permute.default, x, [1, 0], like=like)


def _quantised(graph: fx.Graph, x: fx.Node, like: fx.Node) -> tuple[fx.Node, fx.Node]:
    """Rows in e4m3 and their scales, a column in float32."""
    wide = make(graph, CASTS[1], x, torch.float32, like=like)
    size = make(graph, aten.abs.default, wide, like=like)
    largest = make(graph, aten.amax.default, size, [1], True, like=like)
    largest = make(graph, aten.clamp_min.default, largest, _LEAST, like=like)
    scale = make(graph, aten.div.Tensor, largest, _LARGEST, like=like)
    scaled = make(graph, aten.div.Tensor, wide, scale, like=like)
    return make(graph, CASTS[1], scaled, E4M3, like=like), scale


def _fits(node: fx.Node) -> bool:
    """Whether a 16-bit product multiplies a weight whose sides 16 divides."""
    a, b = operands(node)
    if a.meta["val"].dtype not in (torch.bfloat16, torch.float16) or node.kwargs:
        return False
    if any(not isinstance(n, int) or n % 16 for n in b.meta["val"].shape):
        return False
    return root(b, *CASTS).op in ("placeholder", "get_attr")


def _has_softmax(node: fx.Node) -> bool:
    """Whether a product goes into a row's maximum before another product."""
    cheap = reached([node], lambda n: [u for u in n.users if is_cheap(u) and not is_backward(u)])
    return any(user.target in _SOFTMAX for n in cheap for user in n.users)
