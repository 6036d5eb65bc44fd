"""What no product's epilogue carries, in PyTorch; `kernels.py` has each as one launch on a GPU."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

_gelu_backward: Callable[..., Tensor] = torch.ops.aten.gelu_backward
ACTIVATIONS: dict[str, tuple[Callable[[Tensor], Tensor], Callable[[Tensor, Tensor], Tensor]]] = {
    "silu": (F.silu, lambda d, x: torch.ops.aten.silu_backward(d, x)),
    "gelu": (F.gelu, lambda d, x: _gelu_backward(d, x)),
    "gelu_tanh": (
        lambda x: F.gelu(x, approximate="tanh"),
        lambda d, x: _gelu_backward(d, x, approximate="tanh"),
    ),
    "relu": (F.relu, lambda d, x: d.where(x > 0, 0)),
}
"""Of gates, by name: the function, and what takes the gradient behind it to the one before it."""


Places = Sequence[tuple[int, int, int]]
"""Of each part where its rows lie among the packed ones: those are counted from a base. There row
`first + i` of the part's i is itself, or, with `half`, of two halves in turn: (base, first, half).
"""


def packed(parts: Sequence[Tensor], places: Places) -> Tensor:
    """Rows of parts (R, C) as one (all R, C), contiguous."""
    out = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    for part, place in zip(parts, places, strict=True):
        out[_rows(len(part), place, out)] = part
    return out


def unpacked(packed: Tensor, rows: Sequence[int], places: Places) -> list[Tensor]:
    """The inverse of `packed`: parts of so many rows, contiguous."""
    return [packed[_rows(n, place, packed)] for n, place in zip(rows, places, strict=True)]


def turned(parts: Sequence[Tensor], places: Places = ((0, 0, 0),)) -> Tensor:
    """The transpose (C, all R) of `packed`, contiguous."""
    return packed(parts, places).T.contiguous()


def _rows(count: int, place: tuple[int, int, int], of: Tensor) -> Tensor:
    base, first, half = place
    row = torch.arange(first, first + count, device=of.device)
    if half:
        row = row // (2 * half) * (2 * half) + row % half * 2 + row // half % 2
    return base + row


def put_back(
    grads: Sequence[Tensor],
    y: Tensor,
    table: Tensor | None,
    rotated: tuple[int, int] | None,
    bias: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor]:
    """The gradient before the rotation, and of each of its rows the inner product with what the
    product gave, before the bias.

    A rotation R takes y to R y and the gradient g back to Rᵀ g, and ⟨Rᵀ g, y⟩ = ⟨g, R y⟩.

    Args:
        grads: (M, n) each, N in all: the gradient behind the rotation.
        y: (M, N), what the rotation gave.
        table: (M, N), cosines and negated sines in turn; None where nothing was rotated.
        rotated: How many heads `table` rotates, alike and before all else, and their columns; None
            where nothing is known of it. What is known spares a launch to read it.
        bias: (N,), or None.
        width: What the inner products are divided by.

    Returns:
        (M, N) in the type of `y`, and (M,) in float32.
    """
    grad = torch.cat([*grads], dim=1)
    total = (grad.float() * y.float()).sum(-1)
    if table is not None:
        (even, odd), (cos, sin) = (
            t.float().unflatten(-1, (-1, 2)).unbind(-1) for t in (grad, table)
        )
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        grad = turned.flatten(-2).to(grad.dtype)
    if bias is not None:
        total = total - (grad.float() * bias.float()).sum(-1)
    return grad, total / width


def logit_gradient(z: Tensor, lse: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Put the gradient of each row's cross-entropy, times the row's weight, in the place of its
    logits; return its inner product with them, (M,) in float32.

    The softmax is that of the rounded logits. With the log-sum-exp of those before rounding alone,
    a row that is nearly sure would have a gradient of rounding errors. That one spares the search
    for the row's maximum.

    Args:
        z: (M, V), logits.
        lse: (M,), float32, the log-sum-exp of each row before rounding.
        targets: (M,); one that is no column has no part in its row's gradient.
        weights: (M,), float32; a row whose weight is 0 does not count, of NaN neither.
    """
    wide = z.float()
    hit = torch.arange(z.shape[1], device=z.device) == targets[:, None]
    powers = torch.exp(wide - lse[:, None])
    grad = (powers / powers.sum(-1, keepdim=True) - hit.float()) * weights[:, None]
    grad = grad.where(weights[:, None] > 0, 0)
    total = (grad * wide).where(grad != 0, 0).sum(-1)
    z.copy_(grad)
    return total


def gated(z: Tensor, activation: str) -> Tensor:
    """f(g) · u of gates g and ups u in turn, the columns of z (M, 2F): (M, F)."""
    gate, up = z.float().unflatten(-1, (-1, 2)).unbind(-1)
    return (ACTIVATIONS[activation][0](gate) * up).to(z.dtype)


def gate_gradient(grad: Tensor, z: Tensor, activation: str) -> tuple[Tensor, Tensor, Tensor]:
    """The backward of `gated`: of z (M, 2F); its inner product with z by rows (M,), float32; and
    what `gated` gave."""
    function, backward = ACTIVATIONS[activation]
    gate, up = z.float().unflatten(-1, (-1, 2)).unbind(-1)
    wide, active = grad.float(), function(gate)
    dgate, dup = backward(wide * up, gate), wide * active
    dz = torch.stack((dgate, dup), dim=-1).flatten(-2).to(z.dtype)
    return dz, (gate * dgate + up * dup).sum(-1), (active * up).to(z.dtype)


def qk_norm_rope(y: Tensor, gamma: Tensor, eps: float, table: Tensor | None) -> Tensor:
    """Each head of y (M, H · D) by its RMS norm, times gamma (D,), and adjacent pairs rotated by
    `table` (M, H · D), cosines and negated sines in turn; None rotates nothing."""
    heads = y.float().unflatten(-1, (-1, len(gamma)))
    scale = torch.rsqrt(heads.square().mean(-1, keepdim=True) + eps)
    found = (heads * scale * gamma.float()).flatten(-2)
    if table is not None:
        even, odd = found.unflatten(-1, (-1, 2)).unbind(-1)
        cos, sin = table.float().unflatten(-1, (-1, 2)).unbind(-1)
        found = torch.stack((even * cos + odd * sin, odd * cos - even * sin), dim=-1).flatten(-2)
    return found.to(y.dtype)


def add_normed(x: Tensor, y: Tensor, gamma: Tensor, eps: float) -> Tensor:
    """x plus y by its RMS norm, times gamma."""
    wide = y.float()
    scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return x + (wide * scale * gamma.float()).to(x.dtype)


@cache
def _compiled(function: Callable[..., Any]) -> Callable[..., Any]:
    return torch.compile(function)


def fused(function: Callable[..., Any], where: Tensor) -> Callable[..., Any]:
    """`function` as one kernel of Inductor where `where` is on a GPU; on a CPU as it is."""
    eager = where.is_cuda and not torch.compiler.is_compiling()
    return _compiled(function) if eager else function
