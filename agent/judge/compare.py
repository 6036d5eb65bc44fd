"""Compare an output with its fp64 truth, and say what the difference looks like."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    import torch

TILE = 64
# Least bound by dtype: one rounding at the store (a narrow output's relative error is uniform up to
# eps / 2), and for float32 the fast approximations of the special-function unit (tanh: 2^-11
# relative).
FLOORS = {
    "float8_e4m3fn": 2.0**-4,
    "bfloat16": 2.0**-8,
    "float16": 2.0**-10,
    "float32": 2.0**-12,
}
# How far a spec's baseline, which calibrates the bounds, may be from the truth, of its norm: FP8
# outputs are rounded to 2^-4, a wrong or missing term comes to more.
BASELINE_LIMIT = 2.0**-4


@dataclass(frozen=True)
class Errors:
    """Distance of an output from its truth.

    Attributes:
        norm: ‖out - truth‖ / ‖truth‖.
        tile: The largest root-mean-square error over 64 × 64 tiles, over the root-mean-square of
            the truth. A fault in a corner shows here.
    """

    norm: float
    tile: float

    def to_dict(self) -> dict[str, float]:
        return {"norm": self.norm, "tile": self.tile}


def measure(out: torch.Tensor, truth: torch.Tensor) -> Errors:
    """Errors of `out` (M,) or (M, N) against float64 `truth`; infinite where `out` is not finite
    and the truth is, or the reverse."""
    import torch

    out = out.double()
    difference = out - truth
    # Equal infinities and NaN against NaN agree; any other non-finite element is an error without
    # bound.
    agree = (out == truth) | (out.isnan() & truth.isnan())
    difference = torch.where(agree, torch.zeros_like(difference), difference)
    if not difference.isfinite().all():
        return Errors(float("inf"), float("inf"))
    finite = torch.where(truth.isfinite(), truth, torch.zeros_like(truth))
    scale = finite.square().mean().sqrt().clamp_min(1e-300)
    norm = difference.square().mean().sqrt() / scale
    square = difference.square()
    square = square[:, None] if square.ndim == 1 else square
    m, n = square.shape
    padded = torch.nn.functional.pad(square, (0, -n % TILE, 0, -m % TILE))
    sums = padded.reshape(padded.shape[0] // TILE, TILE, -1, TILE).sum((1, 3))
    rows = torch.full((sums.shape[0],), TILE, device=out.device)
    columns = torch.full((sums.shape[1],), TILE, device=out.device)
    rows[-1], columns[-1] = m - (len(rows) - 1) * TILE, n - (len(columns) - 1) * TILE
    tiles = (sums / (rows[:, None] * columns[None, :])).sqrt()
    return Errors(float(norm), float(tiles.max() / scale))


def bound(torch_error: Errors, dtype: str, multiple: float) -> Errors:
    """What a candidate may err: a multiple of PyTorch's own error on the same inputs, and never
    less than the dtype's floor."""
    floor = FLOORS[dtype]
    return Errors(
        max(multiple * torch_error.norm, floor), max(multiple * torch_error.tile, 2 * floor)
    )


def same(x: torch.Tensor, y: torch.Tensor) -> bool:
    """Whether two tensors hold the same bits (torch.equal knows no 8-bit floats, and no NaN)."""
    import torch

    return torch.equal(x.contiguous().view(torch.uint8), y.contiguous().view(torch.uint8))


def within(errors: Errors, limit: Errors) -> bool:
    return errors.norm <= limit.norm and errors.tile <= limit.tile


def diagnose(out: torch.Tensor, truth: torch.Tensor) -> tuple[str, dict[str, Any]]:
    """What a wrong output looks like, and where it is worst."""
    import torch

    out64 = out.double()
    unwritten = out64.isnan() & ~truth.isnan()
    share = float(unwritten.double().mean())
    difference = torch.where(unwritten, torch.full_like(truth, torch.inf), (out64 - truth).abs())
    flat = int(difference.nan_to_num(posinf=torch.inf).argmax())
    columns = truth.shape[1] if truth.ndim == 2 else 1
    row, column = divmod(flat, columns)
    where = {
        "row": row,
        "column": column,
        "got": float(out64.reshape(-1)[flat]),
        "expected": float(truth.reshape(-1)[flat]),
    }
    if share > 0:
        return f"{share:.1%} of it is NaN or was never written", where
    factor = float((out64 * truth).sum() / truth.square().sum().clamp_min(1e-300))
    residue = float((out64 - factor * truth).norm() / truth.norm().clamp_min(1e-300))
    if abs(factor - 1) > 0.01 and residue < 0.02:
        return f"it is the expected value times {factor:.4g}", where
    if truth.ndim == 2 and columns % 2 == 0:
        swapped = truth.reshape(truth.shape[0], -1, 2).flip(-1).reshape(truth.shape)
        if float((out64 - swapped).norm() / truth.norm()) < 0.02:
            return "even and odd columns are swapped", where
    offset, vector = out64 - truth, "(a {} vector missing or doubled)"
    for axis, name in enumerate(("column", "row")):
        spread = truth.ndim == 2 and min(truth.shape) > 1 and offset.std(axis, correction=0).max()
        if spread is not False and float(spread) < 0.02 * float(offset.abs().max()):
            other = ("row", "column")[axis]
            return f"it is off by a constant in each {name} {vector.format(other)}", where
    return "no simple pattern", where
