"""Pairwise maps: adjacent output columns (2j, 2j + 1) as two values of half width."""

from __future__ import annotations

from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Node, Operand, Shape, Value


def pairs(x: Value) -> tuple[Value, Value]:
    """Take a full-width value apart into its even and its odd columns.

    (M, N) gives two (M, N/2) values, (1, N) two (1, N/2); a value without columns is given twice.
    Both columns of a pair lie in one thread's registers, so this costs nothing. N must be even. Use
    it for gates and rotations.

        gate, up = pairs(acc)
        return {"O": silu(gate) * up}
    """
    if not isinstance(x, Value):
        raise ProgramError(f"pairs() got {type(x).__name__}, expected a value of the program")
    if x.shape.half_width:
        raise ProgramError("pairs() got a half-width value, expected a full-width one")
    if not x.shape.full_width:
        return x, x
    node = x.graph.nodes[x.index]
    if node.op == "interleave":
        return Value(x.graph, node.args[0]), Value(x.graph, node.args[1])
    shape = Shape.HALF if x.shape is Shape.TILE else Shape.HALF_ROW
    return (
        x.graph.add(Node("even", (x.index,), shape)),
        x.graph.add(Node("odd", (x.index,), shape)),
    )


def interleave(even: Operand, odd: Operand) -> Value:
    """The inverse of `pairs`: put two half-width values into the even and odd columns of a
    full-width one.

    Two (M, N/2) values give (M, N). Costs nothing. Use it to store a rotated or otherwise mixed
    pair at full width.

        x, y = pairs(acc)
        return {"O": interleave(x + y, x - y)}
    """
    values = [v for v in (even, odd) if isinstance(v, Value)]
    if not values or not all(isinstance(v, (Value, int, float)) for v in (even, odd)):
        raise ProgramError("interleave() expects two half-width values, (M, N/2)")
    graph = values[0].graph
    even, odd = (v if isinstance(v, Value) else graph.const(v) for v in (even, odd))
    if even.shape.full_width:
        raise ProgramError("interleave() got a full-width value, expected two half-width ones")
    legal = (Shape.HALF, Shape.HALF_ROW, Shape.COL, Shape.SCALAR)
    if Shape.HALF not in (even.shape, odd.shape) or not {even.shape, odd.shape} <= set(legal):
        raise ProgramError("interleave() expects two half-width values, (M, N/2)")
    return even.graph.add(Node("interleave", (even.index, odd.index), Shape.TILE))
