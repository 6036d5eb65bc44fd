"""Comparisons, choice, rounding to integers and the elementary functions: further atoms.

A condition is 1 or 0, so products of conditions are "and", and `1 - c` is "not".
"""

from __future__ import annotations

import math
from collections.abc import Callable

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.derivatives import minus, plus, times
from coda_agent.primitives.fast_math import (
    comparison,
    exponential_less_one,
    fast,
    function,
    remainder,
    select,
    tangent,
)
from coda_agent.primitives.graph import Operand, Value
from coda_agent.primitives.operation import (
    Decorator,
    Degree,
    Edge,
    Term,
    additive,
    as_tensors,
    elementwise,
    kept,
    unknown,
)
from coda_agent.primitives.ops import exp, log, rsqrt

__all__ = [
    "acos",
    "acosh",
    "asin",
    "asinh",
    "atan",
    "atan2",
    "atanh",
    "copysign",
    "cosh",
    "equal",
    "erfc",
    "exp2",
    "expm1",
    "floor",
    "fmod",
    "greater",
    "greater_equal",
    "log1p",
    "log2",
    "power",
    "round_even",
    "sinh",
    "tan",
    "trunc",
    "where",
]


def _flat(*_: object) -> Operand:
    """The slope of what is constant but for its jumps."""
    return 0.0


def _condition(*_: Edge) -> Edge:
    return Edge(False, True)


def _at_zero(x: Edge) -> Edge:
    """Give the edge of what is 0 at 0, maybe infinite elsewhere."""
    return Edge(x.zero, x.zero)


def _choice_degree(condition: Degree, x: Degree, y: Degree) -> Degree:
    return additive(x, y) if condition is Degree.CONSTANT else Degree.NONLINEAR


def _choice_slope(
    z: Value, c: Operand, x: Operand, y: Operand, dc: Operand, dx: Operand, dy: Operand
) -> Operand:
    return where(c, dx, dy)


def _signed_slope(z: Value, x: Operand, y: Operand, dx: Operand, dy: Operand) -> Operand:
    return times(dx, copysign(1.0, x) * copysign(1.0, y))


def _sinh_slope(z: Value, x: Value) -> Operand:
    return cosh(x)


def _library(
    name: str, slope: Callable[[Value, Value], Operand], edge: Callable[..., Edge] = unknown
) -> Decorator:
    """Define a function of one value that CUDA's library has.

    `slope` is its derivative, from its value and its argument. On an H200 these err by 5.2 · 2⁻²⁴
    of the result at most.
    """
    return elementwise(
        function(name),
        flops=12,
        derivative=lambda z, x, dx: times(dx, slope(z, x)),
        edge=edge,
        error="result",
        aten=(name,),
    )


@elementwise(
    select,
    derivative=_choice_slope,
    edge=lambda c, x, y: kept(x, y),
    degree=_choice_degree,
)
def where(condition: Term, x: Term, y: Term) -> torch.Tensor:
    """x where the condition is not 0, else y; what is not taken may be infinite or NaN."""
    condition, x, y = as_tensors(condition, x, y)
    return torch.where(condition != 0, x, y)


@elementwise(comparison("OGT"), derivative=_flat, edge=lambda x, y: Edge(x.zero and y.zero, True))
def greater(x: Term, y: Term) -> torch.Tensor:
    """1 where x > y, else 0, for NaN too; less is `greater(y, x)`."""
    x, y = as_tensors(x, y)
    return (x > y).to(x.dtype)


@elementwise(comparison("OGE"), derivative=_flat, edge=_condition)
def greater_equal(x: Term, y: Term) -> torch.Tensor:
    """1 where x >= y, else 0, for NaN too; `1 - greater_equal(y, x)` is x > y or NaN."""
    x, y = as_tensors(x, y)
    return (x >= y).to(x.dtype)


@elementwise(comparison("OEQ"), commutative=True, derivative=_flat, edge=_condition)
def equal(x: Term, y: Term) -> torch.Tensor:
    """1 where x = y, else 0; so `equal(x, x)` is 0 of NaN alone."""
    x, y = as_tensors(x, y)
    return (x == y).to(x.dtype)


@elementwise(function("floor"), derivative=_flat, edge=kept, aten=("floor",))
def floor(x: torch.Tensor) -> torch.Tensor:
    """The largest integer that is at most x; the least above is `-floor(-x)`."""
    return x.floor()


@elementwise(function("trunc"), derivative=_flat, edge=kept, aten=("trunc", "fix"))
def trunc(x: torch.Tensor) -> torch.Tensor:
    """The integer next to x on the side of 0."""
    return x.trunc()


@elementwise(function("roundeven"), derivative=_flat, edge=kept)
def round_even(x: torch.Tensor) -> torch.Tensor:
    """The nearest integer, ties to even."""
    return x.round()


@elementwise(
    function("copysign"),
    derivative=_signed_slope,
    edge=lambda x, y: x,
    aten=("copysign",),
)
def copysign(x: Term, y: Term) -> torch.Tensor:
    """|x| with the sign of y, of which 0 has one too."""
    return torch.copysign(*as_tensors(x, y))


