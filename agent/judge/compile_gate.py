"""Gate 2: which architectures does each program compile for, at what cost?"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING

from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.records import CompiledKernel, Finding, Progress
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import OUTPUT_KINDS
from coda_agent.primitives.tables import Table
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig, carries, offered
from coda_agent.runtime.target import is_mma
from coda_agent.specs import Spec

if TYPE_CHECKING:
    from coda_agent.agent.judge.executor import Executor


NEWER = ("sm_100a", "sm_120a")
"""Architectures that a kernel is compiled for, too, before it is stored; it need not."""
# A tile that writes more than this to local memory is not tried. Measured on an H200: tiles with
# 175 to 305 such stores are still within 3 % of the best, and sometimes it.
MAX_LOCAL_STORES = 400


# The tensor-core instruction that a GEMM of operands of a type is made of, as nvdisasm 13.1
# spells it in objects of quack 0.6.5. Blackwell's does not tell 16-bit types apart.
_MMA = {
    ("sm_90a", "bfloat16"): "HGMMA.F32.BF16",
    ("sm_90a", "float16"): "HGMMA.F32",
    ("sm_90a", "float8_e4m3fn"): "QGMMA.F32.E4M3.E4M3",
    ("sm_100a", "bfloat16"): "UTCHMMA",
    ("sm_100a", "float16"): "UTCHMMA",
    ("sm_100a", "float8_e4m3fn"): "UTCQMMA",
    ("sm_120a", "bfloat16"): "HMMA.F32.BF16",
    ("sm_120a", "float16"): "HMMA.F32",
    ("sm_120a", "float8_e4m3fn"): "QMMA.SF.F32.E4M3.E4M3.E8",
}
_STORES = {name: kind.instruction for name, kind in OUTPUT_KINDS.items() if kind.instruction}


def lacking(job: CompileJob, found: Mapping[str, int]) -> str:
    """Say what an object's instructions lack of what its job declares.

    Declared are tensor-core products of the operands' type and of no other, and loads and stores of
    tiles by TMA. The object of an unfused form is its elementwise kernel, which shows neither.

    Args:
        job: The compile job.
        found: `primitives.target.instructions` of the object.
    """
    if not job.config.fused:
        return "an elementwise kernel multiplies matrices" if any(map(is_mma, found)) else ""
    expected = _MMA.get((job.arch, job.dtype))
    products = {name for name in found if is_mma(name)}
    if products != {expected} if expected else not products:
        shown, declared = ", ".join(sorted(products)) or "none", job.dtype
        return f"tensor-core instructions are {shown}, expected {expected or 'some'} of {declared}"
    kinds = {kind.__name__ for kind in job.program.outputs.values()}
    wanted = {"UTMALDG", *(_STORES[kind] for kind in kinds if kind in _STORES)}
    missing = sorted(wanted - found.keys())
    return f"tiles do not move by TMA: no {', '.join(missing)}" if missing else ""


def jobs_for(
    spec: Spec,
    programs: dict[str, Program],
    types: Sequence[str],
    *,
    newer: bool,
    shapes: Iterable[tuple[int, int, int]] | None = None,
    among: Collection[TileConfig] | None = None,
) -> list[CompileJob]:
    """List a candidate's compile jobs: each program in every element type.

    With `newer` there is one for each of `NEWER`, too. Without `shapes` the tile is the default
    one. With them it is every one that a tuner may pick for these, of those in `among` if given;
    and the default one for transposed operands, which the numerics gate runs.
    """
    jobs, default, all_tiles = list[CompileJob](), DEFAULT_CONFIGS["sm_90a"], shapes is not None
    for binding in spec.bindings():
        name = spec.variant(binding)
        program = programs[name]
        for element in types:
            tiles = (default,) if shapes is None else offered(program, shapes)
            targets = [("sm_90a", c) for c in tiles if among is None or c in among]
            if newer and element == types[0]:
                targets += [(a, DEFAULT_CONFIGS[a]) for a in NEWER if carries(program, a)]
            first, *others = _tables(spec, program, binding)
            made = [CompileJob.of(program, tile, arch, spec, element) for arch, tile in targets]
            jobs += [job.model_copy(update={"tables": first}) for job in made]
            if all_tiles:
                run = (job for job in made if job.arch == "sm_90a")
                more = [{"tables": tables, "again": True} for tables in others]
                jobs += [job.model_copy(update=update) for job in run for update in more]
    # Compiled by the child that runs it, this one alone took 3 s of the 6 s of numerics on an H200.
    ahead = (job for job in jobs if all_tiles and (job.arch, job.config) == ("sm_90a", default))
    if (job := next(ahead, None)) and job.dtype != "float8_e4m3fn":
        jobs.append(job.model_copy(update={"transposed": True, "again": True}))
    return jobs


def _tables(
    spec: Spec, program: Program, binding: Mapping[str, str]
) -> list[dict[str, tuple[int, ...]]]:
    """List extents of a program's tables, one for each code."""
    found = dict[tuple[int, ...], dict[str, tuple[int, ...]]]()
    kinds = {o: kind for o, kind in program.operands.items() if issubclass(kind, Table)}
    for sizes in (*reversed(spec.bench_shapes), *spec.check_shapes) if kinds else ():
        tables = {o: spec.shape_of(o, sizes, binding) for o in kinds}
        forms = (kind.form(tables[o][1], (0, 1), 0) for o, kind in kinds.items())
        found.setdefault(tuple(forms), tables)
    return [*found.values()] or [{}]


