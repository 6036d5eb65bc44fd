"""Operands in e4m3, and the products of a forward pass by FP8 kernels.

A factor is quantised anew at each product: rows of it by their own maxima, or a weight by one
scale in all, where a kernel takes no more. On a GPU that is one launch (`fp8_kernels.py`), and of a
weight with one scale two; the host waits for none of them.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from coda_agent.generated import (
    gemm_fp8_residual_partial_rmsnorm,
    gemm_fp8_rmsnorm,
    gemm_fp8_rmsnorm_rope,
    gemm_fp8_rmsnorm_swiglu,
)

_rope = gemm_fp8_rmsnorm_rope.without("D")
_gated = gemm_fp8_rmsnorm_swiglu.without("D")
E4M3 = torch.float8_e4m3fn
LARGEST = torch.finfo(E4M3).max
"""The largest e4m3 number, 448."""
LEAST = 1e-12
"""Of a maximum: zeros stay zeros."""


class Products(NamedTuple):
    """Those of a forward pass, in one precision; `norm_gated` is `norm_swiglu` for inference, which
    does not store what only the backward pass reads. No pass reads that of `norm_rope`."""

    residual_norm: Callable[..., Any]
    norm: Callable[..., Any]
    norm_rope: Callable[..., Any]
    norm_swiglu: Callable[..., Any]
    norm_gated: Callable[..., Any]


class Quantised(NamedTuple):
    """Tokens, or the output channels of a weight: rows of `values` times `scale`.

    Attributes:
        values: (N, K) e4m3.
        scale: (N,) float32, or () of all rows.
    """

    values: Tensor
    scale: Tensor


def rows(
    x: Tensor,
    factor: Tensor | None = None,
    eps: float | None = None,
    times: Tensor | None = None,
) -> Quantised:
    """Rows, each by its own maximum.

    Args:
        x: (M, K).
        factor: (M,) float32, what the rows are meant to be multiplied by: it goes into `scale`.
        eps: With it, they are by rsqrt(factor + eps).
        times: () float32, one more factor, of all rows.
    """
    if _apart(x):
        from coda_agent.layers import fp8_kernels  # Triton, which not every torch brings

        return Quantised(*fp8_kernels.rows(x, factor, eps, times))
    wide = x.float()
    step = wide.abs().amax(-1).clamp(min=LEAST) / LARGEST
    scale = step
    if factor is not None:
        scale = step * (factor if eps is None else torch.rsqrt(factor + eps))
    return Quantised((wide / step[:, None]).to(E4M3), scale if times is None else scale * times)


def whole(weight: Tensor) -> Quantised:
    """A weight (N, K) with one scale in all, ()."""
    low, high = weight.aminmax()
    if _apart(weight):
        from coda_agent.layers import fp8_kernels

        return Quantised(*fp8_kernels.whole(weight, low, high))
    step = torch.maximum(-low.float(), high.float()).clamp(min=LEAST) / LARGEST
    return Quantised((weight.float() / step).to(E4M3), step)


def fitting(weight: Tensor) -> Tensor:
    """A weight, without its gradient.

    Raises:
        ValueError: it is no matrix, or has a side that is no multiple of 16.
    """
    if weight.ndim != 2 or any(size % 16 for size in weight.shape):
        raise ValueError(
            f"a weight is {tuple(weight.shape)}, expected (N, K) in multiples of 16 as FP8 "
            "products take them; pad it with zeros"
        )
    return weight.detach()


def _residual_norm(a: Tensor, weight: Tensor, x: Tensor, gamma: Tensor) -> Any:
    """`gemm_residual_partial_rmsnorm` in FP8."""
    (left, scale), (right, other) = rows(a), rows(weight)
    return gemm_fp8_residual_partial_rmsnorm(left, right, scale, other, x, gamma)


def _norm(h: Tensor, weight: Tensor, r: Tensor) -> Any:
    """`gemm_rmsnorm` in FP8."""
    return gemm_fp8_rmsnorm(*_factors(h, weight, r))


def _norm_rope(h: Tensor, weight: Tensor, r: Tensor, table: Tensor) -> Any:
    """`gemm_rmsnorm_rope` without D in FP8."""
    return _rope(*_factors(h, weight, r), table)


def _norm_swiglu(h: Tensor, weight: Tensor, r: Tensor) -> Any:
    """`gemm_rmsnorm_swiglu` in FP8."""
    return gemm_fp8_rmsnorm_swiglu(*_factors(h, weight, r))


def _norm_gated(h: Tensor, weight: Tensor, r: Tensor) -> Any:
    """The same without D."""
    return _gated(*_factors(h, weight, r))


def _factors(h: Tensor, weight: Tensor, r: Tensor) -> tuple[Any, ...]:
    """What the kernels behind a norm take. All scales are in that of the rows: a scalar in memory
    beside a number would cost a launch."""
    right, times = whole(weight)
    left, scale = rows(h, r, times=times)
    return left, right, 1.0, 1.0, scale


FP8 = Products(_residual_norm, _norm, _norm_rope, _norm_swiglu, _norm_gated)
"""They take what the 16-bit kernels of the same mathematics take, and give what those give, in
bfloat16."""


def _apart(x: Tensor) -> bool:
    """Whether to launch a kernel of its own; what torch.compile traces is PyTorch's."""
    return x.is_cuda and not torch.compiler.is_compiling()
