"""Kernels of a graph's regions compiled side by side, before they are tried one by one."""

from __future__ import annotations

import os
from collections.abc import Sequence
from contextlib import suppress

import torch

from coda_agent.agent.judge.job import CompileJob
from coda_agent.fuse.kernels import Kernel, dtype_name
from coda_agent.fuse.regions import Region
from coda_agent.fuse.verify import operands_of
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.tables import Table
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig, offered
from coda_agent.runtime.dispatch import Shape
from coda_agent.runtime.program_operator import function_of
from coda_agent.runtime.tile_choice import likely_tiles

TILES = 3
"""Likely tiles that are tried where nothing was measured of a kernel, of other sizes each. Of 17
kernels of a training step on an H100 the fastest was always among them, and another cluster of the
same tile was within 1 % of it, or up to twice as slow."""
_ROUNDS = 3
"""How often tiles are built: those that spill make room for others. Logits beside a bias, their
logarithm of a sum and a row's label spilled 300 to 400 stores at all of the first three, and the
kernel took 2.7 ms of an H200, where Inductor's took 1.7."""
_Size = tuple[int, int, bool]
_SPILLS: dict[str, dict[_Size, int | None]] = {}
"""By a kernel's text and a tile's size: a thread's stores to local memory; None where it does not
compile."""


def build(kernels: Sequence[tuple[Region, Kernel]], device: torch.device) -> None:
    """Compile the kernels of regions, with their tiles, into the cache of objects."""
    from coda_agent.agent.execution.pool import CompilePool

    known: list[tuple[Kernel, CompileJob, Shape]] = []
    for region, kernel in kernels:
        with suppress(torch.OutOfMemoryError):  # as where it is tried
            known.append((kernel, *_job(region, kernel, device)))
    cores = len(os.sched_getaffinity(0)) // int(os.environ.get("LOCAL_WORLD_SIZE", 1))
    with CompilePool(max(1, min(cores, TILES * len(known), 14))) as pool:
        for _ in range(_ROUNDS):
            left = [
                (kernel.text, job.model_copy(update={"config": tile}))
                for kernel, job, shape in known
                for tile in tiles_of(kernel, shape)
                if _size(tile) not in _SPILLS.get(kernel.text, {})
            ]
            if not left:
                break
            built = pool.map([job for _, job in left], lambda *_: None)
            for (text, job), found in zip(left, built, strict=True):
                spills = None if isinstance(found, CompileError) else found.local_stores
                _SPILLS.setdefault(text, {})[_size(job.config)] = spills


def _job(region: Region, kernel: Kernel, device: torch.device) -> tuple[CompileJob, Shape]:
    """What compiles a kernel, with some tile, and (M, N, K)."""
    function = function_of(kernel.text)
    a, b, operands = operands_of(region, device)
    kinds = function.program.operands
    named = dict(zip(kinds, operands, strict=True))
    element, outputs = function.types[0], function.program.outputs
    job = CompileJob(
        program=function.program, arch="sm_90a", config=DEFAULT_CONFIGS["sm_90a"],
        element=element, dtype=element,
        operand_dtypes={x: dtype_name(t.dtype) for x, t in named.items()},
        output_dtypes={x: function.dtypes.get(x) or "float32" for x in outputs},
        read_scalars=True, turned="A" * _is_turned(a) + "B" * _is_turned(b),
        tables={x: tuple(t.shape) for x, t in named.items() if issubclass(kinds[x], Table)},
    )  # fmt: skip
    return job, (a.shape[0], b.shape[0], a.shape[1])


def tiles_of(kernel: Kernel, shape: Shape) -> list[TileConfig]:
    """Tiles that are worth trying: the one that was measured to be the fastest, or likely ones."""
    function = function_of(kernel.text)
    if kernel.like:
        found = function.choose(*shape, function.types[0], None)
        return [found] if found else []
    program, known = function.program, _SPILLS.get(kernel.text, {})
    spills = {x.label: known.get(_size(x)) or 0 for x in offered(program, [shape])} if known else {}
    sizes: dict[_Size, TileConfig] = {}
    for tile in likely_tiles(program, shape, function.types[0], spills=spills):
        if known.get(_size(tile), 0) is not None:
            sizes.setdefault(_size(tile), tile)
    return [*sizes.values()][:TILES]


def _size(tile: TileConfig) -> _Size:
    return tile.tile_m, tile.tile_n, tile.pingpong


def _is_turned(x: torch.Tensor) -> bool:
    return x.stride(-1) != 1 and x.stride(-2) == 1
