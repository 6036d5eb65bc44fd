"""Reading 1: run a program with torch tensors, tile-faithfully.

- The accumulator is kept in `compute` precision (float32 as on the GPU, float64 as an exact
  reading).
- Operations that a program brings along run their PTX in float32, and are what torch says in
  float64.
- Values are rounded only at stores, to the output's dtype.
- Reductions produce the same partials as the kernel: one for each block of columns, or rows, a
  ragged last one included.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Graph
from coda_agent.primitives.operation import Term
from coda_agent.primitives.program import Program
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.rounding import rounded


def evaluate(
    graph: Graph,
    acc: torch.Tensor,
    operands: Mapping[str, Term],
    touch: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> list[torch.Tensor]:
    """Replay `graph` on tensors that broadcast against `acc` (M, N).

    What `touch` returns of an operation's result takes its place.
    """
    return graph.replay(acc, operands, lambda op, *args: touch(operation(op).torch(*args)))


def interpret(
    program: Program,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    *,
    dtypes: Mapping[str, torch.dtype],
    block: int = 128,
    row_block: int = 128,
    raw: bool = False,
    compute: torch.dtype | None = None,
    touch: Callable[[torch.Tensor], torch.Tensor] = lambda value: value,
) -> dict[str, torch.Tensor]:
    """Run `program` on the accumulator a bᵀ.

    Args:
        a, b: (M, K) and (N, K), any strides; of a program that is `spread` B's even rows.
        operands: By name: (M, N) and (M, 2N) tiles, (M,) column vectors and indices, (N,) row
            vectors, numbers; and by its output's name, what an `AddTile` is added to.
        dtypes: Element type of each output that is no reduction.
        block: Columns a tile of a reduction over columns.
        row_block: Rows a tile of a reduction over rows.
        raw: Return raw reduction partials, (M, ⌈N / block⌉) or (N, ⌈M / block⌉), instead of final
            values.
        compute: float32 (the default) or float64.
        touch: What takes the place of the accumulator and of each operation's result.

    Returns:
        The outputs by name; with compute float64, unrounded and in float64.
    """
    compute = compute or torch.float32
    if program.spread:
        b = torch.stack([b, operands[program.spread]], 1).flatten(0, 1)
    acc = touch(a.to(compute) @ b.to(compute).mT)
    lifted = {name: kind.lifted(operands[name], acc) for name, kind in program.operands.items()}
    values = evaluate(program.graph, acc, lifted, touch)
    results = {}
    for name, kind in program.outputs.items():
        value = values[program.graph.outputs[name]]
        if issubclass(kind, Reduction):
            value = value.expand(acc.shape[0], -1)
            extent, folded = (row_block, len(value)) if kind.over_rows else (block, value.shape[1])
            if value.shape[1] != acc.shape[1]:
                extent //= 2
            found = kind.partials(value, extent)
            results[name] = found if raw else kind.finalise(found, folded, extent)
        else:
            stored = kind.taken(value.expand(acc.shape[0], *value.shape[1:])).contiguous()
            exact = compute is torch.float64
            results[name] = stored if exact else rounded(stored, dtypes[name]).to(dtypes[name])
            if kind.accumulates:
                held = operands[name].to(compute) + results[name].to(compute)
                results[name] = held if exact else held.to(dtypes[name])
    return results
