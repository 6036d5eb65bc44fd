"""Elementwise atoms: operations with a lowering of their own. Everything else composes them.

An atom is defined here and nowhere else: its decorator says what every reading needs to know.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.derivatives import chained, minus, plus, times
from coda_agent.primitives.fast_math import (
    absolute_value,
    binary,
    error_function,
    fast,
    fused,
    nearest,
    quack_function,
    reciprocal,
    soft_plus,
    step_function,
)
from coda_agent.primitives.graph import Operand, Value
from coda_agent.primitives.operation import Degree, Edge, additive, as_tensors, elementwise, kept

if TYPE_CHECKING:
    from coda_agent.primitives.operation import Term

__all__ = [
    "absolute",
    "cos",
    "erf",
    "exp",
    "gelu_erf",
    "gelu_tanh",
    "log",
    "maximum",
    "minimum",
    "rsqrt",
    "sigmoid",
    "sin",
    "softplus",
    "sqrt",
    "step",
    "tanh",
]


def _bounded(*values: Edge) -> Edge:
    """Give the edge of what stays finite, but not 0."""
    return Edge(False, kept(*values).finite)


def _product_edge(x: Edge, y: Edge) -> Edge:
    finite = x.finite and y.finite
    return Edge((x.zero or y.zero) and finite, finite)


def _product_degree(x: Degree, y: Degree) -> Degree:
    return max(x, y) if min(x, y) is Degree.CONSTANT else Degree.NONLINEAR


def _quotient_degree(x: Degree, y: Degree) -> Degree:
    return x if y is Degree.CONSTANT else Degree.NONLINEAR


def _product_slope(z: Value, x: Operand, y: Operand, dx: Operand, dy: Operand) -> Operand:
    if isinstance(x, Value) and isinstance(y, Value) and x.index == y.index:
        return times(times(x, 2.0), dx)
    return plus(times(dx, y), times(x, dy))


def _extremum_slope(sign: int) -> Callable[..., Operand]:
    """Of maximum (sign 1) and minimum (-1)."""

    def rule(z: Value, x: Operand, y: Operand, dx: Operand, dy: Operand) -> Operand:
        if not isinstance(dx, Value) and dx == 0:
            x, y, dx, dy = y, x, dy, dx
        chosen = step(minus(x, y) if sign > 0 else minus(y, x))
        return plus(dy, times(chosen, minus(dx, dy)))

    return rule


def _cos_slope(z: Value, x: Value) -> Operand:
    return -sin(x)


def _tanh_slope(z: Value, x: Value) -> Operand:
    # 1 - tanh² would inherit MUFU.TANH's error of 2⁻¹¹ and cancel where tanh is near 1.
    s = sigmoid(absolute(x) * -2.0)
    return 4.0 * (s - s * s)


def _gelu_tanh_slope(z: Value, x: Value) -> Operand:
    # ½·(1 + tanh(z)) = σ(2z), which unlike MUFU.TANH is good to an ulp or two.
    c = math.sqrt(8 / math.pi)
    square = x * x
    s = sigmoid(x * (square * (c * 0.044715) + c))
    # x (σ - σ²) first: from 10¹³ on it is 0, where x times the other factor is infinite.
    return s + x * (s - s * s) * (square * (c * 3 * 0.044715) + c)


def _gelu_erf_slope(z: Value, x: Value) -> Operand:
    # As erf has it inside, so that the compiler makes one MUFU.EX2 for both.
    scaled = x * math.sqrt(0.5)
    size = absolute(scaled)
    return erf(scaled) * 0.5 + 0.5 + x * (exp(-(size * size)) * (1 / math.sqrt(2 * math.pi)))


@elementwise(
    lambda x, y: x + y,
    commutative=True,
    packed=True,
    derivative=lambda z, x, y, dx, dy: plus(dx, dy),
    edge=kept,
    degree=additive,
)
def add(x: torch.Tensor, y: Term) -> torch.Tensor:
    """x + y."""
    return x + y


@elementwise(
    lambda x, y: x - y,
    packed=True,
    derivative=lambda z, x, y, dx, dy: minus(dx, dy),
    edge=kept,
    degree=additive,
)
def sub(x: torch.Tensor, y: Term) -> torch.Tensor:
    """x - y."""
    return x - y


@elementwise(
    lambda x, y: x * y,
    commutative=True,
    packed=True,
    derivative=_product_slope,
    edge=_product_edge,
    degree=_product_degree,
)
def mul(x: torch.Tensor, y: Term) -> torch.Tensor:
    """x · y."""
    return x * y


@elementwise(
    lambda x, y: x * reciprocal(y),
    flops=2,
    derivative=lambda z, x, y, dx, dy: minus(dx, times(z, dy)) / y,
    degree=_quotient_degree,
    error="result",
)
def div(x: torch.Tensor, y: Term) -> torch.Tensor:
    """x / y, through the approximate reciprocal (1 ulp) on the GPU."""
    return x / y


@elementwise(
    lambda x: -x,
    packed=True,
    derivative=lambda z, x, dx: times(dx, -1.0),
    edge=kept,
    degree=additive,
)
def neg(x: torch.Tensor) -> torch.Tensor:
    """-x."""
    return -x


@elementwise(
    binary("maximumf"),
    commutative=True,
    derivative=_extremum_slope(1),
    edge=kept,
    aten=("maximum", "clamp_min"),
)
def maximum(x: Term, y: Term) -> torch.Tensor:
    """The larger of x and y; NaN if either is. One argument may be a number."""
    return torch.maximum(*as_tensors(x, y))


@elementwise(
    binary("minimumf"),
    commutative=True,
    derivative=_extremum_slope(-1),
    edge=kept,
    aten=("minimum", "clamp_max"),
)
def minimum(x: Term, y: Term) -> torch.Tensor:
    """The smaller of x and y; NaN if either is. One argument may be a number."""
    return torch.minimum(*as_tensors(x, y))


@elementwise(
    absolute_value, derivative=chained(lambda z, x: step(x) - step(-x)), edge=kept, aten=("abs",)
)
def absolute(x: torch.Tensor) -> torch.Tensor:
    """|x|."""
    return x.abs()


@elementwise(step_function, derivative=lambda z, x, dx: 0.0, edge=lambda x: Edge(x.zero, True))
def step(x: torch.Tensor) -> torch.Tensor:
    """1 where x > 0, else 0, for NaN too: the derivative of `relu`."""
    return (x > 0).to(x.dtype)


@elementwise(
    fused,
    flops=2,
    derivative=lambda z, x, y, w, dx, dy, dw: plus(plus(times(dx, y), times(x, dy)), dw),
    edge=lambda x, y, z: kept(_product_edge(x, y), z),
)
def fma(x: Any, y: Any, z: Any) -> torch.Tensor:
    """x · y + z, rounded once."""
    like = next(v for v in (x, y, z) if isinstance(v, torch.Tensor))
    # A product of two float32 is exact in float64.
    x, y, z = (v.double() if isinstance(v, torch.Tensor) else v for v in (x, y, z))
    return (x * y + z).to(like.dtype)


@elementwise(nearest, flops=2, derivative=lambda z, x, dx: 0.0, edge=kept)
def rint(x: torch.Tensor) -> torch.Tensor:
    """The nearest integer, ties to even, for |x| < 2²²; two additions on the GPU."""
    return x.round()


@elementwise(
    fast("exp"), flops=2, derivative=chained(lambda z, x: z), error="result", aten=("exp",)
)
def exp(x: torch.Tensor) -> torch.Tensor:
    """eˣ (MUFU.EX2 of the scaled argument)."""
    return x.exp()


@elementwise(
    fast("log"), flops=2, derivative=lambda z, x, dx: dx / x, error="result", aten=("log",)
)
def log(x: torch.Tensor) -> torch.Tensor:
    """Natural logarithm."""
    return x.log()


@elementwise(
    fast("sqrt"),
    derivative=lambda z, x, dx: times(dx, 0.5) / z,
    edge=lambda x: Edge(x.zero, x.zero),  # of what is negative it is NaN
    error="result",
    aten=("sqrt",),
)
def sqrt(x: torch.Tensor) -> torch.Tensor:
    """Square root."""
    return x.sqrt()


@elementwise(fast("rsqrt"), derivative=chained(lambda z, x: z * z * z * -0.5), error="result")
def rsqrt(x: torch.Tensor) -> torch.Tensor:
    """1 / √x."""
    return x.rsqrt()


# Sine and cosine have no ATen name: the angle of a reference may leave |x| <= π.
@elementwise(
    fast("sin"), flops=2, derivative=chained(lambda z, x: cos(x)), edge=kept, error="range"
)
def sin(x: torch.Tensor) -> torch.Tensor:
    """Sine of x in radians (MUFU.SIN): good for |x| <= π, losing digits with |x| beyond."""
    return x.sin()


@elementwise(fast("cos"), flops=2, derivative=chained(_cos_slope), edge=_bounded, error="range")
def cos(x: torch.Tensor) -> torch.Tensor:
    """Cosine of x in radians (MUFU.COS): good for |x| <= π, losing digits with |x| beyond."""
    return x.cos()


@elementwise(
    error_function,
    flops=10,
    derivative=chained(lambda z, x: exp(-(x * x)) * (2 / math.sqrt(math.pi))),
    edge=kept,
    error="range",
    aten=("erf",),
)
def erf(x: torch.Tensor) -> torch.Tensor:
    """The error function."""
    return x.erf()


@elementwise(
    quack_function("tanh"),
    packed=True,
    derivative=chained(_tanh_slope),
    edge=kept,
    error="range",
    aten=("tanh",),
)
def tanh(x: torch.Tensor) -> torch.Tensor:
    """Hyperbolic tangent (one MUFU.TANH, relative error 2⁻¹¹)."""
    return x.tanh()


@elementwise(
    quack_function("sigmoid"),
    flops=4,
    packed=True,
    derivative=chained(lambda z, x: z - z * z),
    edge=_bounded,
    error="result",
    aten=("sigmoid",),
)
def sigmoid(x: torch.Tensor) -> torch.Tensor:
    """σ(x) = 1 / (1 + e⁻ˣ)."""
    return x.sigmoid()


@elementwise(
    soft_plus,
    flops=10,
    derivative=chained(lambda z, x: sigmoid(x)),
    error="result",
    aten=("softplus",),
)
def softplus(x: torch.Tensor) -> torch.Tensor:
    """log(1 + eˣ); x itself above 20, as torch has it. On an H200 it is good to 5e-6 of itself."""
    return torch.nn.functional.softplus(x)


@elementwise(
    quack_function("gelu_tanh_approx"),
    flops=8,
    packed=True,
    derivative=chained(_gelu_tanh_slope),
    edge=kept,
    error="argument",
    aten=("gelu",),
)
def gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    """GELU in the tanh approximation: ½·x·(1 + tanh(√(2/π)·(x + 0.044715·x³)))."""
    return torch.nn.functional.gelu(x, approximate="tanh")


@elementwise(
    lambda x: x * fused(error_function(x * math.sqrt(0.5)), 0.5, 0.5),
    flops=14,
    derivative=chained(_gelu_erf_slope),
    edge=kept,
    error="argument",
    aten=("gelu",),
)
def gelu_erf(x: torch.Tensor) -> torch.Tensor:
    """GELU, exact: ½·x·(1 + erf(x/√2))."""
    # PyTorch's vectors on a CPU give NaN of infinity.
    return torch.nn.functional.gelu(x).where(x != math.inf, x)
