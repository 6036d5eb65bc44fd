"""Derivatives of elementwise functions: the chain rule over a recorded graph.

- Each operation has its own rule, `Op.derivative`, written with the arithmetic at the end of this
  module.
- The function is recorded on symbols of a graph of its own, so its arguments may depend on one
  another; what its derivative needs is then replayed on the arguments. In a program that shares
  what the function itself computes already, such as silu's σ(x).
- Products with 0 and 1 and sums with 0 are never recorded.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable
from typing import Any

from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Operand, Shape, Value
from coda_agent.primitives.ptx import operation


def derivative(fn: Callable[..., object], *args: Any, wrt: int = 0) -> Any:
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
    return live.replay(None, given, lambda op, *a: operation(op).call(*a))[live.outputs["slope"]]


def _slope(result: Value, symbol: Value) -> Operand:
    """Derive d result / d symbol, both of one graph."""
    graph = result.graph
    slopes: list[Operand] = []
    for i in range(result.index + 1):
        node = graph.nodes[i]
        inner = [slopes[a] for a in node.args]
        rule = operation(node.op).derivative if node.args else None
        if node.args and rule is None:
            raise ProgramError(f"derivative() of {node.op}, for which it has no rule")
        if i == symbol.index:
            slopes.append(1.0)
        elif rule is None or all(_is(slope, 0) for slope in inner):
            slopes.append(0.0)
        else:
            arguments = [_operand(graph, a) for a in node.args]
            slopes.append(rule(Value(graph, i), *arguments, *inner))
    return slopes[result.index]


def _operand(graph: Graph, index: int) -> Operand:
    node = graph.nodes[index]
    return node.value if node.op == "const" else Value(graph, index)


def _is(x: Operand, number: float) -> bool:
    return not isinstance(x, Value) and x == number


def plus(x: Operand, y: Operand) -> Operand:
    """x + y."""
    if _is(x, 0):
        return y
    return x if _is(y, 0) else x + y


def minus(x: Operand, y: Operand) -> Operand:
    """x - y."""
    if _is(x, 0):
        return -y
    return x if _is(y, 0) else x - y


def times(x: Operand, y: Operand) -> Operand:
    """Record x · y; products take numbers in: 2·(3·x) is 6·x."""
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
                return times(a, b * y)
            if not isinstance(a, Value):
                return times(b, a * y)
    return x * y


def chained(outer: Callable[[Value, Value], Operand]) -> Callable[..., Operand]:
    """Make the rule of a function; `outer` gives its slope."""
    return lambda z, x, dx: times(outer(z, x), dx)
