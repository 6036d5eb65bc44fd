"""Contenders: what is timed beside one another. Each says what it is called and needs.

- A contender is built for a workload, and is then called with the number of the round. It does not
  compute what it leaves out of its outputs.
- Contenders of other libraries are in `libraries.py`; `contest.contenders` finds those of both.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import torch

from coda_agent.agent.judge.numerics import run_interpreter
from coda_agent.agent.judge.performance import bare_gemm
from coda_agent.agent.judge.tuner import Launched
from coda_agent.evals.definitions import Benchmark
from coda_agent.evals.workloads import Outputs, Rotation, Workload
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig

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
    """The accepted kernel in one launch and the finalisers of its reductions. With `raw`, the
    finalisers run only when the outputs are looked at."""
    spec, inputs = workload.kernel.spec, workload.inputs
    program = workload.kernel.programs[spec.variant()]
    types = dict.fromkeys(spec.types, workload.dtype)
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    if not workload.operands(inputs[0])[0].is_cuda:
        return lambda i: run_interpreter(spec, program, inputs[i % 2], config, dtypes)
    run = Launched(spec, program, inputs, dtypes, config)
    run.restore(0)  # Once: rounds then add to one another, which changes values and not the work.

    def partials(i: int) -> Outputs:
        run.launch(i)
        return {o: lambda o=o: run.folded()[o] for o in run.outputs}

    return partials if raw else run


def called(workload: Workload) -> Rotation:
    """The function that a user imports, with all that its host does."""
    kernel = workload.kernel
    spec = kernel.spec
    changed = set(spec.updated(spec.bindings()[0]).values())
    sets = [
        [x[name].clone() if name in changed else x[name] for name in spec.inputs]
        for x in workload.inputs
    ]

    def run(i: int) -> Outputs:
        found = kernel(*sets[i % 2])
        return dict(zip(spec.outputs, found if isinstance(found, tuple) else (found,), strict=True))

    return run


@contender("ours, raw partials", tiles=_of_the_block)
def ours_block(workload: Workload, config: TileConfig) -> Rotation:
    """The accepted kernel without the finalisers."""
    return ours(workload, config, raw=True)


@contender("cuBLAS GEMM")
def gemm(workload: Workload) -> Rotation:
    """The bare cuBLAS product."""
    product = bare_gemm(*workload.operands(workload.inputs[0]))
    return workload.rotating(lambda x, a, b: lambda: {"product": product(a, b)})
