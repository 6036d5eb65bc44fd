"""What `fp8_products.py` quantises, as one launch on a GPU, whatever the shape.

Inductor's kernels read a long row twice, and are compiled for each shape or for sizes unknown.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

_E4M3 = torch.float8_e4m3fn
_LEAST = tl.constexpr(1e-12)
_LARGEST = tl.constexpr(448.0)


@triton.jit
def _quantise(
    x,
    low,
    high,
    factor,
    times,
    values,
    scale,
    columns,
    stride,
    eps,
    WHOLE: tl.constexpr,
    FACTOR: tl.constexpr,
    ROOT: tl.constexpr,
    TIMES: tl.constexpr,
    WIDTH: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    j = tl.arange(0, WIDTH)
    inside = j < columns
    wide = tl.load(x + row * stride + j, mask=inside, other=0.0).to(tl.float32)
    if WHOLE:
        largest = tl.maximum(-tl.load(low).to(tl.float32), tl.load(high).to(tl.float32))
    else:
        largest = tl.max(tl.abs(wide), 0)
    step = tl.maximum(largest, _LEAST) / _LARGEST
    tl.store(values + row * columns + j, (wide / step).to(values.dtype.element_ty), mask=inside)
    if FACTOR:
        given = tl.load(factor + row)
        step *= 1.0 / tl.sqrt(given + eps) if ROOT else given
    if TIMES:
        step *= tl.load(times)
    if not WHOLE or row == 0:
        tl.store(scale + row, step)


def rows(
    x: Tensor, factor: Tensor | None, eps: float | None, times: Tensor | None
) -> tuple[Tensor, Tensor]:
    """`fp8_products.rows` on a GPU."""
    scale = x.new_empty(len(x), dtype=torch.float32)
    return _launched(x, scale, None, factor, eps, times)


def whole(weight: Tensor, low: Tensor, high: Tensor) -> tuple[Tensor, Tensor]:
    """`fp8_products.whole` on a GPU, by the least and the largest element."""
    scale = weight.new_empty((), dtype=torch.float32)
    return _launched(weight, scale, (low, high), None, None, None)


def _launched(
    x: Tensor,
    scale: Tensor,
    ends: tuple[Tensor, Tensor] | None,
    factor: Tensor | None,
    eps: float | None,
    times: Tensor | None,
) -> tuple[Tensor, Tensor]:
    x = x if x.stride(1) == 1 else x.contiguous()
    values = x.new_empty(x.shape, dtype=_E4M3)
    if not x.numel():
        return values, scale
    low, high = (x, x) if ends is None else ends
    flags = ends is not None, factor is not None, eps is not None, times is not None
    given = x if factor is None else factor.contiguous(), x if times is None else times
    width = triton.next_power_of_2(x.shape[1])
    sizes, options = (x.shape[1], x.stride(0), eps or 0.0), {"num_warps": _warps(width)}
    kernel: Any = _quantise
    with torch.cuda.device_of(x):
        kernel[len(x),](x, low, high, *given, values, scale, *sizes, *flags, width, **options)
    return values, scale


def _warps(width: int) -> int:
    return min(max(width // 512, 4), 16)