@elementwise(
    remainder,
    flops=8,
    derivative=lambda z, x, y, dx, dy: minus(dx, times(dy, trunc(x / y))),
    aten=("fmod",),
)
def fmod(x: Term, y: Term) -> torch.Tensor:
    """x less the whole multiple of y next to it on the side of 0, for |x / y| < 2²²."""
    return torch.fmod(*as_tensors(x, y))


@elementwise(
    exponential_less_one,
    flops=12,
    derivative=lambda z, x, dx: times(dx, z + 1.0),
    edge=_at_zero,
    error="result",
    aten=("expm1",),
)
def expm1(x: torch.Tensor) -> torch.Tensor:
    """eˣ - 1, with all its digits near 0: on an H200 to 4 · 2⁻²⁴ where |x| < 0.6."""
    return x.expm1()


@elementwise(
    fast("exp2"),
    derivative=lambda z, x, dx: times(times(dx, math.log(2)), z),
    error="result",
    aten=("exp2",),
)
def exp2(x: torch.Tensor) -> torch.Tensor:
    """2 to the power x (MUFU.EX2)."""
    return x.exp2()


@_library("log2", lambda z, x: (1 / math.log(2)) / x)
def log2(x: torch.Tensor) -> torch.Tensor:
    """Logarithm to base 2, with all its digits near 1, where MUFU.LG2 has few."""
    return x.log2()


@_library("log1p", lambda z, x: 1.0 / (x + 1.0), _at_zero)
def log1p(x: torch.Tensor) -> torch.Tensor:
    """log(1 + x), with all its digits near 0."""
    return x.log1p()


@_library("asin", lambda z, x: rsqrt(1.0 - x * x), _at_zero)
def asin(x: torch.Tensor) -> torch.Tensor:
    """Arc sine, in radians."""
    return x.asin()


@_library("acos", lambda z, x: -rsqrt(1.0 - x * x))
def acos(x: torch.Tensor) -> torch.Tensor:
    """Arc cosine, in radians."""
    return x.acos()


@_library("atan", lambda z, x: 1.0 / (x * x + 1.0), kept)
def atan(x: torch.Tensor) -> torch.Tensor:
    """Arc tangent, in radians."""
    return x.atan()


@elementwise(
    tangent,
    flops=24,
    derivative=lambda z, x, dx: times(dx, z * z + 1.0),
    edge=kept,
    error="result",
    aten=("tan",),
)
def tan(x: torch.Tensor) -> torch.Tensor:
    """Tangent of x in radians, for |x| < 2²²; on an H200 to 3 · 2⁻²⁴ where |x| < 50."""
    return x.tan()


@_library("sinh", _sinh_slope, _at_zero)
def sinh(x: torch.Tensor) -> torch.Tensor:
    """Hyperbolic sine."""
    return x.sinh()


@_library("cosh", lambda z, x: sinh(x))
def cosh(x: torch.Tensor) -> torch.Tensor:
    """Hyperbolic cosine."""
    return x.cosh()


@_library("asinh", lambda z, x: rsqrt(x * x + 1.0), kept)
def asinh(x: torch.Tensor) -> torch.Tensor:
    """Inverse hyperbolic sine."""
    return x.asinh()


@_library("acosh", lambda z, x: rsqrt(x * x - 1.0))
def acosh(x: torch.Tensor) -> torch.Tensor:
    """Inverse hyperbolic cosine."""
    return x.acosh()


@_library("atanh", lambda z, x: 1.0 / (1.0 - x * x), _at_zero)
def atanh(x: torch.Tensor) -> torch.Tensor:
    """Inverse hyperbolic tangent."""
    return x.atanh()


@_library(
    "erfc", lambda z, x: exp(-(x * x)) * (-2 / math.sqrt(math.pi)), lambda x: Edge(False, x.finite)
)
def erfc(x: torch.Tensor) -> torch.Tensor:
    """1 - erf(x), with all its digits where it is small."""
    return x.erfc()


@elementwise(
    function("atan2"),
    flops=20,
    derivative=lambda z, y, x, dy, dx: minus(times(dy, x), times(dx, y)) / (x * x + y * y),
    edge=kept,
    error="result",
    aten=("atan2",),
)
def atan2(y: Term, x: Term) -> torch.Tensor:
    """The angle of the point (x, y), in radians between -π and π."""
    return torch.atan2(*as_tensors(y, x))


def _power_slope(z: Value, x: Operand, y: Operand, dx: Operand, dy: Operand) -> Operand:
    along = times(times(dx, y), power(x, y - 1.0)) if isinstance(dx, Value) or dx else 0.0
    return plus(along, times(times(dy, z), log(x)) if isinstance(dy, Value) or dy else 0.0)


@elementwise(function("pow"), flops=20, derivative=_power_slope, error="result")
def power(x: Term, y: Term) -> torch.Tensor:
    """x to the power y; NaN where x is negative and y no integer."""
    return torch.pow(*as_tensors(x, y))
