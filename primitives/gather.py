"""Target select: one column of each row."""

from __future__ import annotations

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Node, Shape, Value
from coda_agent.primitives.operation import MOVES, Op


def gather(x: Value, index: Value) -> Value:
    """The element of each row of `x` (M, N) in the column that `index`, a `ColIndex`, names.

    Taken in fp32, before any rounding; it can only be stored, as a `RowGather`. Costs one integer
    comparison an element in the tiles that hold a target. Use it for the target logits of a
    cross-entropy.

        return {"Z": acc, "target": gather(acc, y)}
    """
    if not isinstance(x, Value) or x.shape is not Shape.TILE:
        raise ProgramError("gather() takes its first argument at full width, (M, N)")
    if not isinstance(index, Value) or index.shape is not Shape.INDEX:
        raise ProgramError("gather() takes a ColIndex operand as its second argument")
    return x.graph.add(Node("gather", (x.index, index.index), Shape.GATHERED))


def _gathered(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    inside = (index >= 0) & (index < x.shape[1])
    found = x.gather(1, index.clamp(0, x.shape[1] - 1)[:, None])[:, 0]
    return found.where(inside, found.new_zeros(()))


MOVES["gather"] = Op(
    "gather",
    _gathered,
    lambda x, index: x,  # the store picks the element
    arity=2,
    call=gather,
    flops=0,
    degree=lambda x, index: x,
)
