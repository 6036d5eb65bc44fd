"""Kernels of a graph's regions, compiled side by side, ahead of trials."""

from __future__ import annotations

import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, nullcontext, suppress

import torch

from coda_agent.agent.execution.pool import CompilePool
from coda_agent.agent.judge.job import CompileJob
from coda_agent.fuse.kernels import Kernel
from coda_agent.fuse.regions import Region
from coda_agent.fuse.verify import operands_of
from coda_agent.primitives.errors import CompileError, MachineError
from coda_agent.primitives.tables import Table
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.program_operator import function_of
from coda_agent.runtime.tensor_checks import dtype_name
from coda_agent.runtime.tile_choice import TileChoice, scheduled

_ACCUMULATORS = 128
"""Accumulators of a thread, at most, in one of two tiles that are tried where nothing was measured
of a kernel: ping-pong, and smaller than the other, which is the likeliest, since epilogues of many
vectors and sums spill there. Of 50 times that kernels of Llama's, BERT's and GPT-2's steps were
timed on H200s in three tiles, the faster of these two was within 3 % of the fastest; the likeliest
alone took up to 3.2 times as long."""
_FAILED: set[tuple[str, TileConfig]] = set()


def compilers() -> AbstractContextManager[CompilePool | None]:
    """Make the pool that compiles kernels; none where caches cannot be written."""
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    try:
        return CompilePool(max(1, min(cores, 14)))
    except MachineError:  # what they compile could not be handed on: this process compiles
        return nullcontext()


def build(
    pool: CompilePool,
    kernels: Sequence[tuple[Region, Kernel]],
    device: torch.device,
    meanwhile: Callable[[], None],
) -> None:
    """Compile the kernels of regions, with their tiles, into the cache.

    Args:
        pool: What compiles.
        kernels: They.
        device: Where they run.
        meanwhile: What this process does beside that.
    """
    jobs: list[CompileJob] = []
    for region, kernel in kernels:
        with suppress(torch.OutOfMemoryError):  # as where it is tried
            jobs += _jobs(region, kernel, device)
    aside = ThreadPoolExecutor(1)
    building = aside.submit(pool.map, jobs, lambda *_: None)
    aside.shutdown(wait=False)  # whoever interrupts this closes the pool
    meanwhile()
    for job, built in zip(jobs, building.result(), strict=True):
        if isinstance(built, CompileError):
            _FAILED.add((job.program.digest, job.config))


def _jobs(region: Region, kernel: Kernel, device: torch.device) -> Iterator[CompileJob]:
    function = function_of(kernel.text)
    a, b, named = operands_of(region, device)
    kinds = function.program.operands
    element, outputs = function.types[0], function.program.outputs
    common = CompileJob(
        program=function.program, arch="sm_90a", config=DEFAULT_CONFIGS["sm_90a"],
        element=element, dtype=element,
        operand_dtypes={x: dtype_name(t.dtype) for x, t in named.items()},
        output_dtypes={x: function.dtypes.get(x) or "float32" for x in outputs},
        read_scalars=True, read=False, turned="A" * _is_turned(a) + "B" * _is_turned(b),
        tables={x: tuple(t.shape) for x, t in named.items() if issubclass(kinds[x], Table)},
    )  # fmt: skip
    for config in tiles_of(kernel, (a.shape[0], function.program.columns(b), a.shape[1])):
        yield common.model_copy(update={"config": config})


def tiles_of(kernel: Kernel, shape: tuple[int, int, int]) -> list[TileConfig]:
    """List tiles worth trying: the one measured fastest, or likely ones."""
    function = function_of(kernel.text)
    if kernel.like:
        found = function.choose(*shape, function.types[0], None)
        return [scheduled(found, *shape[:2])] if found else []
    program = function.program
    failed = {tile for digest, tile in _FAILED if digest == program.digest}
    sizes: dict[tuple[int, int, bool], TileConfig] = {}
    likely = TileChoice("", program).ranked(shape, function.types[0])
    for tile in (scheduled(x, *shape[:2]) for x in likely):
        if tile not in failed:
            sizes.setdefault((tile.tile_m, tile.tile_n, tile.pingpong), tile)
    tiles = [*sizes.values()]
    if len(tiles) < 2:
        return tiles
    most = min(128 * _ACCUMULATORS, tiles[0].tile_m * tiles[0].tile_n - 1)
    small = (x for x in tiles if x.pingpong and x.tile_m * x.tile_n <= most)
    return [tiles[0], next(small, tiles[1])]


def _is_turned(x: torch.Tensor) -> bool:
    return x.stride(-1) != 1 and x.stride(-2) == 1
