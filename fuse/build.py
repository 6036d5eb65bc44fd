"""Kernels of a graph's regions compiled side by side, before they are tried one by one."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from contextlib import suppress

import torch

from coda_agent.agent.judge.job import CompileJob
from coda_agent.fuse.kernels import Kernel, dtype_name
from coda_agent.fuse.regions import Region
from coda_agent.fuse.verify import operands_of
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.tables import Table
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.program_operator import function_of
from coda_agent.runtime.tile_choice import likely_tiles

TILES, _REGISTERS = 2, (176, 128)
"""Likely tiles that are tried where nothing was measured of a kernel, of other sizes each; then the
likeliest one with so many accumulators a thread at most. Of 17 kernels of a training step on an
H100 the fastest was always among the first three, and another cluster of the same tile was within
1 % of it, or up to twice as slow. But epilogues of many vectors and sums spill at all of those:
logits beside a bias, their logarithm of a sum and a row's label took 2.7 ms of an H200, where
Inductor's took 1.7."""
_FAILED: set[tuple[str, TileConfig]] = set()


def build(kernels: Sequence[tuple[Region, Kernel]], device: torch.device) -> None:
    """Compile the kernels of regions, with their tiles, into the cache of objects."""
    from coda_agent.agent.execution.pool import CompilePool

    jobs: list[CompileJob] = []
    for region, kernel in kernels:
        with suppress(torch.OutOfMemoryError):  # as where it is tried
            jobs += _jobs(region, kernel, device)
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    with CompilePool(max(1, min(cores, len(jobs), 14))) as pool:
        for job, built in zip(jobs, pool.map(jobs, lambda *_: None), strict=True):
            if isinstance(built, CompileError):
                _FAILED.add((job.program.digest, job.config))


def _jobs(region: Region, kernel: Kernel, device: torch.device) -> Iterator[CompileJob]:
    function = function_of(kernel.text)
    a, b, operands = operands_of(region, device)
    kinds = function.program.operands
    named = dict(zip(kinds, operands, strict=True))
    element, outputs = function.types[0], function.program.outputs
    common = CompileJob(
        program=function.program, arch="sm_90a", config=DEFAULT_CONFIGS["sm_90a"],
        element=element, dtype=element,
        operand_dtypes={x: dtype_name(t.dtype) for x, t in named.items()},
        output_dtypes={x: function.dtypes.get(x) or "float32" for x in outputs},
        read_scalars=True, turned="A" * _is_turned(a) + "B" * _is_turned(b),
        tables={x: tuple(t.shape) for x, t in named.items() if issubclass(kinds[x], Table)},
    )  # fmt: skip
    for config in tiles_of(kernel, (a.shape[0], b.shape[0], a.shape[1])):
        yield common.model_copy(update={"config": config})


def tiles_of(kernel: Kernel, shape: tuple[int, int, int]) -> list[TileConfig]:
    """Tiles that are worth trying: the one that was measured to be the fastest, or likely ones."""
    function = function_of(kernel.text)
    if kernel.like:
        found = function.choose(*shape, function.types[0], None)
        return [found] if found else []
    program = function.program
    failed = {tile for digest, tile in _FAILED if digest == program.digest}
    sizes: dict[tuple[int, int, bool], TileConfig] = {}
    for tile in likely_tiles(program, shape, function.types[0]):
        if tile not in failed:
            sizes.setdefault((tile.tile_m, tile.tile_n, tile.pingpong), tile)
    tiles = [*sizes.values()]
    small = [[x for x in tiles[TILES:] if _accumulators(x) <= most][:1] for most in _REGISTERS]
    return [*dict.fromkeys([*tiles[:TILES], *small[0], *small[1]])]


def _accumulators(tile: TileConfig) -> int:
    """Elements of a tile that a thread has."""
    threads = 128 if tile.pingpong or tile.tile_m == 64 else 256
    return tile.tile_m * tile.tile_n // threads


def _is_turned(x: torch.Tensor) -> bool:
    return x.stride(-1) != 1 and x.stride(-2) == 1
