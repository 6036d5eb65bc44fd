"""Derivatives of elementwise functions: the chain rule over a recorded graph, one rule an atom.

- The function is recorded on symbols of a graph of its own, so its arguments may depend on one
  another; what its derivative needs is then replayed on the arguments. In a program that shares
  what the function itself computes already, such as silu's σ(x).
- Products with 0 and 1 and sums with 0 are never recorded.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Callable
from typing import Any

from coda_agent.primitives import ops
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Operand, Shape, Value


def derivative(fn: Callable[..., Any], *args: Any, wrt: int = 0) -> Any:
    """The derivative of `fn`, an elementwise function of the vocabulary, at `args`.

    At a kink it is the slope of the constant side (0 for `relu` at 0, for `clamp` at its ends),
    else that of the second argument (`slope` for `leaky_relu` at 0); 0 for `absolute`. Where it
    does not depend on the arguments it is a number. A program that computes the function too shares
    their common parts, such as silu's σ(x); `tanh` and GELU take an exponential and a reciprocal
    more, since one MUFU.TANH is too coarse for a slope. Use it for backward passes.

    Args:
        fn: An atom, activation or gate, e.g. `silu`; it gives one value.
        args: What it is called with: values of one width, (M, N) or (M, N/2), and numbers.
        wrt: Which of `args` to differentiate with respect to.

    Raises:
        ProgramError: `fn` is not elementwise, or the arguments do not fit it.

        @epilogue(dX=Tile)
        def silu_backward(acc, X: Tile):
            return {"dX": acc * derivative(silu, X)}
    """
    label = getattr(fn, "__name__", type(fn).__name__)
    if not inspect.isfunction(fn):
        raise ProgramError(f"derivative() got {label}, expected a function of the vocabulary")
    try:
        inspect.signature(fn).bind(*args)
    except TypeError as error:
        raise ProgramError(f"derivative() of {label}: {error}") from None
    if not isinstance(wrt, int) or not 0 <= wrt < len(args):
        raise ProgramError(f"derivative(): wrt is {wrt!r}, expected 0 to {len(args) - 1}")
    graph = Graph()
    symbols = {
        i: graph.add(Node("operand", (), Shape.TILE, str(i)))
        for i, a in enumerate(args)
        if i == wrt or not isinstance(a, (int, float))
    }
    result = fn(*(symbols.get(i, a) for i, a in enumerate(args)))
    if not isinstance(result, Value):
        raise ProgramError(
            f"derivative(): {label} gives {type(result).__name__}, expected one value"
        )
    slope = _slope(result, symbols[wrt])
    if not isinstance(slope, Value):
        return slope
    graph.outputs = {"slope": slope.index}
    live = graph.prune()
    given = {str(i): a for i, a in enumerate(args)}
    return live.replay(None, given, lambda op, *a: getattr(ops, op)(*a))[live.outputs["slope"]]


def _slope(result: Value, symbol: Value) -> Operand:
    """d result / d symbol, both of one graph."""
    graph = result.graph
    slopes: list[Operand] = []
    for i in range(result.index + 1):
        node = graph.nodes[i]
        inner = [slopes[a] for a in node.args]
        if node.args and node.op not in _RULES:
            raise ProgramError(f"derivative() of {node.op}, for which it has no rule")
        if i == symbol.index:
            slopes.append(1.0)
        elif all(_is(slope, 0) for slope in inner):
            slopes.append(0.0)
        else:
            arguments = [_operand(graph, a) for a in node.args]
            slopes.append(_RULES[node.op](Value(graph, i), *arguments, *inner))
    return slopes[result.index]


def _operand(graph: Graph, index: int) -> Operand:
    node = graph.nodes[index]
    return node.value if node.op == "const" else Value(graph, index)


def _is(x: Operand, number: float) -> bool:
    return not isinstance(x, Value) and x == number


def _add(x: Operand, y: Operand) -> Operand:
    if _is(x, 0):
        return y
    return x if _is(y, 0) else x + y


def _sub(x: Operand, y: Operand) -> Operand:
    if _is(x, 0):
        return -y
    return x if _is(y, 0) else x - y


def _mul(x: Operand, y: Operand) -> Operand:
    """x · y, its number first taken into a product's own: 2·(3·x) is 6·x."""
    if isinstance(y, Value) and not isinstance(x, Value):
        x, y = y, x
    if _is(y, 0) or _is(y, 1):
        return y if _is(y, 0) else x
    if _is(y, -1):
        return -x
    if isinstance(x, Value) and not isinstance(y, Value):
        node = x.graph.nodes[x.index]
        if node.op == "mul":
            a, b = (_operand(x.graph, i) for i in node.args)
            if not isinstance(b, Value):
                return _mul(a, b * y)
            if not isinstance(a, Value):
                return _mul(b, a * y)
    return x * y


