"""The elementwise kernel's reductions; only the lowering imports this."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

from cutlass import Boolean, Float32, Numeric, cute
from cutlass.cutlass_dsl import select_

from coda_agent.primitives.fast_math import Lanes

_arch: Any = cute.arch
_math: Any = cute.math
_larger = partial(_arch.fmax, nan=True)


def fold_rows(combine: str, sums: Any, values: Sequence[Lanes], inside: Boolean) -> None:
    """Fold a row's values into those of the rows before it."""
    for j, value in enumerate(values):
        after = sums[j] + value if combine == "add" else _arch.fmax(sums[j], value)
        sums[j] = Float32(select_(inside, after, sums[j]))


def folded(combine: str, values: Sequence[Lanes], inside: Boolean) -> list[Float32]:
    """Fold a warp's inner threads; a log-sum-exp into maximum and sum."""
    if combine == "min":  # the maximum of the negated values, until `total`
        values, combine = [-Float32(v) for v in values], "max"
    identity = Float32(0.0 if combine == "add" else -math.inf)
    values = [Float32(select_(inside, Float32(v), identity)) for v in values]
    if combine == "add":
        return [_arch.warp_reduction_sum(_tree(values, lambda x, y: x + y))]
    top = _arch.warp_reduction(_tree(values, _larger), _larger)
    if combine == "max":
        return [top]
    shift = _shift(top)
    parts = [_math.exp(v - shift, fastmath=True) for v in values]
    return [top, _arch.warp_reduction_sum(_tree(parts, lambda x, y: x + y))]


def total(combine: str, planes: list[list[Any]]) -> Numeric:
    """Fold the partials of a CTA's warps."""
    if combine == "add":
        return _tree(planes[0], lambda x, y: x + y)
    top = _tree(planes[0], _larger)
    if combine in ("max", "min"):
        return top if combine == "max" else -top
    shift = _shift(top)
    parts = [s * _math.exp(t - shift, fastmath=True) for t, s in zip(*planes, strict=True)]
    return _math.log(_tree(parts, lambda x, y: x + y), fastmath=True) + top


def _shift(top: Float32) -> Float32:
    """Find what exponents are taken less: the maximum, or 0 of -inf."""
    return Float32(select_(top == Float32(-math.inf), Float32(0.0), top))


def _tree(values: list[Float32], fold: Callable[[Any, Any], Any]) -> Float32:
    while len(values) > 1:
        pairs = [fold(x, y) for x, y in zip(values[::2], values[1::2], strict=False)]
        values = pairs + values[len(pairs) * 2 :]
    return values[0]
