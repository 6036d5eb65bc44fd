"""Compare an output with its fp64 truth.

- Two bounds are multiples of the error that PyTorch's own path makes: in norm, and in the worst
  tile.
- The third bounds every element: one rounding at the store, and what the arithmetic before it may
  add, which `disturbance.py` finds. One wrong element among millions exceeds it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from coda_agent.primitives.deferred import torch

TILE = 64
# Blocks of elements that share the largest disturbance seen among them: (rows, columns) of a tile
# output, and a run of a vector.
_NEIGHBOURS, _RUN = (4, 8), 32
# What the arithmetic may err, in standard disturbances; see `allowance`.
SAFETY = 16.0
# So many wrong elements, or a quarter of all, may be due to jumps.
_FEW = 8
# Fast approximations flush what is less to 0.
FLUSHED = 2.0**-126
# The least bound by dtype. A narrow output is rounded once at the store, which errs uniformly up to
# eps / 2. A float32 one may come from fast approximations of the special-function unit, of which
# tanh errs by 2^-11.
FLOORS = {
    "float8_e4m3fn": 2.0**-4,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-10,
    "float32": 2.0**-12,
}
# How far a spec's baseline, which calibrates the bounds, may be from the truth, as a share of its
# norm. FP8 outputs are rounded to that, and a wrong or missing term comes to more.
BASELINE_LIMIT = 2.0**-4


@dataclass(frozen=True)
class Errors:
    """Distance of an output from its truth.

    Attributes:
        norm: ‖out - truth‖ / ‖truth‖.
        tile: The largest root-mean-square error over 64 × 64 tiles, over the root-mean-square of
            the truth. A fault in a corner shows here.
        element: The largest error of one element over what is allowed there; 0 where no allowance
            was given.
    """

    norm: float
    tile: float
    element: float = 0.0


def measure(
    out: torch.Tensor,
    truth: torch.Tensor,
    allowed: torch.Tensor | None = None,
    rounding: torch.Tensor | None = None,
) -> Errors:
    """Measure `out` (M,) or (M, N) against float64 `truth`.

    Errors are infinite where `out` is not finite and the truth is, or the reverse.

    Args:
        allowed: What each element may err.
        rounding: What storing each element may err; tiles are measured beyond it, since in a
            corner tile of few elements the rounding of one may be most of the error.
    """
    return Errors(*distances(out, truth, allowed, rounding).tolist())


def distances(
    out: torch.Tensor,
    truth: torch.Tensor,
    allowed: torch.Tensor | None = None,
    rounding: torch.Tensor | None = None,
) -> torch.Tensor:
    """Give the numbers of `measure`, (3,) float64, without waiting for the device."""
    out = out.double()
    difference = out - truth
    # Equal infinities and NaN against NaN agree; any other non-finite element is an error without
    # bound.
    agree = (out == truth) | (out.isnan() & truth.isnan())
    difference = torch.where(agree, torch.zeros_like(difference), difference)
    finite = torch.where(truth.isfinite(), truth, torch.zeros_like(truth))
    scale = finite.square().mean().sqrt().clamp_min(1e-300)
    norm = difference.square().mean().sqrt() / scale
    beyond = difference if rounding is None else (difference.abs() - rounding).clamp_min(0.0)
    square = beyond.square()
    square = square[:, None] if square.ndim == 1 else square
    m, n = square.shape
    padded = torch.nn.functional.pad(square, (0, -n % TILE, 0, -m % TILE))
    sums = padded.reshape(padded.shape[0] // TILE, TILE, -1, TILE).sum((1, 3))
    rows = torch.full((sums.shape[0],), TILE, device=out.device)
    columns = torch.full((sums.shape[1],), TILE, device=out.device)
    rows[-1], columns[-1] = m - (len(rows) - 1) * TILE, n - (len(columns) - 1) * TILE
    tiles = (sums / (rows[:, None] * columns[None, :])).sqrt()
    found = [norm, tiles.max() / scale, torch.zeros_like(norm)]
    if allowed is not None:
        excess = difference.abs() / allowed
        found[2] = torch.where(difference == 0, 0.0, excess).max()
    errors = torch.stack(found)
    return torch.where(difference.isfinite().all(), errors, torch.inf)


def few_wrong(out: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor | None) -> bool:
    """Whether so few elements are wrong that jumps may be the reason."""
    off = (out.double() - truth).abs()
    wrong = off > (0.0 if allowed is None else allowed)
    return int(wrong.sum()) <= max(_FEW, wrong.numel() >> 2)


def unit_of(dtype: torch.dtype) -> float:
    """Give the largest relative error of storing a number in `dtype`.

    float32 counts as 2⁻¹⁵: sums of tensor cores are cut off, not rounded, and that adds up over a
    row.
    """
    return 2.0**-15 if dtype is torch.float32 else torch.finfo(dtype).eps / 2


def least_of(dtype: torch.dtype) -> float:
    """Give what is 0 in `dtype`, or flushed to 0 before it is stored."""
    info = torch.finfo(dtype)
    return max(info.smallest_normal * info.eps / 2, FLUSHED)


def store_rounding(
    truth: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor | None = None
) -> torch.Tensor:
    """Bound what storing elements, (M,) or (M, N), in `dtype` may err.

    An output that is added in place to what `added_to` holds rounds the addend by itself too.
    """
    stored = truth.abs() if added_to is None else truth.abs() + (truth - added_to.double()).abs()
    return unit_of(dtype) * stored.nan_to_num(0.0, 0.0, 0.0)


def addend_rounding(truth: torch.Tensor, dtype: torch.dtype, added_to: torch.Tensor) -> float:
    """Bound what an addend's rounding may err of the norm."""
    addend = store_rounding(truth, dtype, added_to) - store_rounding(truth, dtype)
    return float(addend.norm() / truth.nan_to_num(0.0, 0.0, 0.0).norm().clamp_min(1e-300))


