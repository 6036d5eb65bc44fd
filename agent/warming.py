"""Objects compiled ahead, so that a first call compiles nothing.

- What a call looks up depends on the program, the types and the tile, not on the machine that
  compiled it: an image's build needs no GPU, where it names the one that kernels will run on.
- Calls with A and B as `nn.Linear` has them; other strides of theirs are other objects.
"""

import os
import tempfile
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

from coda_agent.agent.execution.local import here
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.machine import demanded
from coda_agent.agent.judge.records import Observer
from coda_agent.agent.tune import check_shape
from coda_agent.agent.workspace import Kernel
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError, CompileError
from coda_agent.primitives.objects import cache_directory
from coda_agent.primitives.program import Program
from coda_agent.primitives.suggest import near_matches
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.dispatch import Shape
from coda_agent.runtime.kernel import Kernel as Function
from coda_agent.runtime.launch import allocate
from coda_agent.runtime.loading import load_kernel
from coda_agent.runtime.plan import finalised
from coda_agent.specs import Spec

Fold = tuple[Program, TileConfig, int, int]
"""What folds the final reductions of a call: its program, its tile, M and N."""


@dataclass(frozen=True)
class Built:
    """What became of compile jobs.

    Attributes:
        new: Objects that were compiled now.
        known: Objects that were there.
        failed: Jobs that failed, and why.
    """

    folder: Path
    new: int = 0
    known: int = 0
    failed: dict[str, str] = field(default_factory=dict)


def ahead(
    kernel: Kernel, shapes: Iterable[Shape], *, gpu: str | None = None, block: int | None = None
) -> tuple[list[CompileJob], list[Fold]]:
    """List what calls of a kernel at some shapes compile and fold.

    That is every variant in every element type, in the tile that is dispatched there.

    Args:
        gpu: The GPU's name; by default the one here.
        block: The `block_size` of the calls.

    Raises:
        CodaError: nothing is known of that GPU, or no tile has that block.
        MachineError: there is no GPU here and none was named.
        SpecError: a shape that the kernel does not take.
    """
    function = load_kernel(kernel.folder)
    spec = function.spec
    name = _gpu(function, gpu)
    found: dict[tuple[str, str, TileConfig], list[CompileJob]] = {}
    folds: list[Fold] = []
    for shape in shapes:
        check_shape(spec, shape)
        for types in spec.type_choices():
            dtype = spec.dtype_of(spec.gemm[0], types)
            element = next(iter(types.values()), "bfloat16")
            config = function.tiles.choose(*shape, dtype, block, name)
            if config is None:
                raise CodaError(f"{spec.name}: no tile has block_size {block}")
            for variant, program in function.programs.items():
                # What compiles to the same object is one job: an order of the tiles is no code, and
                # a short K is not split.
                tile = replace(config, swizzle=8, split_k=config.parts(shape[2]))
                found[variant, element, tile] = _forms(program, tile, spec, element)
                if program.reductions and block is None:
                    folds.append((program, tile, shape[0], shape[1]))
    return [job for forms in found.values() for job in forms], folds


def _forms(program: Program, tile: TileConfig, spec: Spec, element: str) -> list[CompileJob]:
    """List a program's objects in one tile, by how scalars are given."""
    job = CompileJob.of(program, tile, "sm_90a", spec, element)
    if all(kind.dims for kind in program.operands.values()):
        return [job]
    return [job, job.model_copy(update={"read_scalars": True})]


def _gpu(function: Function, name: str | None) -> str:
    """Name the GPU that tiles are dispatched for."""
    if name is None:
        hint = 'name the one kernels will run on: --gpu "NVIDIA H200"'
        return demanded(here().gpu(), hint).name
    tiles = function.tiles
    known = {*tiles.tuned, *(tiles.user.gpus() if tiles.user else ())}
    spec = function.spec
    dtypes = {spec.dtype_of(spec.gemm[0], types) for types in spec.type_choices()}
    if name not in known and not any(tiles.model(name, dtype) for dtype in dtypes):
        hint = near_matches(name, known) or f"known: {', '.join(sorted(known))}"
        raise CodaError(f"nothing was measured of {function.__name__} on a {name!r}", hint=hint)
    return name


def _note(job: CompileJob) -> str:
    return f"{job.program.name} {job.element} {job.config.label}"


def compiled(jobs: Sequence[CompileJob], folds: Sequence[Fold], observer: Observer) -> Built:
    """Compile what the object cache lacks; one that is stopped loses nothing.

    Raises:
        OSError: the cache cannot be written to.
    """
    folder = cache_directory()
    folder.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryFile(dir=folder) as file:
        start = os.fstat(file.fileno()).st_mtime  # by the clock of what follows

    def tell(done: int, job: CompileJob) -> None:
        about = {"gate": "warm", "done": done, "total": len(jobs), "note": _note(job)}
        observer("gate.progress", about)

    failed, new = dict[str, str](), 0
    for job, built in zip(jobs, here().map(jobs, tell), strict=True):
        if isinstance(built, CompileError):
            failed[_note(job)] = str(built)
        else:
            new += Path(built.object).stat().st_mtime >= start
    for program, config, m, n in folds:
        dtypes = dict.fromkeys(program.outputs, torch.float32)
        outputs = allocate(program, m, n, dtypes, config, "meta")
        finalised(program, outputs, m, n, config)
    return Built(folder, new, len(jobs) - len(failed) - new, failed)
