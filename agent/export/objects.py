"""What an export holds of a kernel: tiles, their choice, shared libraries."""

from __future__ import annotations

import shutil
import subprocess
import tempfile
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import product
from pathlib import Path
from typing import Any

from coda_agent.agent.execution.local import here
from coda_agent.agent.judge.job import CompileJob
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError, CompileError, MachineError
from coda_agent.primitives.kinds import Output, Resource
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.dispatch import Shape
from coda_agent.runtime.documentation import documentation
from coda_agent.runtime.function import reduction_block
from coda_agent.runtime.kernel import Kernel, index_inputs
from coda_agent.runtime.operators import Variant, scalars
from coda_agent.runtime.tensor_checks import TensorChecks

RUN = "sm_90a"
"""The architecture that kernels are judged on; objects for others were compiled and never run."""
_DIMS = {"M", "N", "2*N", "N/2"}
# Of M, N and K: the shapes between which the table of choices tells.
_AXES = (
    tuple(1 << i for i in range(4, 15)),
    tuple(1 << i for i in range(9, 18)),
    tuple(1 << i for i in range(9, 16)),
)
_RUNTIME = Path(__file__).with_name("runtime.c")
_OBJECT = "__tvm_ffi_func"
Objects = dict[tuple[str, str], dict[str, dict[str, dict[str, object]]]]
"""By variant and type of A: by architecture, where scalars are, and tile."""


@dataclass(frozen=True)
class Wanted:
    """What of a kernel is exported.

    Attributes:
        gpu: The name of the GPU whose measured times choose tiles.
        tiles: How many tiles, at most.
        types: Element types of A; none for all that the spec has.
    """

    gpu: str
    tiles: int
    types: tuple[str, ...] = ()
    archs: tuple[str, ...] = (RUN,)


@dataclass(frozen=True)
class Choices:
    """A kernel's tiles, and a table for each type of A."""

    tiles: tuple[TileConfig, ...]
    tables: Mapping[str, Mapping[str, Any]]


def choose(kernel: Kernel, wanted: Wanted) -> Choices:
    """Choose the tiles dispatched most often over a grid, measured shapes first.

    Tiles of unfused forms are left out, since cuBLAS is no part of an export, and clusters of more
    than two, whose count a GPU's driver alone knows.

    Raises:
        CodaError: nothing is known of that GPU, or of such a type.
    """
    spec, tiles = kernel.spec, kernel.tiles
    known = [spec.dtype_of(spec.gemm[0], x) for x in spec.type_choices()]
    types = [x for x in known if not wanted.types or x in wanted.types]
    if not types:
        got, expected = " or ".join(wanted.types), " or ".join(known)
        raise CodaError(f"{spec.name} takes no {got}, expected {expected}")
    counts, ranked = Counter[TileConfig](), dict[str, dict[Shape, list[TileConfig]]]()
    for dtype in types:
        if wanted.gpu not in tiles.tuned and not tiles.model(wanted.gpu, dtype):
            raise CodaError(
                f"nothing was measured of {spec.name} on a {wanted.gpu!r}",
                hint=f"known: {', '.join(tiles.tuned) or 'none'}; coda-agent fit measures here",
            )
        lines = tiles.tuned.get(wanted.gpu, {}).get(dtype, [])
        measured = [(line["m"], line["n"], line["k"]) for line in lines]
        at = ranked[dtype] = dict[Shape, list[TileConfig]]()
        for shape in (*measured, *product(*_AXES)):
            found = tiles.ranked(shape, dtype, wanted.gpu)
            if first := shape in measured and tiles.choose(*shape, dtype, None, wanted.gpu):
                found = [first, *found]
            at[shape] = [x for x in found if x.fused and x.cluster_m * x.cluster_n <= 2]
            counts[at[shape][0]] += 10**6 if shape in measured else 1  # measured ones first
    kept = [tile for tile, _ in counts.most_common(wanted.tiles)]
    return Choices(tuple(kept), {x: _table(at, kept) for x, at in ranked.items()})