def check_signature(spec: Spec, programs: Mapping[str, Program]) -> list[Finding]:
    """Do the programs take and return what the spec declares?"""
    found = []
    for binding in spec.bindings():
        if program := programs.get(name := spec.variant(binding)):
            found += _signature_faults(spec, binding, program)
            found += _tensor_faults(spec, binding, program)
            found += _group_faults(spec, program)
        else:
            found.append((f"program {name!r} is missing", ""))
    return [Finding(message=message, hint=hint) for message, hint in found]


def _signature_faults(
    spec: Spec, binding: Mapping[str, str], program: Program
) -> Iterator[tuple[str, str]]:
    """Find names that are not the spec's, each with a hint."""
    updated = spec.updated(binding)
    wanted = [i for i in spec.inputs if i not in (*spec.gemm, *updated.values())]
    added = [program.accumulated] if program.accumulated else []
    if added != list(updated):
        yield (
            f"{program.name} adds to {added} in place, the spec declares {list(updated)}",
            "an AddTile output is exactly one that the spec updates in place",
        )
    if sorted(program.operands) != sorted(wanted):
        yield (
            f"{program.name} takes {list(program.operands)}, the spec has {wanted}",
            "operands are the spec's inputs but for the two GEMM operands",
        )
    if list(program.outputs) != list(spec.outputs):
        declared = list(spec.outputs)
        yield (
            f"{program.name} returns {list(program.outputs)}, the spec declares {declared}",
            "same names, same order",
        )


def _tensor_faults(
    spec: Spec, binding: Mapping[str, str], program: Program
) -> Iterator[tuple[str, str]]:
    """Find tensors of another shape or type than their kind's."""
    m, n, _ = spec.gemm_dims
    for name, kind in {**program.operands, **program.outputs}.items():
        if name not in spec.inputs and name not in spec.outputs:
            continue
        declared = tuple(str(d) for d in spec.symbolic_shape(name, binding))
        expected = kind.named(m, n)
        said = f"{program.name}: {name} is {kind.__name__}"
        table = issubclass(kind, Table) and len(declared) == 2
        if declared != expected and not table:
            shown, wanted = ", ".join(expected), ", ".join(declared)
            yield f"{said}, ({shown}); the spec declares ({wanted})", ""
        read = program.operands.get(name)
        known = read.dtypes if read else program.outputs[name].stored
        used = {spec.dtype_of(name, types) for types in spec.type_choices()}
        if known and (others := sorted(used.difference(known))):
            yield f"{said}, of {' or '.join(known)}; the spec declares {', '.join(others)}", ""


def _group_faults(spec: Spec, program: Program) -> Iterator[tuple[str, str]]:
    """Find a group that a check shape's columns do not fill."""
    _, n, _ = spec.gemm_dims
    for sizes in spec.check_shapes:
        if program.group and sizes[n] % program.group:
            yield (
                f"{program.name} has groups of {program.group} columns; the spec's {n}={sizes[n]} "
                "is no multiple of that",
                "groups are as wide as the reference's",
            )
            return


def compile_all(
    executor: Executor, jobs: Sequence[CompileJob], progress: Progress
) -> tuple[list[Finding], list[CompiledKernel]]:
    """Run the jobs; report each, and find what fails at default tiles.

    A tile that does not compile is a refusal of that tile, not of the candidate, unless it is the
    default one of a Hopper GPU. Jobs that have a tile again, for transposed operands and other
    tables, report none.
    """

    def tell(done: int, job: CompileJob) -> None:
        progress(done, len(jobs), f"{job.arch} {job.config.label} {job.element}")

    findings, kernels = [], []
    for job, built in zip(jobs, executor.map(jobs, tell), strict=True):
        default = job.config == DEFAULT_CONFIGS[job.arch]
        about = {"program": job.program.name, "arch": job.arch}
        error, hint, made = None, "", {}
        if isinstance(built, CompileError):
            error, hint = built.message, built.hint
        else:
            made = built.model_dump(exclude={"object", "order"})
            error = lacking(job, built.instructions or {}) or None
            if error is None and not default and (built.local_stores or 0) > MAX_LOCAL_STORES:
                error = f"spills: {built.local_stores} stores to local memory"
        if error and default and job.arch not in NEWER:
            findings.append(Finding(message=error, where=about, hint=hint))
        if job.again:
            continue
        said = f"{error} ({hint})" if hint else error
        kernels.append(
            CompiledKernel(**about, dtype=job.element, tile=job.config.label, error=said, **made)
        )
    return findings, kernels