def allowance(
    truth: torch.Tensor,
    dtype: torch.dtype,
    disturbed: Sequence[torch.Tensor],
    added_to: torch.Tensor | None = None,
) -> torch.Tensor:
    """Bound each element's difference from float64 `truth`, (M,) or (M, N).

    That is the rounding of the store, and `SAFETY` times the largest disturbance of the element and
    its neighbours. An element's own disturbances may happen to cancel; those of all neighbours do
    not.

    Args:
        dtype: What it is stored in.
        disturbed: The same output of reference runs with disturbed arithmetic.
        added_to: What the output is added to in place.
    """
    noise = SAFETY * _spread(largest_change(truth, disturbed))
    stored = store_rounding(truth, dtype, added_to) + unit_of(dtype) * noise
    return stored + noise + least_of(dtype)


def largest_change(truth: torch.Tensor, disturbed: Sequence[torch.Tensor]) -> torch.Tensor:
    """Find how far disturbed runs move each element, 0 where not finite."""
    noise = torch.zeros_like(truth)
    for run in disturbed:
        noise = torch.maximum(noise, (run - truth).abs().nan_to_num(0.0, 0.0, 0.0))
    return noise


def _spread(noise: torch.Tensor) -> torch.Tensor:
    """Spread the largest of each block of neighbours to all."""
    block = _NEIGHBOURS if noise.ndim == 2 else (1, _RUN)
    flat = noise if noise.ndim == 2 else noise[None]
    (m, n), (p, q) = flat.shape, block
    padded = torch.nn.functional.pad(flat, (0, -n % q, 0, -m % p))
    blocks = padded.reshape(padded.shape[0] // p, p, -1, q).amax((1, 3))
    return blocks.repeat_interleave(p, 0)[:m].repeat_interleave(q, 1)[:, :n].reshape(noise.shape)


def bound(torch_error: Errors, dtype: str, multiple: float, addend: float = 0.0) -> Errors:
    """Bound a candidate's error: a multiple of PyTorch's own, or a floor.

    Args:
        torch_error: PyTorch's own error.
        dtype: What the output is stored in.
        multiple: The spec's tolerance.
        addend: What rounding the addend of an output that is added in place may err in norm.
            PyTorch rounds the sum alone. Where a few elements nearly cancel, the addend's rounding
            is most of the error. Tiles are measured beyond what their stores may err.
    """
    floor = FLOORS[dtype]
    norm = max(multiple * torch_error.norm, floor) + addend
    tile = max(multiple * torch_error.tile, 2 * floor)
    # Where zeros would pass, as for asinh(x) - x near 0, a norm says nothing of a result that has
    # no right digit. The bounds of its elements still do.
    norm, tile = (math.inf if x >= 1.0 else x for x in (norm, tile))
    return Errors(norm, tile, 1.0)


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits."""

    def bits(value: torch.Tensor) -> torch.Tensor:
        value = value.contiguous()
        if value.stride(-1) != 1:  # a single column may have any stride
            value = value.clone(memory_format=torch.contiguous_format)
        return value.view(torch.uint8)

    return torch.equal(bits(x), bits(y))  # which knows no 8-bit floats itself, and no NaN


def within(errors: Errors, limit: Errors) -> bool:
    return (
        errors.norm <= limit.norm and errors.tile <= limit.tile and errors.element <= limit.element
    )
