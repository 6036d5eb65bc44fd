"""Dispatch tables: measures kernels over a range of shapes, and fits a model to each."""

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from coda_agent.agent.judge import Observer, compile_gate, survey_candidate
from coda_agent.agent.judge.executor import Executor, usable
from coda_agent.agent.judge.records import VERSIONS, Survey
from coda_agent.agent.workspace import Kernel
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.reader import read_programs
from coda_agent.runtime.dispatch import Regret, Shape
from coda_agent.runtime.dispatch_fit import Times, fit, held_back, undisturbed
from coda_agent.runtime.dispatch_tables import Entry, Table, read, width
from coda_agent.specs import Spec, load_spec

_ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_WIDTHS = (1024, 2048, 4096, 6144, 8192, 14336, 28672)
_DEPTHS = (256, 512, *_WIDTHS)
# Beyond these, tiles are as fast to one another as there. Every tile has outputs of its own.
_WORK, _WEIGHTS, _OUTPUTS = 2**38, 2**28, 2**26
# The inverse of x⁴ = x + 1, whose powers spread a sequence evenly in three dimensions (Roberts,
# "The unreasonable effectiveness of quasirandom sequences", 2018).
_SPREAD = 1 / 1.2207440846057596


def shapes(count: int) -> list[Shape]:
    """`count` shapes, evenly spread by logarithm: every other one with the rows and widths that
    models have, the others between them."""
    found: list[Shape] = []
    i = 0
    while len(found) < count:
        i += 1
        u, v, w = ((0.75 + i * _SPREAD**power) % 1 for power in (1, 2, 3))
        if len(found) % 2:
            sizes = (_ROWS, u), (_WIDTHS, v), (_DEPTHS, w)
            m, n, k = (known[int(at * len(known))] for known, at in sizes)
        else:
            m = round(2 ** (14 * u))
            m = m if m < 128 else 16 * round(m / 16)
            n, k = 128 * round(2 ** (2.5 + 6 * v)), 64 * round(2 ** (2 + 7 * w))
        fits = m * n * k <= _WORK and n * k <= _WEIGHTS and m * n <= _OUTPUTS
        if fits and (m, n, k) not in found:
            found.append((m, n, k))
    return found


class _Due(NamedTuple):
    """A kernel to measure: by name; its spec, whose bench shapes are those to measure; its
    candidate's text; its program's digest; and what was measured of it before."""

    name: str
    spec: Spec
    text: str
    digest: str
    held: Mapping[Shape, Times]


def fit_tables(
    folder: Path,
    kernels: Sequence[Kernel],
    executor: Executor,
    observer: Observer,
    *,
    count: int,
    also: Callable[[Path], Sequence[Shape]] | None = None,
    fresh: bool,
    say: Callable[[str], None],
) -> Path | None:
    """Measures kernels one after the other on this GPU, and writes the table after each, so that
    what was measured stays. While one is measured the next is compiled. Where the table has the
    same program by the same compile gate, only the shapes that it lacks are measured.

    Args:
        folder: Of the kernels; the table goes to its `dispatch/`.
        kernels: Which.
        executor: What carries out the jobs.
        observer: Told of gates.
        count: Shapes of each, spread by `shapes`.
        also: Further ones, of a kernel by its spec's path.
        fresh: Whether to measure again what the table has, and to drop its other shapes.
        say: Told a line for each kernel.

    Returns:
        The table's file; None where nothing was due.

    Raises:
        MachineError: there is no Hopper GPU.
    """
    gpu = usable(executor, "cuda")
    assert gpu is not None  # "cuda" demands one
    path, spread = None, shapes(count)
    table = read(folder, gpu.name)
    work: list[_Due] = []
    for kernel in kernels:
        spec, text = load_spec(kernel.spec), kernel.text
        digest = read_programs(text)[spec.variant(spec.bindings()[0])].digest
        wanted = list(dict.fromkeys((*spread, *(also(kernel.spec) if also else ()))))
        held: Mapping[Shape, Times] = {}
        known = table.kernels.get(kernel.name) if table and not fresh else None
        if table and known and _stands(known, digest):
            held = known.model(table.sms).measured()
            if held.keys() >= set(wanted):
                say(f"{kernel.name}: known, {_said(known.regret)}")
                continue
        due = [dict(zip(spec.gemm_dims, s, strict=True)) for s in wanted if s not in held]
        spec = spec.model_copy(update={"bench_shapes": tuple(due)})
        work.append(_Due(kernel.name, spec, text, digest, held))
    ahead: Future[None] | None = None
    with ThreadPoolExecutor(1) as thread:
        for due, following in zip_longest(work, work[1:]):
            if ahead:
                ahead.result()
            ahead = thread.submit(_compile, executor, following) if following else None
            try:
                found = survey_candidate(due.spec, due.text, executor, observer=observer)
                entry = _entry(found, due, executor)
            except CodaError as error:
                say(f"{due.name}: {error}")
                continue
            entries = {**(table.kernels if table else {}), due.name: entry}
            table = Table(gpu=gpu.name, sms=found.sms, kernels=dict(sorted(entries.items())))
            path = table.write(folder)
            say(f"{due.name}: {_said(entry.regret)}")
    return path


def _stands(entry: Entry, digest: str) -> bool:
    """Whether what was measured is of this program, as the compile gate compiles it now."""
    return (entry.program, entry.version) == (digest, VERSIONS["compile"])


def _compile(executor: Executor, due: _Due) -> None:
    """Fills the object cache with what a survey needs."""
    spec = due.spec
    name, (m, n, k) = spec.variant(spec.bindings()[0]), spec.gemm_dims
    jobs = compile_gate.jobs_for(
        spec,
        read_programs(due.text),
        spec.elements[:1],
        all_tiles=True,
        newer=False,
        shapes=[(s[m], s[n], s[k]) for s in spec.bench_shapes],
    )
    executor.map([job for job in jobs if job.program.name == name], lambda *_: None)


def _entry(found: Survey, due: _Due, executor: Executor) -> Entry:
    measured = dict(due.held) | {
        (s.m, s.n, s.k): {found.configs[label]: us for label, us in s.us.items()}
        for s in found.shapes
    }
    about = {"element_bytes": width(found.dtype), "sms": found.sms}
    measured = undisturbed(measured, **about)
    regret, _ = held_back(measured, **about)
    machine = executor.environment("cuda")
    kept = {key: machine[key] for key in ("cuda", "packages") if key in machine}
    kept["driver"] = machine.get("gpu", {}).get("driver_version")
    return Entry.of(
        fit(measured, **about), program=due.digest, dtype=found.dtype, regret=regret, machine=kept,
        date=datetime.now(UTC).date().isoformat(), version=VERSIONS["compile"],
    )  # fmt: skip


def _said(regret: Regret) -> str:
    return (
        f"picks {regret.mean - 1:.1%} slower than the fastest tile in geometric mean and "
        f"{regret.worst - 1:.1%} at worst, at {regret.shapes} shapes held back"
    )
