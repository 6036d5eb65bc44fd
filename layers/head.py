"""A decoder's head: the product with the vocabulary, whose logits are never whole, and its loss."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor
from torch.autograd.function import once_differentiable

from coda_agent.generated import gemm_rmsnorm_partial_cross_entropy
from coda_agent.layers.functional import Normed, asked, of_whole, through_norm
from coda_agent.layers.packing import on, turned_weight
from coda_agent.layers.passes import fused
from coda_agent.layers.weight_gradient import announced, mains, sum_product

# Logits that the head holds at a time: 2 GiB in 16 bits for so many rows, 1 GiB for more. Each time
# the weight's gradient is read and written in float32, which many rows make rare.
_LOGITS, _LOGIT_ROWS = 1 << 30, 8192
_unstored_logits = gemm_rmsnorm_partial_cross_entropy.without("Z")


@of_whole
def head_loss(
    x: Tensor,
    given: Normed,
    gamma: Tensor,
    weight: Tensor,
    targets: Tensor,
    *,
    ignore_index: int = -100,
    count: Tensor | float | None = None,
) -> Tensor:
    """The cross-entropy of n weightᵀ with n = x · r · gamma, over all rows; float32.

    Logits are held for some rows at a time, and gradients are taken while they are there. Where no
    gradient is asked for, nothing of them is stored. Keep it out of torch.compile's graphs
    (`torch.compiler.disable`), as patched models do.

    Args:
        x: (M, d), the stream.
        given: Its `Normed` by `gamma`.
        gamma: (d,), the final norm's weight.
        weight: (V, d), V a multiple of 16.
        targets: (M,), int64 columns of `weight`.
        ignore_index: The target of rows that do not count.
        count: What the sum is divided by; by default the rows that count.

    Raises:
        RuntimeError: a target that counts is no column of `weight`; on a GPU a failed assertion
            there, as of PyTorch's cross-entropy.
    """
    rows = targets != ignore_index
    if count is None:
        count = rows.sum()
    count = torch.as_tensor(count, dtype=torch.float32, device=x.device)
    # The loss of no rows is 0 / 0, as PyTorch's, whose gradients are 0 all the same.
    none = torch.where(rows.any() | (count != 0), 0.0, torch.nan)
    # A power of two is left to the backward pass: float16 does not hold the gradients of a mean.
    # Not by frexp and ldexp: an export's loss that had them was wrong by Inductor on an H200.
    power = torch.exp2(-torch.log2(count.where(count > 0, 1)).ceil())
    weights = (1 / (count * power)).where(rows, 0)
    known = targets.where(rows, 0)
    inside = ((known >= 0) & (known < len(weight))).all()
    message = f"a target is none of {len(weight)} columns, nor ignore_index {ignore_index}"
    torch._assert_async(inside, message)  # pyright: ignore[reportPrivateImportUsage]
    if asked(x, gamma, weight):
        return _HeadLoss.apply(x, *given, gamma, weight, known, weights) * power + none
    target, lse = _unstored_logits(given.h, weight, given.r, known)
    return _weighted(lse - target, weights) * power + none


class _HeadLoss(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        x, h, r, gamma, weight, targets, weights = inputs
        trained = ctx.needs_input_grad[4]
        rows = _LOGITS // len(weight)
        step = max(128, max(min(rows, _LOGIT_ROWS), rows // 2) // 128 * 128)  # whole tiles
        lost = torch.empty_like(weights)
        dx, dgamma = torch.zeros_like(x), torch.zeros_like(gamma, dtype=torch.float32)
        turned, dweight = turned_weight([weight]), None
        for start in range(0, len(x), step):
            some = slice(start, start + step)
            z, target, lse = gemm_rmsnorm_partial_cross_entropy(
                h[some], weight, r[some], targets[some]
            )
            torch.sub(lse, target, out=lost[some])
            total = on(x).logit_gradient(z, lse, targets[some], weights[some])
            statistic, update = total / x.shape[1], "in_place"
            args = x[some], r[some], gamma, statistic, dx[some], update
            _, n, part = through_norm(z, turned, *args)
            dgamma += part
            if trained:
                dweight = sum_product(dweight, z.T, n, last=start + step >= len(x))
            del z  # or the next ones would be beside them
        ctx.save_for_backward(dx, dgamma, dweight)
        ctx.types, ctx.mains = (x.dtype, gamma.dtype, weight.dtype), mains(weight)
        return _weighted(lost, weights)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, *grads: Any) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        (dloss,) = grads
        dx, dgamma, dweight = ctx.saved_tensors
        main = None if dweight is None else ctx.mains[0]
        if main is not None:
            main.main_grad.addcmul_(dweight, dloss)
            dweight = None
        kept = dx, dgamma, dweight
        dx, dgamma, dweight = fused(_scaled, dloss)(kept, dloss, ctx.types)
        return dx, None, None, dgamma, dweight if main is None else announced(main), None, None


def _weighted(lost: Tensor, weights: Tensor) -> Tensor:
    """The sum of rows' losses; a row whose weight is 0 does not count, of NaN neither."""
    return (lost * weights).where(weights > 0, 0).sum()


def _scaled(
    tensors: Sequence[Tensor | None], factor: Tensor, types: Sequence[torch.dtype]
) -> list[Tensor | None]:
    return [
        None if t is None else (t * factor).to(kind) for t, kind in zip(tensors, types, strict=True)
    ]
