"""What atoms are lowered to: functions of CuTeDSL and quack on Float32, in their fast forms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any


def quack_function(name: str) -> Callable[..., Any]:
    """A function of quack's activation vocabulary, imported when a kernel is traced."""

    def call(*args: Any) -> Any:
        from quack import activation

        return getattr(activation, name)(*args)

    return call


def fast(name: str) -> Callable[..., Any]:
    """A function of cute.math in its fast form (MUFU instructions)."""

    def call(x: Any) -> Any:
        from cutlass import cute

        return getattr(cute.math, name)(x, fastmath=True)

    return call


def binary(name: str) -> Callable[..., Any]:
    """A binary arith operation on Float32; the NaN-propagating forms are one FMNMX.NAN on SM90."""

    def call(x: Any, y: Any) -> Any:
        from cutlass import Float32
        from cutlass._mlir.dialects import arith

        return Float32(getattr(arith, name)(Float32(x).ir_value(), Float32(y).ir_value()))

    return call


def reciprocal(x: Any) -> Any:
    """1 / x (MUFU.RCP), subnormal numbers as 0."""
    from cutlass import Float32
    from cutlass._mlir_helpers import math

    return math.rcp(Float32(x), approx=True, ftz=True)


def absolute_value(x: Any) -> Any:
    """|x|."""
    from cutlass import cute

    return cute.math.abs(x)  # pyright: ignore[reportAttributeAccessIssue]


def step_function(x: Any) -> Any:
    """1 where x > 0, else 0."""
    from cutlass import Float32
    from cutlass._mlir.dialects import arith

    zero, one = Float32(0.0).ir_value(), Float32(1.0).ir_value()
    above = arith.cmpf(arith.CmpFPredicate.OGT, Float32(x).ir_value(), zero)
    return Float32(arith.select(above, one, zero))


def fused(x: Any, y: Any, z: Any) -> Any:
    """x · y + z in one FFMA."""
    from cutlass import Float32, cute

    x, y, z = Float32(x), Float32(y), Float32(z)
    return cute.math.fma(x, y, z)  # pyright: ignore[reportAttributeAccessIssue]


def nearest(x: Any) -> Any:
    """The nearest integer, for |x| < 2²²."""
    # Adding 1.5·2²³ leaves no bit for the fraction, on the FMA pipe; FRND shares MUFU's. As an fma,
    # because quack reports that SM100's loop vectoriser crashes on values added twice.
    return fused(x, 1.0, 12582912.0) - 12582912.0
