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
from coda_agent.primitives.program import Program, RowReduction

if TYPE_CHECKING:
    import torch


def evaluate(graph: Graph, acc: torch.Tensor, operands: Mapping[str, Any]) -> list[Any]:
    """Replay `graph` on tensors that broadcast against `acc` (M, N); one tensor for each node."""
    values: list[Any] = []
    for n in graph.nodes:
        args = [values[a] for a in n.args]
        match n.op:
            case "acc":
                value = acc
            case "operand":
                value = operands[n.name]
            case "const":
                value = n.value
            case "even":
                value = args[0][..., 0::2]
            case "odd":
                value = args[0][..., 1::2]
            case "interleave":
                value = _interleave(*args, columns=acc.shape[-1])
            case op:
                value = OPS[op].torch(*args)
        values.append(value)
    return values


def _interleave(even: Any, odd: Any, *, columns: int) -> torch.Tensor:
    import torch

    like = even if isinstance(even, torch.Tensor) and even.ndim == 2 else odd
    out = torch.empty(
        like.shape[0] if like.shape[0] > 1 else max(_rows(even), _rows(odd)),
        columns,
        dtype=like.dtype,
        device=like.device,
    )
    out[:, 0::2] = even
    out[:, 1::2] = odd
    return out


def _rows(x: Any) -> int:
    return x.shape[0] if hasattr(x, "shape") and len(x.shape) == 2 else 1


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
    lifted = {
        name: _lift(operands[name], program.operands[name], compute) for name in program.operands
    }
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


def _lift(value: Any, kind: type, compute: torch.dtype) -> Any:
    from coda_agent.primitives.program import ColVector, Scalar

    if kind is Scalar:
        return float(value)
    value = value.to(compute)
    return value[:, None] if kind is ColVector else value


def row_partials(value: torch.Tensor, kind: type[RowReduction], width: int) -> torch.Tensor:
    """Reduce (M, N) over blocks of `width` columns to (M, ⌈N / width⌉)."""
    import torch

    m, n = value.shape
    blocks = -(-n // width)
    identity = 0.0 if kind.combine == "add" else float("-inf")
    padded = torch.nn.functional.pad(value, (0, blocks * width - n), value=identity)
    tiles = padded.reshape(m, blocks, width)
    if kind.combine == "max":
        return tiles.amax(-1)
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
