"""What atoms are lowered to: fast functions on CuTeDSL's Float32."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from importlib import import_module
from typing import TYPE_CHECKING, Any, TypeAlias

if TYPE_CHECKING:
    from cutlass import Float32, Numeric
    from quack.epilogue.math import F2, Pair

Register: TypeAlias = "Numeric | float"
"""A number in a thread's register, or one that is known when the kernel is traced."""
Lanes: TypeAlias = "Register | Pair | F2"
"""What a thread has of a value of the graph: a number, or those of two columns."""


def imported(module: str, name: str, **options: Any) -> Callable[..., Any]:
    """Find a function of `module`, imported when a kernel is traced."""
    return lambda *args: getattr(import_module(module), name)(*args, **options)


quack_function = partial(imported, "quack.activation")
"""A function of quack's activation vocabulary."""
fast = partial(imported, "cutlass.cute.math", fastmath=True)
"""A function of one argument in its fast form (MUFU instructions)."""
absolute_value = imported("cutlass.cute.math", "abs")
_math = partial(imported, "cutlass.cute.math")


def function(name: str) -> Callable[..., Register]:
    """Make a call of CUDA's library, right to a few last places."""

    def call(*args: Register) -> Register:
        from cutlass import Float32

        return _math(name)(*(Float32(x) for x in args))

    return call


def binary(name: str) -> Callable[[Register, Register], Float32]:
    """Make a call of arith; NaN-propagating forms are one FMNMX.NAN on SM90."""

    def call(x: Register, y: Register) -> Float32:
        from cutlass import Float32
        from cutlass._mlir.dialects import arith

        return Float32(getattr(arith, name)(Float32(x).ir_value(), Float32(y).ir_value()))

    return call


def reciprocal(x: Register) -> Register:
    """1 / x (MUFU.RCP), subnormal numbers as 0."""
    from cutlass import Float32
    from cutlass._mlir_helpers import math

    return math.rcp(Float32(x), approx=True, ftz=True)


def _compared(predicate: str, x: Register, y: Register) -> object:
    from cutlass import Float32
    from cutlass._mlir.dialects import arith

    of = getattr(arith.CmpFPredicate, predicate)
    return arith.cmpf(of, Float32(x).ir_value(), Float32(y).ir_value())


def _chosen(condition: object, x: Register, y: Register) -> Float32:
    from cutlass import Float32
    from cutlass._mlir.dialects import arith

    return Float32(arith.select(condition, Float32(x).ir_value(), Float32(y).ir_value()))


def comparison(predicate: str) -> Callable[[Register, Register], Float32]:
    """Give 1 where a predicate of LLVM's holds, else 0."""
    return lambda x, y: _chosen(_compared(predicate, x, y), 1.0, 0.0)


def step_function(x: Register) -> Register:
    """1 where x > 0, else 0."""
    return comparison("OGT")(x, 0.0)


def select(condition: Register, x: Register, y: Register) -> Float32:
    """Take x where the condition is not 0, else y."""
    return _chosen(_compared("UNE", condition, 0.0), x, y)


def remainder(x: Register, y: Register) -> Register:
    """Compute the remainder of a quotient below 2²², with x's sign."""
    from cutlass import Float32

    size, unit = absolute_value(Float32(x)), absolute_value(Float32(y))
    # The quotient is off by one at most, and the fused product exact.
    left = fused(-_math("floor")(size * reciprocal(unit)), unit, size)
    left = _chosen(_compared("OLT", left, 0.0), left + unit, left)
    left = _chosen(_compared("OGE", left, unit), left - unit, left)
    left = _chosen(_compared("OEQ", unit, math.inf), size, left)
    return _math("copysign")(left, Float32(x))


# Of (tan r / r - 1) / r² in powers of r², highest first: to 2⁻²⁹ of the tangent for |r| <= π/4.
_TANGENT = (
    0.004381966777145863, 7.98650216893293e-05, 0.010842036455869675, 0.021280255168676376,
    0.054060231894254684, 0.13332660496234894, 0.33333349227905273,
)  # fmt: skip


