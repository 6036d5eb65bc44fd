"""Compile and launch lowered programs on 2-D operands.

- `block` of a raw reduction is the tile's width, so partial buffers depend on the configuration.
- Operands obey TMA: one unit stride, the other a multiple of 16 bytes, 16-byte aligned.
  `function.py` arranges that for callers.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextvars import ContextVar
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.lower import kernel_names, lower
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import HalfTile
from coda_agent.primitives.tiles import TileConfig

if TYPE_CHECKING:
    import torch


# FP8 products are summed by the tensor core alone, as cuBLAS's use_fast_accum does: quack's default
# on SM90, sums promoted to registers, spills and is 3 to 20 times slower (measured on an H200).
_FP8 = (("fp8_slow_accum", False),)


def allocate(
    program: Program,
    m: int,
    n: int,
    dtypes: Mapping[str, torch.dtype],
    config: TileConfig,
    device: Any,
) -> dict[str, torch.Tensor]:
    """Raw output buffers, uninitialised: the kernel writes every element. Reductions are float32;
    what an `AddTile` is added to, the caller puts in."""
    import torch

    return {
        o: torch.empty(
            kind.buffer(m, n, config),
            dtype=torch.float32 if o in program.reductions else dtypes[o],
            device=device,
        )
        for o, kind in program.outputs.items()
    }


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
    """Run `program` in one kernel launch, after one that clears flags where K is in parts.

    Args:
        program: The program.
        a: (M, K).
        b: (N, K).
        operands: By name: tiles (M, N) or (M, 2N), vectors (M,) or (N,), numbers or one-element
            float32 tensors. An index outside [0, N) selects 0.
        outputs: Raw buffers, as of `allocate`.
        config: The tile configuration.
        run: False compiles (tensors may be on the meta device) and launches nothing.

    Returns:
        quack's launch plan.

    Raises:
        CompileError: the configuration cannot carry this program, or the DSL refuses it.
    """
    return launcher.get()(program, a, b, operands, outputs, config, run=run)


def _launch(
    program: Program,
    a: torch.Tensor,
    b: torch.Tensor,
    operands: Mapping[str, Any],
    outputs: Mapping[str, torch.Tensor],
    config: TileConfig,
    *,
    run: bool = True,
) -> Any:
    values = _by_kernel_name(program, operands, outputs)
    d, c = values.pop("D", None), values.pop("c", None)
    try:
        return lower(program, config.tile_n).gemm(
            a,
            b.mT if config.swap_ab else b,
            d,
            c,
            epi_args=values,
            tile_M=config.tile_m,
            tile_N=config.tile_n,
            cluster_M=config.cluster_m,
            cluster_N=config.cluster_n,
            pingpong=config.pingpong,
            max_swizzle_size=config.swizzle,
            persistent=config.persistent,
            split_k=config.parts(a.shape[1]),
            swap_ab=config.swap_ab,
            b_kn=config.swap_ab,
            add_to_output=program.accumulated is not None,
            post_init_attrs=_FP8 if a.element_size() == 1 else (),
            _launch=run,
        )
    except (ValueError, TypeError, AssertionError, NotImplementedError) as error:
        raise CompileError(
            f"{program.name} does not compile as {config.label}: {_first_line(error)}"
        ) from error


launcher: ContextVar[Callable[..., Any]] = ContextVar("launcher", default=_launch)
"""What `launch` calls, with its own arguments. A process that reports launches, or lets some fail,
sets one that calls the one before; `run=False` compiles ahead of what it does."""


def _by_kernel_name(
    program: Program, operands: Mapping[str, Any], outputs: Mapping[str, torch.Tensor]
) -> dict[str, Any]:
    """Tensors and numbers as the kernel takes them: "c" and "D" are the GEMM's own."""
    names, values = kernel_names(program), dict[str, Any]()
    for o, kind in program.operands.items():
        value: Any = operands[o] if hasattr(operands[o], "data_ptr") else float(operands[o])
        values[names[o]] = value[None] if kind.vector else value
    for o, kind in program.outputs.items():
        values[names[o]] = outputs[o]
        if kind is HalfTile and outputs[o].element_size() == 1 and "D" in names.values():
            # quack's narrow store follows the register layout of D's, and is wrong for 16-bit D
            # (seen on an H200).
            raise CompileError(
                f"{program.name}: an e4m3 HalfTile beside a full-width store is not supported",
                hint="store it in 16 bits, or leave the full-width output out",
            )
    return values


def _first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__
