"""Reading 1: run a program with torch tensors, tile-faithfully.

- The accumulator is kept in `compute` precision (float32 as on the GPU, float64 as an exact
  reading).
- Values are rounded only at stores, to the output's dtype.
- Row reductions produce the same partials as the kernel: one for each block of columns, a ragged
  last one included.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.graph import Graph
from coda_agent.primitives.ops import OPS
from coda_agent.primitives.program import ColVector, Program, RowReduction

if TYPE_CHECKING:
    import torch


def evaluate(graph: Graph, acc: torch.Tensor, operands: Mapping[str, Any]) -> list[Any]:
    """Replay `graph` on tensors that broadcast against `acc` (M, N); one value for each node."""

    def apply(op: str, *args: Any) -> Any:
        match op:
            case "even":
                return args[0][..., 0::2]
            case "odd":
                return args[0][..., 1::2]
            case "interleave":
                return _interleave(*args, like=acc)
            case _:
                return OPS[op].torch(*args)

    return graph.replay(acc, operands, apply)


def _interleave(even: Any, odd: Any, *, like: torch.Tensor) -> torch.Tensor:
    import torch

    out = torch.empty_like(like)
    out[:, 0::2] = even
    out[:, 1::2] = odd
    return out


def interpret(
    program: Program,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    *,
    dtypes: Mapping[str, torch.dtype],
    block: int = 128,
    raw: bool = False,
    compute: torch.dtype | None = None,
) -> dict[str, torch.Tensor]:
    """Run `program` on the accumulator a bᵀ.

    Args:
        program: The program.
        a: (M, K), any strides.
        b: (N, K), any strides.
        operands: By name: (M, N) tiles, (M,) column vectors, (N,) row vectors, numbers.
        dtypes: Element type of each `Tile` and `HalfTile` output.
        block: Columns a reduction tile.
        raw: Return raw reduction partials (M, ⌈N / block⌉) instead of final (M,) values.
        compute: float32 (the default) or float64.

    Returns:
        The outputs by name; with compute float64, unrounded and in float64.
    """
    import torch

    compute = compute or torch.float32
    acc = a.to(compute) @ b.to(compute).mT
    lifted = {name: _lift(operands[name], program.operands[name], acc) for name in program.operands}
    values = evaluate(program.graph, acc, lifted)
    results = {}
    for name, kind in program.outputs.items():
        value = values[program.graph.outputs[name]]
        if issubclass(kind, RowReduction):
            half = value.shape[-1] != acc.shape[-1]
            width = block // 2 if half else block
            partials = row_partials(value.expand(acc.shape[0], -1), kind, width)
            results[name] = partials if raw else finalise(partials, kind, value.shape[-1], width)
        else:
            columns = acc.shape[-1] // (1 if value.shape[-1] == acc.shape[-1] else 2)
            stored = value.expand(acc.shape[0], columns).contiguous()
            results[name] = stored if compute is torch.float64 else stored.to(dtypes[name])
    return results


def _lift(value: Any, kind: type, like: torch.Tensor) -> torch.Tensor:
    """An operand in the accumulator's dtype, shaped to broadcast against it."""
    import torch

    lifted = torch.as_tensor(value, dtype=like.dtype, device=like.device)
    return lifted[:, None] if kind is ColVector else lifted


def row_partials(value: torch.Tensor, kind: type[RowReduction], width: int) -> torch.Tensor:
    """Reduce (M, N) over blocks of `width` columns to (M, ⌈N / width⌉)."""
    import torch

    m, n = value.shape
    blocks = -(-n // width)
    identity = 0.0 if kind.combine == "add" else float("-inf")
    padded = torch.nn.functional.pad(value, (0, blocks * width - n), value=identity)
    tiles = padded.reshape(m, blocks, width)
    if kind.combine == "max":
        # As the GPU: NaN is passed over.
        return torch.where(tiles.isnan(), identity, tiles).amax(-1)
    return tiles.sum(-1) / width if kind.mean else tiles.sum(-1)


def finalise(
    partials: torch.Tensor, kind: type[RowReduction], columns: int, width: int
) -> torch.Tensor:
    """Fold raw partials (M, blocks) of a row of `columns` values to the final (M,)."""
    if kind.combine == "max":
        return partials.amax(-1)
    if kind.mean and columns % width == 0:
        return partials.mean(-1)  # one kernel instead of two
    total = partials.sum(-1)
    return total * (width / columns) if kind.mean else total
