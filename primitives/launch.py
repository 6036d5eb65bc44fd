"""Compile and launch lowered programs on 2-D operands.

- `block` of a raw reduction is the tile's width, so partial buffers depend on the configuration.
- Operands obey TMA: one unit stride, the other a multiple of 16 bytes, 16-byte aligned.
  `function.py` arranges that for callers.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.lower import lower
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import (
    ColVector,
    HalfTile,
    Reduction,
    RowGather,
    RowVector,
    Scalar,
    Tile,
)
from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    import torch


def output_shape(kind: type, m: int, n: int, config: TileConfig) -> tuple[int, ...]:
    """Shape of an output's buffer as the kernel writes it: (M, N), (M, N/2), (M,), (M, ⌈N /
    tile_n⌉), or (⌈M / tile_m⌉, N) for a reduction over rows."""
    if issubclass(kind, Reduction):
        return (-(-m // config.tile_m), n) if kind.over_rows else (m, -(-n // config.tile_n))
    if kind is RowGather:
        return (m,)
    return m, n // 2 if kind is HalfTile else n


def allocate(
    program: Program,
    m: int,
    n: int,
    dtypes: Mapping[str, torch.dtype],
    config: TileConfig,
    device: Any,
) -> dict[str, torch.Tensor]:
    """Raw output buffers, uninitialised but for gathered outputs, which are 0: the kernel writes
    only rows whose index is inside. Reductions and gathered outputs are float32."""
    import torch

    buffers = {}
    for o, kind in program.outputs.items():
        make = torch.zeros if kind is RowGather else torch.empty
        dtype = dtypes[o] if kind in (Tile, HalfTile) else torch.float32
        buffers[o] = make(output_shape(kind, m, n, config), dtype=dtype, device=device)
    return buffers


def launch(
    program: Program,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
    config: TileConfig,
    *,
    run: bool = True,
) -> Any:
    """Run `program` in exactly one kernel launch.

    Args:
        program: The program.
        a: (M, K).
        b: (N, K).
        operands: By name: tiles (M, N), vectors (M,) or (N,), numbers.
        outputs: Raw buffers of `output_shape`.
        config: The tile configuration.
        run: False compiles (tensors may be on the meta device) and launches nothing.

    Returns:
        quack's launch plan.

    Raises:
        CompileError: the configuration cannot carry this program, or the DSL refuses it.
    """
    lowered = lower(program, config.tile_n)
    names = lowered.names
    c = d = None
    values: dict[str, Any] = {}
    for o, kind in program.operands.items():
        value = operands[o]
        if names[o] == "c":
            c = value
        elif kind is Scalar:
            values[names[o]] = float(value)
        else:
            values[names[o]] = value[None] if kind in (ColVector, RowVector) else value
    for o in program.outputs:
        if names[o] == "D":
            d = outputs[o]
        else:
            values[names[o]] = outputs[o]
    try:
        return lowered.module.gemm(
            a,
            b,
            d,
            c,
            epi_args=values,
            tile_M=config.tile_m,
            tile_N=config.tile_n,
            cluster_M=config.cluster_m,
            cluster_N=config.cluster_n,
            pingpong=config.pingpong,
            max_swizzle_size=config.swizzle,
            _launch=run,
        )
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise CompileError(
            f"{program.name} does not compile as {config.label}: {_first_line(error)}"
        ) from error


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