def _table(ranked: Mapping[Shape, Sequence[TileConfig]], kept: Sequence[TileConfig]) -> dict:
    """Tabulate the orders in which shapes prefer `kept` tiles."""
    orders: dict[tuple[int, ...], int] = {}

    def order(shape: Shape) -> int:
        known = [kept.index(x) for x in dict.fromkeys(ranked[shape]) if x in kept]
        return orders.setdefault(tuple(known), len(orders))

    grid = [*product(*_AXES)]
    exact = {"x".join(map(str, x)): order(x) for x in ranked if x not in set(grid)}
    near = [order(x) for x in grid]
    return {"axes": _AXES, "near": near, "exact": exact, "orders": [*orders]}


def refuse(kernel: Kernel) -> None:
    """Refuse what the loader has no form for.

    Raises:
        CodaError: the kernel takes a layout of its own, a table, or a group of columns.
    """
    spec = kernel.spec
    if spec.layout:
        hint = "declare A [M, K], B [N, K], [M, N], [M] and [N], as gemm_bias_act does"
        what = "its spec declares tensors in a layout of its own"
        raise CodaError(f"{spec.name}: {what}, which an export does not view or pack", hint=hint)
    for program in kernel.programs.values():
        kinds = (*program.operands.values(), *program.outputs.values())
        if odd := [kind.__name__ for kind in kinds if not set(kind.dims) <= _DIMS]:
            raise CodaError(f"{spec.name} has a {odd[0]}, which no export does")


def exported(
    kernels: Sequence[Kernel], wanted: Wanted, progress: Callable[[int, int, str], None]
) -> tuple[list[dict[str, Any]], list[dict[str, bytes]]]:
    """Compile kernels: what the loader knows of each, and its shared libraries.

    Raises:
        CodaError: one cannot be exported so.
        CompileError: a tile does not compile.
        MachineError: there is no C compiler to link with.
    """
    for kernel in kernels:
        refuse(kernel)
    chosen = [choose(kernel, wanted) for kernel in kernels]
    jobs = [[*_jobs(kernel, wanted, x)] for kernel, x in zip(kernels, chosen, strict=True)]
    flat = [x.job for some in jobs for x in some]
    built = iter(here().map(flat, lambda done, job: progress(done, len(flat), job.config.label)))
    abouts, libraries = [], []
    for kernel, choices, some in zip(kernels, chosen, jobs, strict=True):
        files: dict[str, bytes] = {}
        objects: Objects = {}
        for x in some:
            found = next(built)
            if isinstance(found, CompileError):
                raise found
            files[x.file] = linked(_OBJECT, _RUNTIME, Path(found.object))
            form = objects.setdefault((x.variant, x.job.dtype), {}).setdefault(x.job.arch, {})
            named = form.setdefault("memory" if x.job.read_scalars else "number", {})
            named[x.job.config.label] = {"file": x.file, "order": found.order}
        abouts.append(_about(kernel, wanted, choices, objects))
        libraries.append(files)
    return abouts, libraries


def _about(kernel: Kernel, wanted: Wanted, choices: Choices, objects: Objects) -> dict[str, Any]:
    """Describe a kernel to the loader."""
    spec, program = kernel.spec, next(iter(kernel.programs.values()))
    others = tuple(DEFAULT_CONFIGS[arch] for arch in wanted.archs if arch != RUN)
    tiles = tuple(dict.fromkeys((*choices.tiles, *others)))
    return {
        "name": spec.name,
        "doc": _documentation(kernel, choices.tables),
        "inputs": [*spec.inputs],
        "scalars": [*map([*spec.inputs].index, scalars(spec))],
        "parameters": dict(spec.parameters),
        "tiles": [_tile(x, program) for x in tiles],
        "choices": choices.tables,
        "variants": [
            _variant(key, variant, spec.variant(x), kernel, choices, objects)
            for (key, variant), x in zip(kernel.variants.items(), spec.bindings(), strict=True)
        ],
    }


def _documentation(kernel: Kernel, types: Iterable[str]) -> str:
    """Write the kernel's docstring, with the types of A that are exported."""
    text = documentation(kernel.spec, index_inputs(kernel.spec), exported=True)
    return f"{text}\n\nExported types of A: {', '.join(types)}"


@dataclass(frozen=True)
class _Job:
    variant: str
    job: CompileJob
    file: str