def tangent(x: Register) -> Register:
    """Compute the tangent, for |x| < 2²²."""
    from cutlass import Float32

    quarters = nearest(Float32(x) * (2 / math.pi))
    angle = fused(quarters, 4.3711390001862426e-08, fused(quarters, -1.5707963705062866, x))
    square, series = angle * angle, Float32(_TANGENT[0])
    for coefficient in _TANGENT[1:]:
        series = fused(series, square, coefficient)
    found = fused(series * square, angle, angle)
    half = quarters * 0.5
    odd = _compared("UNE", half, nearest(half))
    return _chosen(odd, -reciprocal(found), found)


def exponential_less_one(x: Register) -> Register:
    """Compute eˣ - 1: its series near 0, to 2⁻²⁶ of it."""
    from cutlass import Float32

    x, series = Float32(x), 1 / math.factorial(9)
    for n in range(8, 0, -1):
        series = fused(series, x, 1 / math.factorial(n))
    near = _compared("OLT", absolute_value(x), 0.5)
    return _chosen(near, series * x, fast("exp")(x) - 1.0)


def soft_plus(x: Register) -> Register:
    """Compute log(1 + eˣ): eˣ times a series below -4, where the sum rounds its digits away."""
    from cutlass import Float32

    x = Float32(x)
    e = fast("exp")(x)
    series = fused(e, fused(e, fused(e, -1 / 4, 1 / 3), -1 / 2), 1.0) * e
    found = _chosen(_compared("OLT", x, -4.0), series, fast("log")(e + 1.0))
    return _chosen(_compared("OGT", x, 20.0), x, found)


# 1 - erf(x) = Σ cₖ tᵏ · e^(-x²), t = 1 / (1 + p x): formula 7.1.26 of Abramowitz and Stegun.
# `cute.math.erf` has it, too; here its e^(-x²) is one with the program's own.
_ERROR_RATE = 0.3275911
_ERROR = 1.061405429, -1.453152027, 1.421413741, -0.284496736, 0.254829592


def error_function(x: Register) -> Register:
    """Compute erf, good to 1.5e-7."""
    from cutlass import Float32

    size, series = absolute_value(Float32(x)), Float32(_ERROR[0])
    t = reciprocal(fused(size, _ERROR_RATE, 1.0))
    for coefficient in _ERROR[1:]:
        series = fused(series, t, coefficient)
    found = fused(-series * t, fast("exp")(-(size * size)), 1.0)
    return _math("copysign")(found, Float32(x))


def fused(x: Register, y: Register, z: Register) -> Register:
    """Compute x · y + z in one FFMA."""
    from cutlass import Float32, cute

    x, y, z = Float32(x), Float32(y), Float32(z)
    return cute.math.fma(x, y, z)  # pyright: ignore[reportAttributeAccessIssue]


def assembly(code: str, arity: int = 1) -> Callable[..., Float32]:
    """Make a function of PTX: `$0` the result, `$1` … the arguments."""

    def call(*args: Register) -> Float32:
        from cutlass import Float32
        from cutlass._mlir.dialects import llvm

        values = [Float32(a).ir_value() for a in args]
        # Early clobber: $0 may be written before the last argument is read.
        constraints = "=&f" + ",f" * arity
        # Free of side effects, so that equal ones are computed once and unused ones not at all.
        return Float32(
            llvm.inline_asm(
                Float32.mlir_type, values, f"{{ {code} }}", constraints,
                has_side_effects=False, is_align_stack=False,
            )
        )  # fmt: skip

    return call


def nearest(x: Register) -> Register:
    """Round to the nearest integer, for |x| < 2²²."""
    # Adding 1.5·2²³ leaves no bit for the fraction, on the FMA pipe; FRND shares MUFU's. As an fma,
    # because quack reports that SM100's loop vectoriser crashes on values added twice.
    return fused(x, 1.0, 12582912.0) - 12582912.0