def _product(_: Value, x: Operand, y: Operand, dx: Operand, dy: Operand) -> Operand:
    if isinstance(x, Value) and isinstance(y, Value) and x.index == y.index:
        return _mul(_mul(x, 2.0), dx)
    return _add(_mul(dx, y), _mul(x, dy))


def _quotient(z: Value, x: Operand, y: Operand, dx: Operand, dy: Operand) -> Operand:
    return _sub(dx, _mul(z, dy)) / y


def _extremum(sign: int) -> Callable[..., Operand]:
    """The rule of maximum (sign 1) and minimum (-1)."""

    def rule(_: Value, x: Operand, y: Operand, dx: Operand, dy: Operand) -> Operand:
        if _is(dx, 0):
            x, y, dx, dy = y, x, dy, dx
        chosen = ops.step(_sub(x, y) if sign > 0 else _sub(y, x))
        return _add(dy, _mul(chosen, _sub(dx, dy)))

    return rule


def _of(outer: Callable[[Any, Any], Operand]) -> Callable[..., Operand]:
    """The rule of a function of one argument: `outer` gives its slope from its value and x."""
    return lambda z, x, dx: _mul(outer(z, x), dx)


def _tanh(z: Value, x: Value) -> Operand:
    # 1 - tanh² would inherit MUFU.TANH's error of 2⁻¹¹ and cancel where tanh is near 1.
    s = ops.sigmoid(ops.absolute(x) * -2.0)
    return 4.0 * (s - s * s)


def _gelu_tanh(z: Value, x: Value) -> Operand:
    # ½·(1 + tanh(z)) = σ(2z), which unlike MUFU.TANH is good to an ulp or two.
    c = math.sqrt(8 / math.pi)
    square = x * x
    s = ops.sigmoid(x * (square * (c * 0.044715) + c))
    return s + x * (square * (c * 3 * 0.044715) + c) * (s - s * s)


def _gelu_erf(z: Value, x: Value) -> Operand:
    density = ops.exp(x * x * -0.5) * (1 / math.sqrt(2 * math.pi))
    return ops.erf(x * math.sqrt(0.5)) * 0.5 + 0.5 + x * density


_RULES: dict[str, Callable[..., Any]] = {
    "add": lambda z, x, y, dx, dy: _add(dx, dy),
    "sub": lambda z, x, y, dx, dy: _sub(dx, dy),
    "mul": _product,
    "div": _quotient,
    "neg": lambda z, x, dx: _mul(dx, -1.0),
    "maximum": _extremum(1),
    "minimum": _extremum(-1),
    "fma": lambda z, x, y, w, dx, dy, dw: _add(_add(_mul(dx, y), _mul(x, dy)), dw),
    "absolute": _of(lambda z, x: ops.step(x) - ops.step(-x)),
    "step": lambda z, x, dx: 0.0,
    "rint": lambda z, x, dx: 0.0,
    "exp": _of(lambda z, x: z),
    "log": lambda z, x, dx: dx / x,
    "sqrt": lambda z, x, dx: _mul(dx, 0.5) / z,
    "rsqrt": _of(lambda z, x: z * z * z * -0.5),
    "sin": _of(lambda z, x: ops.cos(x)),
    "cos": _of(lambda z, x: -ops.sin(x)),
    "erf": _of(lambda z, x: ops.exp(-(x * x)) * (2 / math.sqrt(math.pi))),
    "tanh": _of(_tanh),
    "sigmoid": _of(lambda z, x: z - z * z),
    "softplus": _of(lambda z, x: ops.sigmoid(x)),
    "gelu_tanh": _of(_gelu_tanh),
    "gelu_erf": _of(_gelu_erf),
}
