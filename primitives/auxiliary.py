"""Auxiliary reductions: from the partials of one kernel to what the next one takes.

A kernel called with `block_size=` writes one number for each row and block of columns (or column
and block of rows). These functions fold them: on a GPU in one launch (`fold.py`), elsewhere in
plain torch.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Literal

from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.reductions import ColSum, RowLogSumExp, RowMean

if TYPE_CHECKING:
    import torch


def rstd(partials: torch.Tensor, *, n: int, block: int, eps: float = 1e-6) -> torch.Tensor:
    """1 / √(mean + eps) of each row, the scale of a delayed RMSNorm (paper, kernel 4).

    Args:
        partials: (…, M, ⌈n / block⌉) float32, `RowMean` partials of squares.
        n: Columns they were taken over.
        block: Columns a partial; the last one counts as full, as the kernel writes it.
        eps: What keeps a row of zeros finite.

    Returns:
        (…, M) float32, a `ColVector` of the next kernel.

    Raises:
        LaunchError: the partials are not float32 or do not fit `n` and `block`.
    """
    _check("rstd", partials)
    if n < 1 or block < 1 or partials.shape[-1] != -(-n // block):
        raise LaunchError(
            f"rstd: partials have {partials.shape[-1]} columns, "
            f"expected ⌈n / block⌉ for n = {n} and block = {block}"
        )
    if partials.is_cuda and partials.dtype.itemsize == 4:
        from coda_agent.primitives.fold import fold

        return fold(partials, "rstd", block / n, eps)
    return (RowMean.finalise(partials, n, block) + eps).rsqrt()


def cross_entropy_loss(
    lse_partials: torch.Tensor,
    target_logit: torch.Tensor,
    target: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: Literal["mean", "sum", "none"] = "mean",
) -> torch.Tensor:
    """log Σ exp less the target's logit, as torch.nn.functional.cross_entropy (paper, kernel 3).

    Args:
        lse_partials: (…, M, blocks) float32, `RowLogSumExp` partials; final ones as (…, M, 1).
        target_logit: (…, M), what `gather` took at `target`.
        target: (…, M) integers; other than `ignore_index`, each must be a column.
        ignore_index: Rows with this target have loss 0 and do not count in the mean.
        reduction: "none" gives (…, M), "sum" and "mean" a scalar, the mean of no rows being NaN.

    Returns:
        The loss, float32.

    Raises:
        LaunchError: shapes or dtypes do not fit, or there is no such reduction.
    """
    _check("cross_entropy_loss", lse_partials)
    rows = tuple(lse_partials.shape[:-1])
    for label, t in (("target_logit", target_logit), ("target", target)):
        if tuple(t.shape) != rows:
            raise LaunchError(
                f"cross_entropy_loss: {label} has shape {tuple(t.shape)}, expected {rows}"
            )
    if target.is_floating_point():
        raise LaunchError(f"cross_entropy_loss: target is {target.dtype}, expected integers")
    if reduction not in ("mean", "sum", "none"):
        raise LaunchError(
            f"cross_entropy_loss: unknown reduction {reduction!r}, expected mean, sum or none"
        )
    blocks = lse_partials.shape[-1]
    kept = target != ignore_index
    loss = RowLogSumExp.finalise(lse_partials, blocks, 1) - target_logit
    loss = loss.where(kept, 0.0)
    if reduction == "none":
        return loss
    return loss.sum() / kept.sum() if reduction == "mean" else loss.sum()


def column_sum(partials: torch.Tensor) -> torch.Tensor:
    """Gradient of a norm weight or bias from `ColSum` partials (paper, kernel 9).

    Args:
        partials: (N, blocks) float32.

    Returns:
        (N,) float32.

    Raises:
        LaunchError: the partials are not float32 or not a matrix.
    """
    _check("column_sum", partials)
    if partials.ndim != 2:
        raise LaunchError(
            f"column_sum: partials have shape {tuple(partials.shape)}, expected (N, blocks)"
        )
    return ColSum.finalise(partials, partials.shape[1], 1)


def rmsnorm_backward_statistic(partials: torch.Tensor, *, block: int, d: int) -> torch.Tensor:
    """z_Δz = Σ ẑ · block / d, the row statistic of RMSNorm's backward pass (paper, kernel 10).

    The sum of z·Δz over a norm's d outputs equals that over the outputs of the projection behind
    it, whose kernel can therefore take it.

    Args:
        partials: (…, M, blocks) float32, `RowMean` partials of that projection's outputs times
            their gradients.
        block: Elements a partial; the last one counts as full, as the kernel writes it.
        d: Width of the norm.

    Returns:
        (…, M) float32, a `ColVector` of kernel 9.

    Raises:
        LaunchError: the partials are not float32, or `block` or `d` is not positive.
    """
    _check("rmsnorm_backward_statistic", partials)
    if block < 1 or d < 1:
        raise LaunchError(
            f"rmsnorm_backward_statistic: block = {block} and d = {d}, expected both positive"
        )
    return RowMean.finalise(partials, d, block)


def _check(name: str, partials: torch.Tensor) -> None:
    import torch

    if partials.ndim < 2 or partials.dtype not in (torch.float32, torch.float64):
        raise LaunchError(
            f"{name}: partials are {tuple(partials.shape)} {partials.dtype}, "
            "expected (…, rows, blocks) float32"
        )