def _jobs(kernel: Kernel, wanted: Wanted, choices: Choices) -> Iterator[_Job]:
    """List a kernel's objects; where there are scalars, two forms of each."""
    spec = kernel.spec
    for (variant, program), types in product(kernel.programs.items(), spec.type_choices()):
        dtype = spec.dtype_of(spec.gemm[0], types)
        if dtype not in choices.tables:
            continue
        element = next(iter(types.values()), "bfloat16")
        forms = (False, True) if any(not k.dims for k in program.operands.values()) else (False,)
        for arch in wanted.archs:
            tiles = choices.tiles if arch == RUN else (DEFAULT_CONFIGS[arch],)
            # An order of tiles is no code.
            codes = dict.fromkeys(replace(tile, swizzle=8) for tile in tiles)
            for tile, read in product(codes, forms):
                job = CompileJob.of(program, tile, arch, spec, element)
                words = (variant, dtype, tile.label, arch, "memory" * read)
                file = "-".join(filter(None, words)).replace(" ", "-")
                yield _Job(
                    variant, job.model_copy(update={"read_scalars": read}), f"objects/{file}.so"
                )


def _tile(config: TileConfig, program: Program) -> dict[str, object]:
    code = replace(config, swizzle=8).label
    return {**config.to_dict(), "code": code, "block": reduction_block(program, config)}


def _variant(
    key: tuple[str, ...],
    variant: Variant,
    name: str,
    kernel: Kernel,
    choices: Choices,
    objects: Objects,
) -> dict[str, object]:
    """Describe a variant to the loader."""
    spec, program = kernel.spec, variant.function.program
    kinds: Mapping[str, type[Resource]] = variant.function.operands
    checks, shown = TensorChecks(program, variant.function.dtypes), [*spec.outputs]
    forms = {}
    for types in spec.type_choices():
        if (dtype := spec.dtype_of(spec.gemm[0], types)) not in choices.tables:
            continue
        outputs = {o: spec.dtype_of(o, types) for o in program.outputs}
        outputs |= {o: "float32" for o in program.reductions}
        forms[dtype] = {
            "choice": dtype,
            "steps": checks.steps(getattr(torch, dtype)),
            "operands": [
                "float32" if not kind.dims else outputs.get(o) or spec.dtype_of(o, types)
                for o, kind in kinds.items()
            ],
            "outputs": [*outputs.values()],
            "objects": objects[name, dtype],
        }
    return {
        "key": key,
        "places": variant.places,
        "kept": variant.function.kept,
        "updated": variant.updated,
        "shown": [(shown.index([*program.outputs][o]), i) for o, i in variant.updated],
        "returned": variant.returned,
        "operands": [
            {"dims": kind.dims, "vector": getattr(kind, "vector", False)} for kind in kinds.values()
        ],
        "outputs": [_output(kind) for kind in program.outputs.values()],
        "forms": forms,
    }


def _output(kind: type[Output]) -> dict[str, object]:
    reduction = None
    if issubclass(kind, Reduction):
        names = "combine", "mean", "over_rows"
        reduction = {x: getattr(kind, x) for x in names} | {"identity": kind.identity()}
    return {"dims": kind.dims, "accumulates": kind.accumulates, "reduction": reduction}


def linked(names: str, *paths: Path) -> bytes:
    """Link a shared library, always the same bytes, that shows `names` alone.

    Raises:
        MachineError: there is no C compiler, or it refuses.
    """
    compiler = shutil.which("cc") or shutil.which("gcc")
    if compiler is None:
        raise MachineError("no C compiler was found", hint="install gcc: it links what is exported")
    with tempfile.TemporaryDirectory() as folder:
        shown, out = Path(folder) / "names", Path(folder) / "out.so"
        shown.write_text(f"{{ global: {names}; local: *; }};\n", "utf-8")
        # CUDA's functions are bound when they are called: torch has them in the process then.
        flags = ["-O2", "-fPIC", "-shared", "-s", "-Wl,--build-id=none", "-Wl,-z,lazy"]
        command = [compiler, *flags, f"-Wl,--version-script={shown}", "-o", out, *paths]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
        if done.returncode:
            raise MachineError(f"{compiler} does not link: {done.stderr.strip().splitlines()[-1:]}")
        return out.read_bytes()
