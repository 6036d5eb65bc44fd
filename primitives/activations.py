"""Activations and gates composed of atoms, which all three readings have."""

from __future__ import annotations

import math

from coda_agent.primitives.operation import Argument
from coda_agent.primitives.ops import exp, fma, gelu_tanh, maximum, minimum, rint, sigmoid

__all__ = [
    "clamp",
    "geglu",
    "glu",
    "hard_swish",
    "leaky_relu",
    "mish",
    "quick_gelu",
    "reglu",
    "relu",
    "relu_squared",
    "silu",
    "swiglu",
    "swiglu_oai",
    "wrapped",
]


def relu(x: Argument) -> Argument:
    """max(x, 0); NaN stays NaN.

    Cost: one FMNMX. Use it as the cheapest activation.

        return {"O": relu(acc + bias)}
    """
    return maximum(x, 0.0)


def leaky_relu(x: Argument, slope: float = 0.01) -> Argument:
    """x above 0, slope·x below, for 0 <= slope <= 1.

    Cost: one multiplication and one FMNMX.

        return {"O": leaky_relu(acc + bias, 0.1)}
    """
    return maximum(x, x * slope)


def relu_squared(x: Argument) -> Argument:
    """max(x, 0)² (Primer).

    Cost: one FMNMX and one multiplication.

        return {"O": relu_squared(acc)}
    """
    r = relu(x)
    return r * r


def clamp(x: Argument, low: float, high: float) -> Argument:
    """x limited to [low, high]; NaN stays NaN.

    Cost: two FMNMX.

        return {"O": clamp(acc, -7.0, 7.0)}
    """
    return minimum(maximum(x, low), high)


def hard_swish(x: Argument) -> Argument:
    """x · clamp(x + 3, 0, 6) / 6, as torch.nn.functional.hardswish.

    Cost: two FMNMX, three multiply-adds; no transcendental.

        return {"O": hard_swish(acc + bias)}
    """
    return x * (clamp(x + 3.0, 0.0, 6.0) * (1.0 / 6.0))


def silu(x: Argument) -> Argument:
    """x · σ(x) (Swish).

    Cost: one MUFU.EX2, one MUFU.RCP, three multiply-adds.

        return {"O": silu(acc + bias)}
    """
    return x * sigmoid(x)


def quick_gelu(x: Argument) -> Argument:
    """x · σ(1.702·x): the approximate GELU of CLIP.

    Cost: that of `silu` and one multiplication.

        return {"O": quick_gelu(acc + bias)}
    """
    return x * sigmoid(x * 1.702)


def mish(x: Argument) -> Argument:
    """x · tanh(log(1 + eˣ)), as torch.nn.functional.mish.

    Cost: one MUFU.EX2, one MUFU.RCP, one FMNMX, six multiply-adds: with w = eˣ·(eˣ + 2), the tanh
    is w / (w + 2), and 1 from x = 20 on.

        return {"O": mish(acc + bias)}
    """
    e = exp(minimum(x, 20.0))
    w = e * (e + 2.0)
    return x * (w / (w + 2.0))


def swiglu(gate: Argument, up: Argument) -> Argument:
    """silu(gate) · up: the gate of Llama's MLP (paper, section 3.2).

    Takes the two half-width values `pairs` gives, columns interleaved [g₀, u₀, g₁, u₁, …].

        gate, up = pairs(acc)
        return {"O": swiglu(gate, up)}
    """
    return silu(gate) * up


def swiglu_oai(gate: Argument, up: Argument, alpha: float = 1.702, limit: float = 7.0) -> Argument:
    """g · σ(alpha·g) · (u + 1), g = min(gate, limit), u = up in [-limit, limit]: gpt-oss's gate.

    Takes the two half-width values `pairs` gives. Cost: that of `swiglu`, three FMNMX and two
    multiply-adds.

        gate, up = pairs(acc + bias)
        return {"O": swiglu_oai(gate, up)}
    """
    gate = minimum(gate, limit)
    return gate * sigmoid(gate * alpha) * (clamp(up, -limit, limit) + 1.0)


def geglu(gate: Argument, up: Argument) -> Argument:
    """gelu_tanh(gate) · up: the gate of Gemma's MLP; with `gelu_erf`, write the product.

    Takes the two half-width values `pairs` gives.

        gate, up = pairs(acc)
        return {"O": geglu(gate, up)}
    """
    return gelu_tanh(gate) * up


def reglu(gate: Argument, up: Argument) -> Argument:
    """relu(gate) · up; no transcendental.

    Takes the two half-width values `pairs` gives.

        gate, up = pairs(acc)
        return {"O": reglu(gate, up)}
    """
    return relu(gate) * up


def glu(gate: Argument, up: Argument) -> Argument:
    """σ(gate) · up: the original gated linear unit.

    Takes the two half-width values `pairs` gives.

        gate, up = pairs(acc)
        return {"O": glu(gate, up)}
    """
    return sigmoid(gate) * up


def wrapped(x: Argument) -> Argument:
    """The angle x in radians less whole turns, in [-π, π]: what `sin` and `cos` take; |x| < 2²².

    Cost: one multiplication and four multiply-adds. A turn is subtracted in two parts, the larger
    of which float32 holds exactly.

        return {"O": sin(wrapped(acc))}
    """
    turns = rint(x * (0.5 / math.pi))
    return fma(turns, 1.748455600074497e-07, fma(turns, -6.2831854820251465, x))
