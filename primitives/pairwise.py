"""Pairwise maps: adjacent columns as two values of half width."""

from __future__ import annotations

from functools import partial
from typing import TYPE_CHECKING

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.fast_math import Register
from coda_agent.primitives.graph import Node, Operand, Shape, Value, join
from coda_agent.primitives.operation import MOVES, Op, Term, additive, as_tensors, kept

if TYPE_CHECKING:
    from quack.epilogue.math import Pair

_HALVES = {Shape.TILE: Shape.HALF, Shape.ROW: Shape.HALF_ROW, Shape.WIDE: Shape.TILE}
_DOUBLES = {Shape.HALF: Shape.TILE, Shape.TILE: Shape.WIDE}


def pairs(x: Value) -> tuple[Value, Value]:
    """Take a value apart into its even and its odd columns.

    (M, N) gives two (M, N/2) values, (1, N) two (1, N/2), and a `WideTile`'s (M, 2N) two (M, N); a
    value without columns is given twice. Both columns of a pair lie in one thread's registers, so
    this costs nothing. N must be even. Use it for gates, rotations and saved gates.

        gate, up = pairs(acc)
        return {"O": silu(gate) * up}
    """
    if not isinstance(x, Value):
        raise ProgramError(f"pairs() got {type(x).__name__}, expected a value of the program")
    if x.shape.half_width:
        raise ProgramError("pairs() got a half-width value, expected a full-width one")
    if x.shape not in _HALVES:
        return x, x
    node = x.graph.nodes[x.index]
    if node.op == "interleave":
        return Value(x.graph, node.args[0]), Value(x.graph, node.args[1])
    return _even(x), _odd(x)


def _even(x: Value) -> Value:
    return x.graph.add(Node("even", (x.index,), _HALVES[x.shape]))


def _odd(x: Value) -> Value:
    return x.graph.add(Node("odd", (x.index,), _HALVES[x.shape]))


def interleave(even: Operand, odd: Operand) -> Value:
    """The inverse of `pairs`: put two values into the even and odd columns of one twice as wide.

    Two (M, N/2) values give (M, N), two (M, N) values (M, 2N), which only a `WideTile` output
    takes. Costs nothing. Use it to store a rotated or otherwise mixed pair at full width, and the
    two gradients of a gate.

        x, y = pairs(acc)
        return {"O": interleave(x + y, x - y)}
    """
    values = [v for v in (even, odd) if isinstance(v, Value)]
    if not values or not all(isinstance(v, (Value, int, float)) for v in (even, odd)):
        raise ProgramError("interleave() expects two values of one width, (M, N/2) or (M, N)")
    graph = values[0].graph
    even, odd = (v if isinstance(v, Value) else graph.const(v) for v in (even, odd))
    shape = join([even.shape, odd.shape], "interleave()")
    if shape not in _DOUBLES:
        raise ProgramError(
            f"interleave() got {even.shape.value} and {odd.shape.value}, "
            "expected two values of one width, (M, N/2) or (M, N)"
        )
    return graph.add(Node("interleave", (even.index, odd.index), _DOUBLES[shape]))


def _interleaved(even: Term, odd: Term) -> torch.Tensor:
    """Interleave tensors that broadcast to one another, or one and a number."""
    return torch.stack(torch.broadcast_tensors(*as_tensors(even, odd)), dim=-1).flatten(-2)


def _paired(even: Register, odd: Register) -> Pair:
    from cutlass import Float32
    from quack.epilogue.math import Pair

    return Pair(*(Float32(x) if isinstance(x, float) else x for x in (even, odd)))


_moving = partial(Op, flops=0, edge=kept, degree=additive)
MOVES["even"] = _moving("even", lambda x: x[..., 0::2], lambda x: x.a, 1, _even)
MOVES["odd"] = _moving("odd", lambda x: x[..., 1::2], lambda x: x.b, 1, _odd)
MOVES["interleave"] = _moving("interleave", _interleaved, _paired, 2, interleave)
