"""Contenders: what is timed beside one another. Each says what it is called and needs.

- A contender is built for a workload, and is then called with the number of the round. What it
  leaves out of its outputs, it does not compute.
- Those of other libraries are in `libraries.py`; `contest.contenders` finds those of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coda_agent.evals.workloads import Benchmark, Call, Outputs, Rotation, Workload
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig

if TYPE_CHECKING:
    import torch

Tiles = Callable[[Workload, Benchmark], Sequence[TileConfig]]


class Absent(CodaError):
    """Why a contender takes no part."""

    def __init__(self, message: str = "has nothing for this kernel") -> None:
        super().__init__(message)


@dataclass(frozen=True)
class Contender:
    """Something that is timed; made by the decorator `contender`.

    Attributes:
        name: In records and on the command line: the function's.
        label: In pages.
        build: From a workload and, where it has `tiles`, one of them. What it raises is why it
            takes no part: `Absent` where it has nothing for the kernel, `ImportError` where its
            library is not installed.
        tiles: Those to choose the fastest right one from; None where it chooses by itself.
        package: The distribution and the module whose version its figures depend on.
    """

    name: str
    label: str
    build: Callable[..., Rotation]
    tiles: Tiles | None = None
    package: tuple[str, str] | None = None

    def __call__(self, workload: Workload, *tile: TileConfig, **options: Any) -> Rotation:
        return self.build(workload, *tile, **options)


def contender(
    label: str, *, tiles: Tiles | None = None, package: tuple[str, str] | None = None
) -> Callable[[Callable[..., Rotation]], Contender]:
    """Makes a contender of the function below it; the arguments are as in `Contender`."""
    return lambda build: Contender(build.__name__, label, build, tiles, package)


def _dispatched(workload: Workload, _: Benchmark) -> list[TileConfig]:
    """The tile that a call of the kernel would take."""
    chosen = workload.kernel.choose(*workload.mnk, workload.dtype)
    return [chosen or DEFAULT_CONFIGS["sm_90a"]]


def _of_the_block(workload: Workload, benchmark: Benchmark) -> list[TileConfig]:
    """The tiles that reduce over the benchmark's block; none for a kernel that does not reduce in
    one direction."""
    program = workload.kernel.programs[workload.kernel.spec.variant()]
    over_rows = {kind.over_rows for kind in program.reductions.values()}
    if len(over_rows) != 1:
        raise Absent
    side = "tile_m" if over_rows.pop() else "tile_n"
    return [t for t in benchmark.tiles if getattr(t, side) == benchmark.reduction_block]


@contender("ours", tiles=_dispatched)
def ours(workload: Workload, config: TileConfig, *, raw: bool = False) -> Rotation:
    """The accepted kernel in one launch and the finalisers of its reductions; those of a `raw` one
    run only when its outputs are looked at."""
    import torch

    from coda_agent.primitives.function import finalised
    from coda_agent.primitives.interpret import interpret
    from coda_agent.primitives.launch import allocate, launch

    spec, (m, n, _) = workload.kernel.spec, workload.mnk
    program = workload.kernel.programs[spec.variant()]
    a, _ = workload.operands(workload.inputs[0])
    types = dict.fromkeys(spec.types, workload.dtype)
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    buffers = allocate(program, m, n, dtypes, config, a.device)
    place = spec.in_place if program.accumulated else None
    if place:  # Once: rounds then add to one another, which changes values and not the work.
        buffers[place.output].copy_(workload.inputs[0][place.input])

    def outputs() -> Outputs:
        return finalised(program, buffers, m, n, config)

    def build(x: dict[str, Any], a: torch.Tensor, b: torch.Tensor) -> Call:
        start = {place.output: x[place.input]} if place else {}

        def run() -> Outputs:
            if not a.is_cuda:
                block, rows = config.tile_n, config.tile_m
                given = {**x, **start}
                return interpret(program, a, b, given, dtypes=dtypes, block=block, row_block=rows)
            launch(program, a, b, x, buffers, config)
            return {o: lambda o=o: outputs()[o] for o in buffers} if raw else outputs()

        return run

    return workload.rotating(build)


@contender("ours, raw partials", tiles=_of_the_block)
def ours_block(workload: Workload, config: TileConfig) -> Rotation:
    """The accepted kernel without the finalisers."""
    return ours(workload, config, raw=True)


@contender("cuBLAS GEMM")
def gemm(workload: Workload) -> Rotation:
    """The bare cuBLAS product."""
    import torch

    out = workload.product()
    return workload.rotating(lambda x, a, b: lambda: {"product": torch.mm(a, b.t(), out=out)})
