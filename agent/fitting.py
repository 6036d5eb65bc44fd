"""Dispatch tables: kernels measured over shapes, and a model of each."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path
from typing import NamedTuple

from coda_agent.agent.judge import Observer, compile_gate, survey_candidate
from coda_agent.agent.judge.executor import Executor
from coda_agent.agent.judge.machine import demanded
from coda_agent.agent.judge.records import VERSIONS, Survey
from coda_agent.agent.plain import utc_now
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
    """List shapes, evenly spread by logarithm.

    Every other one has rows and widths that models have.
    """
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


@dataclass(frozen=True)
class Wanted:
    """The shapes that a table is to have of each kernel.

    Attributes:
        count: So many, spread by `shapes`.
        also: Further ones, of a kernel by its spec's path.
        fresh: Whether to measure again what the table has, and to drop its other shapes.
    """

    count: int
    also: Callable[[Path], Sequence[Shape]] | None = None
    fresh: bool = False


class _Due(NamedTuple):
    """A kernel to measure at its bench shapes; `held` was measured before."""

    name: str
    spec: Spec
    text: str
    digest: str
    held: Mapping[Shape, Times]


def fit_tables(
    folder: Path,
    kernels: Sequence[Kernel],
    wanted: Wanted,
    executor: Executor,
    observer: Observer,
    say: Callable[[str], None],
) -> Path | None:
    """Measure kernels in turn on this GPU, and write their table.

    It is written after each, so that what was measured stays. While one is measured the next is
    compiled. Where the table has the same program by the same compile gate, only the shapes that it
    lacks are measured.

    Args:
        folder: Of the kernels; the table goes to its `dispatch/`.
        executor: What carries out the jobs.
        observer: Told of gates.
        say: Told a line for each kernel.

    Returns:
        The table's file; None where nothing was due.

    Raises:
        MachineError: there is no Hopper GPU.
    """
    gpu = demanded(executor.gpu())
    table, path = read(folder, gpu.name), None
    work = [*_due(table, kernels, wanted, say)]
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


def _due(
    table: Table | None, kernels: Sequence[Kernel], wanted: Wanted, say: Callable[[str], None]
) -> Iterator[_Due]:
    """List kernels of which a table lacks shapes; say which are known."""
    spread = shapes(wanted.count)
    for kernel in kernels:
        spec, text = load_spec(kernel.spec), kernel.text
        digest = read_programs(text)[spec.variant(spec.bindings()[0])].digest
        all_of = dict.fromkeys((*spread, *(wanted.also(kernel.spec) if wanted.also else ())))
        held: Mapping[Shape, Times] = {}
        known = table.kernels.get(kernel.name) if table and not wanted.fresh else None
        # It is of this program, as the compile gate compiles it now.
        if table and known and (known.program, known.version) == (digest, VERSIONS["compile"]):
            held = known.model(table.sms).measured()
            if held.keys() >= all_of.keys():
                say(f"{kernel.name}: known, {_said(known.regret)}")
                continue
        due = [dict(zip(spec.gemm_dims, s, strict=True)) for s in all_of if s not in held]
        spec = spec.model_copy(update={"bench_shapes": tuple(due)})
        yield _Due(kernel.name, spec, text, digest, held)


def _compile(executor: Executor, due: _Due) -> None:
    """Fill the object cache with what a survey needs."""
    spec = due.spec
    name, (m, n, k) = spec.variant(spec.bindings()[0]), spec.gemm_dims
    jobs = compile_gate.jobs_for(
        spec,
        read_programs(due.text),
        spec.elements[:1],
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
        date=utc_now()[:10], version=VERSIONS["compile"],
    )  # fmt: skip


def _said(regret: Regret) -> str:
    return (
        f"picks {regret.mean - 1:.1%} slower than the fastest tile in geometric mean and "
        f"{regret.worst - 1:.1%} at worst, at {regret.shapes} shapes held back"
    )
