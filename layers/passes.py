"""What no product's epilogue carries, in PyTorch; `kernels.py` has each as one launch on a GPU."""

from __future__ import annotations

import torch
from torch import Tensor


def turned(x: Tensor) -> Tensor:
    """xᵀ of x (R, C): (C, R), contiguous."""
    return x.T.contiguous()


def put_back(
    into: Tensor,
    grad: Tensor,
    part: Tensor,
    table: Tensor | None,
    bias: Tensor | None,
    total: Tensor,
) -> None:
    """Put the gradient before the rotation into its place; add its inner product with what the
    product gave, before the bias, to the total of each row.

    A rotation R takes y to R y and the gradient g back to Rᵀ g, and ⟨Rᵀ g, y⟩ = ⟨g, R y⟩.

    Args:
        into: (M, n), where it is put.
        grad: (M, n), the gradient behind the rotation.
        part: (M, n), what the rotation gave.
        table: (M, n), cosines and sines in turn; None where nothing was rotated.
        bias: (n,), or None.
        total: (M,), float32.
    """
    total += (grad.float() * part.float()).sum(-1)
    if table is not None:
        (even, odd), (cos, sin) = (
            t.float().unflatten(-1, (-1, 2)).unbind(-1) for t in (grad, table)
        )
        turned = torch.stack((even * cos - odd * sin, even * sin + odd * cos), dim=-1)
        grad = turned.flatten(-2).to(grad.dtype)
    if bias is not None:
        total -= (grad.float() * bias.float()).sum(-1)
    into.copy_(grad)


def logit_gradient(z: Tensor, lse: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """Put the gradient of each row's cross-entropy, times the row's weight, in the place of its
    logits; return its inner product with them, (M,) in float32.

    The softmax is that of the rounded logits. With the log-sum-exp of those before rounding alone,
    a row that is nearly sure would have a gradient of rounding errors. That one spares the search
    for the row's maximum.

    Args:
        z: (M, V), logits.
        lse: (M,), float32, the log-sum-exp of each row before rounding.
        targets: (M,).
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
