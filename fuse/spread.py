"""Two weights whose rows a kernel pairs, read where they lie."""

from __future__ import annotations

from dataclasses import replace

import torch

from coda_agent.agent.authors.composer.join import Composition
from coda_agent.agent.authors.composer.ports import Port
from coda_agent.agent.authors.composer.retrace import SLICE
from coda_agent.primitives.spread import spread

_RESHAPE, _PERMUTE = torch.ops.aten.reshape.default, torch.ops.aten.permute.default


def in_place(composition: Composition) -> Composition:
    """Let a kernel read two weights, or two halves of one, that it would take packed.

    Their rows stand in turn in B. Both are dense, as TMA takes them.
    """
    found = _halves(composition.b)
    if found is None or composition.program.wide:
        return composition
    program = spread(composition.program)
    (*_, name), (even, odd) = program.operands, found
    operands = {**composition.operands, name: replace(odd, name=name)}
    return replace(composition, program=program, b=replace(even, name="B"), operands=operands)


def _halves(b: Port) -> tuple[Port, Port] | None:
    """Find where the even rows of B are, and where the odd ones."""
    if [view for view, _ in b.steps] != [_RESHAPE, _PERMUTE, _RESHAPE]:
        return None
    ((count, rows, *rest),), (order,) = (arguments for _, arguments in b.steps[:2])
    if b.dim or (count, order) != (2, [1, 0, 2]) or len(rest) != 1:
        return None
    if b.node is not None:
        cuts = ((0, rows), (rows, 2 * rows))
        halves = [replace(b, steps=((SLICE, (0, *cut)),), back=()) for cut in cuts]
    else:
        halves = [*b.parts]
        if len(halves) != 2 or any(part.steps or part.parts for part in halves):
            return None
    shape = [rows, *rest] if b.node is None else [2 * rows, *rest]
    return (halves[0], halves[1]) if all(_is_dense(x, shape) for x in halves) else None


def _is_dense(port: Port, shape: list[int]) -> bool:
    value = None if port.node is None else port.node.meta.get("val")
    if not isinstance(value, torch.Tensor):
        return False
    return [*value.shape] == shape and [*value.stride()] == [shape[1], 1]
