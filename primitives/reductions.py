"""Reductions over tiles in torch: the partials a kernel writes, and their finalisers."""

from __future__ import annotations

from typing import TYPE_CHECKING

from coda_agent.primitives.resources import Reduction

if TYPE_CHECKING:
    import torch


def partials(value: torch.Tensor, kind: type[Reduction], block: int) -> torch.Tensor:
    """Reduce `value` (M, N) over blocks of columns, or of rows.

    Returns:
        (M, ⌈N / block⌉), or (N, ⌈M / block⌉) for a reduction over rows. The partial of a mean is
        the block's sum over `block`, in a ragged last block too.
    """
    import torch

    value = value.mT if kind.over_rows else value
    kept, folded = value.shape
    blocks = -(-folded // block)
    identity = 0.0 if kind.combine == "add" else float("-inf")
    padded = torch.nn.functional.pad(value, (0, blocks * block - folded), value=identity)
    tiles = padded.reshape(kept, blocks, block)
    if kind.combine == "logsumexp":
        return tiles.logsumexp(-1)
    if kind.combine == "max":
        # As the GPU: NaN is passed over.
        return torch.where(tiles.isnan(), identity, tiles).amax(-1)
    return tiles.sum(-1) / block if kind.mean else tiles.sum(-1)


def finalise(raw: torch.Tensor, kind: type[Reduction], folded: int, block: int) -> torch.Tensor:
    """Fold `partials` of blocks of `block` out of `folded` elements, over the last dimension."""
    weight = block / folded if kind.mean else 1.0
    if raw.is_cuda and raw.dtype.itemsize == 4:
        from coda_agent.primitives.fold import fold

        return fold(raw, kind.combine, weight)
    if kind.combine == "logsumexp":
        return raw.logsumexp(-1)
    if kind.combine == "max":
        return raw.amax(-1)
    return raw.sum(-1) * weight
