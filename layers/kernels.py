"""What no product's epilogue carries, each as one launch that moves its bytes once.

Inductor wrote a value beside the place it is put into, or divided by sizes that it knew at run time
alone: for 16,384 rows on an H200 (2026-11-23) its kernels took 1.1 ms for a rotation of 6144
columns and 1.4 ms for the gradient of 32,000 logits. PyTorch turned 180 MB in 0.58 ms.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from coda_agent.layers.passes import Places

_TILE = 64
_ROWS, _STEP = 8, 512  # of a tile that a CTA of `_put_back` takes
_PACKED_ROWS, _PACKED_STEP = 4, 1024
# Of a row of logits, by 32 warps. On an H200 (2026-11-24) 4096 rows of 128,256 took 0.67 ms,
# and 16,384 of 32,000 took 0.64 ms; steps of 16,384 took 0.72 and 0.91 ms.
_LOGITS_STEP = 8192
_LOG2_E = tl.constexpr(1.4426950408889634)


@triton.jit
def _turn(parts, of, out, rows, columns, TILE: tl.constexpr):
    row = tl.program_id(1) * TILE + tl.arange(0, TILE)
    j = tl.program_id(0) * TILE + tl.arange(0, TILE)
    tile = tl.zeros((TILE, TILE), out.dtype.element_ty)
    for which in tl.static_range(len(parts)):  # pyright: ignore[reportGeneralTypeIssues]
        count, stride, base, first, half = of[which]
        place = row - base
        if half:  # the inverse of what `_pack` does
            place = place // (2 * half) * (2 * half) + place % 2 * half + place % (2 * half) // 2
        i = place - first
        inside = ((row >= base) & (i >= 0) & (i < count))[:, None] & (j < columns)[None, :]
        at = i.to(tl.int64)[:, None] * stride + j[None, :]
        tile = tl.where(inside, tl.load(parts[which] + at, mask=inside, other=0.0), tile)
    to = j.to(tl.int64)[:, None] * rows + row[None, :]
    tl.store(out + to, tl.trans(tile), mask=(j < columns)[:, None] & (row < rows)[None, :])


@triton.jit
def _put_back(
    into,
    statistic,
    grads,
    y,
    table,
    bias,
    rows,
    of,
    into_stride,
    y_stride,
    table_stride,
    width,
    ROTATED: tl.constexpr,
    PERIOD: tl.constexpr,
    BIASED: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    i = tl.program_id(0) * ROWS + tl.arange(0, ROWS)
    row = i.to(tl.int64)[:, None]
    sums = tl.zeros((ROWS, STEP), tl.float32)
    for which in tl.static_range(len(grads)):  # pyright: ignore[reportGeneralTypeIssues]
        start, columns, stride = of[which]
        for first in range(0, columns, STEP):
            j = first + tl.arange(0, STEP)
            at = (start + j)[None, :]
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            g = tl.load(grads[which] + row * stride + j[None, :], mask=inside, other=0.0)
            g = g.to(tl.float32)
            sums += g * tl.load(y + row * y_stride + at, mask=inside, other=0.0).to(tl.float32)
            if ROTATED[which]:
                turn = at % PERIOD if PERIOD else at
                turn = tl.load(table + row * table_stride + turn, mask=inside, other=0.0)
                cos, sin = tl.split(tl.reshape(turn.to(tl.float32), (ROWS, STEP // 2, 2)))
                even, odd = tl.split(tl.reshape(g, (ROWS, STEP // 2, 2)))
                both = tl.join(even * cos - odd * sin, even * sin + odd * cos)
                g = tl.reshape(both, (ROWS, STEP))
            rounded = g.to(into.dtype.element_ty)
            if BIASED:
                added = tl.load(bias + at, mask=inside, other=0.0).to(tl.float32)
                sums -= rounded.to(tl.float32) * added
            tl.store(into + row * into_stride + at, rounded, mask=inside)
    tl.store(statistic + i, tl.sum(sums, 1) / width, mask=i < rows)


@triton.jit
def _logit_gradient(z, lse, targets, weights, total, columns, stride, STEP: tl.constexpr):
    row = tl.program_id(0)
    first = z + row.to(tl.int64) * stride
    weight = tl.load(weights + row)
    if weight > 0:
        shift = tl.load(lse + row) * _LOG2_E
        target = tl.load(targets + row)
        known = (target >= 0) & (target < columns)  # else memory of others would be written
        hit = tl.load(first + target, mask=known, other=0.0).to(tl.float32)
        powers = tl.zeros((STEP,), tl.float32)
        for start in range(0, columns, STEP):
            j = start + tl.arange(0, STEP)
            x = tl.load(first + j, mask=j < columns, other=float("-inf"))
            powers += tl.exp2(x.to(tl.float32) * _LOG2_E - shift)
        whole = tl.sum(powers, 0)
        factor = weight / whole
        sums = tl.zeros((STEP,), tl.float32)
        # Backwards, so that what was read last, which the L2 cache has, is read first.
        last = (columns - 1) // STEP * STEP
        for start in range(0, columns, STEP):
            j = last - start + tl.arange(0, STEP)
            x = tl.load(first + j, mask=j < columns, other=float("-inf")).to(tl.float32)
            g = tl.exp2(x * _LOG2_E - shift) * factor
            sums += g * tl.maximum(x, -3e38)  # of -inf, whose g is 0, nothing
            tl.store(first + j, g.to(z.dtype.element_ty), mask=j < columns)
        tl.debug_barrier()  # all have stored
        g = (tl.exp2(hit * _LOG2_E - shift) / whole - 1) * weight
        tl.store(first + target, g.to(z.dtype.element_ty), mask=known)
        tl.store(total + row, tl.sum(sums, 0) - weight * hit)
    else:
        for start in range(0, columns, STEP):
            j = start + tl.arange(0, STEP)
            tl.store(first + j, tl.zeros((STEP,), z.dtype.element_ty), mask=j < columns)
        tl.store(total + row, 0.0)


@triton.jit
def _pack(
    packed,
    parts,
    of,
    columns,
    packed_stride,
    BACK: tl.constexpr,
    ROWS: tl.constexpr,
    STEP: tl.constexpr,
):
    for which in tl.static_range(len(parts)):  # pyright: ignore[reportGeneralTypeIssues]
        if tl.program_id(2) == which:
            rows, stride, base, first, half = of[which]
            i = tl.program_id(1) * ROWS + tl.arange(0, ROWS)
            j = tl.program_id(0) * STEP + tl.arange(0, STEP)
            place = first + i
            if half:
                place = place // (2 * half) * (2 * half) + place % half * 2 + place // half % 2
            inside = (i < rows)[:, None] & (j < columns)[None, :]
            here = parts[which] + i.to(tl.int64)[:, None] * stride + j[None, :]
            there = packed + (base + place).to(tl.int64)[:, None] * packed_stride + j[None, :]
            if BACK:
                tl.store(here, tl.load(there, mask=inside), mask=inside)
            else:
                tl.store(there, tl.load(here, mask=inside), mask=inside)


def put_back(
    grads: Sequence[Tensor],
    y: Tensor,
    table: Tensor | None,
    rotated: tuple[int, int] | None,
    bias: Tensor | None,
    width: int,
) -> tuple[Tensor, Tensor]:
    """`passes.put_back` on a GPU; rows may lie apart, their elements may not."""
    rows, columns = y.shape
    into, statistic = y.new_empty(rows, columns), y.new_empty(rows, dtype=torch.float32)
    turning, period = (columns, 0) if rotated is None else (math.prod(rotated), rotated[1])
    if table is None:
        turning, period = 0, 0
    elif any(grad.shape[1] % 2 for grad in grads):  # pairs lie across parts
        grads = [torch.cat([*grads], dim=1)]
    pieces, of, turns, start = list[Tensor](), list[tuple[int, ...]](), list[bool](), 0
    for grad in grads:
        grad = grad if grad.stride(1) == 1 else grad.contiguous()
        cut = min(max(turning - start, 0), grad.shape[1])
        for piece in grad.split((cut, grad.shape[1] - cut), dim=1):
            if piece.shape[1]:
                pieces.append(piece)
                of.append((start, piece.shape[1], piece.stride(0)))
                turns.append(start < turning)
                start += piece.shape[1]
    cosines = y if table is None else table
    added = y if bias is None else bias.contiguous()
    given = into, statistic, tuple(pieces), y, cosines, added, rows, tuple(of)
    strides = into.stride(0), y.stride(0), cosines.stride(0), width
    flags = tuple(turns), period, bias is not None, _ROWS, _STEP
    _launched(_put_back, (triton.cdiv(rows, _ROWS),), y, *given, *strides, *flags)
    return into, statistic


def logit_gradient(z: Tensor, lse: Tensor, targets: Tensor, weights: Tensor) -> Tensor:
    """`passes.logit_gradient` on a GPU."""
    total = torch.empty_like(weights)
    given = z, lse.contiguous(), targets.contiguous(), weights.contiguous(), total
    step = min(triton.next_power_of_2(z.shape[1]), _LOGITS_STEP)
    sizes = z.shape[1], z.stride(0), step
    _launched(_logit_gradient, (len(z),), z, *given, *sizes, warps=max(step // 256, 4))
    return total


def turned(parts: Sequence[Tensor], places: Places = ((0, 0, 0),)) -> Tensor:
    """`passes.turned` on a GPU; what is packed is nowhere."""
    parts = [t if t.stride(1) == 1 else t.contiguous() for t in parts]
    rows, columns = sum(map(len, parts)), parts[0].shape[1]
    out = parts[0].new_empty(columns, rows)
    grid = triton.cdiv(columns, _TILE), triton.cdiv(rows, _TILE)
    _launched(_turn, grid, out, tuple(parts), _lying(parts, places), out, rows, columns, _TILE)
    return out


def packed(parts: Sequence[Tensor], places: Places) -> Tensor:
    """`passes.packed` on a GPU; rows may lie apart, their elements may not."""
    out = parts[0].new_empty(sum(map(len, parts)), parts[0].shape[1])
    _moved(out, parts, places, back=False)
    return out


def unpacked(packed: Tensor, rows: Sequence[int], places: Places) -> list[Tensor]:
    """`passes.unpacked` on a GPU."""
    packed = packed if packed.stride(1) == 1 else packed.contiguous()
    parts = [packed.new_empty(count, packed.shape[1]) for count in rows]
    _moved(packed, parts, places, back=True)
    return parts


def _moved(packed: Tensor, parts: Sequence[Tensor], places: Places, *, back: bool) -> None:
    columns = packed.shape[1]
    of = _lying(parts, places)
    down = triton.cdiv(max(map(len, parts)), _PACKED_ROWS)
    grid = triton.cdiv(columns, _PACKED_STEP), down, len(parts)
    tile = _PACKED_ROWS, _PACKED_STEP
    _launched(_pack, grid, packed, packed, tuple(parts), of, columns, packed.stride(0), back, *tile)


def _lying(parts: Sequence[Tensor], places: Places) -> tuple[tuple[int, ...], ...]:
    return tuple((len(t), t.stride(0), *place) for t, place in zip(parts, places, strict=True))


def _launched(kernel: Any, grid: tuple[int, ...], on: Tensor, *args: Any, warps: int = 8) -> None:
    if not on.numel():
        return
    with torch.cuda.device_of(on):
        kernel[grid](*args, num_warps=warps)
