"""The auxiliary reduction of a delayed RMSNorm: partials become a scale.

A kernel called with `block_size=` writes one number for each row and block of columns. They are
folded on a GPU in one launch (`fold.py`), elsewhere in plain torch.
"""

from __future__ import annotations

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.reductions import RowMean


def rstd(partials: torch.Tensor, *, n: int, block: int, eps: float = 1e-6) -> torch.Tensor:
    """Compute the scale of a delayed RMSNorm, 1 / √(mean + eps).

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
    if partials.ndim < 2 or partials.dtype not in (torch.float32, torch.float64):
        raise LaunchError(
            f"rstd: partials are {tuple(partials.shape)} {partials.dtype}, "
            "expected (…, rows, blocks) float32"
        )
    if n < 1 or block < 1 or partials.shape[-1] != -(-n // block):
        raise LaunchError(
            f"rstd: partials have {partials.shape[-1]} columns, "
            f"expected ⌈n / block⌉ for n = {n} and block = {block}"
        )
    if partials.is_cuda and partials.dtype.itemsize == 4:
        from coda_agent.primitives.fold import fold

        return fold(partials, "rstd", block / n, eps)
    return (RowMean.finalise(partials, n, block) + eps).rsqrt()
