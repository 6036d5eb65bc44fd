"""What atoms are lowered to: functions of CuTeDSL and quack on Float32, in their fast forms."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import Any


def imported(module: str, name: str, **options: Any) -> Callable[..., Any]:
    """A function of `module`, which is imported when a kernel is traced."""
    return lambda *args: getattr(import_module(module), name)(*args, **options)


quack_function = partial(imported, "quack.activation")
"""A function of quack's activation vocabulary."""
fast = partial(imported, "cutlass.cute.math", fastmath=True)
"""A function of one argument in its fast form (MUFU instructions)."""
absolute_value = imported("cutlass.cute.math", "abs")


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
