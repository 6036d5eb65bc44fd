"""Dispatch tables: measures kernels over a range of shapes, and fits a model to each."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING

from coda_agent.agent.judge import compile_gate, survey_candidate
from coda_agent.agent.judge.rules import given
from coda_agent.agent.workspace import Kernel
from coda_agent.generated.tables import Entry, Table, read, width
from coda_agent.primitives.dispatch import Regret, Shape
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.fit import fit, held_back, undisturbed
from coda_agent.specs import load_spec

if TYPE_CHECKING:
    from coda_agent.agent.judge import Observer
    from coda_agent.agent.judge.executor import Executor
    from coda_agent.agent.judge.records import Survey
    from coda_agent.specs import Spec

_ROWS = (1, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192)
_WIDTHS = (1024, 2048, 4096, 6144, 8192, 14336, 28672)
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
        u, v, w = ((0.5 + i * _SPREAD**power) % 1 for power in (1, 2, 3))
        if len(found) % 2:
            sizes = (_ROWS, u), (_WIDTHS, v), (_WIDTHS, w)
            m, n, k = (known[int(at * len(known))] for known, at in sizes)
        else:
            m = round(2 ** (14 * u))
            m = m if m < 128 else 16 * round(m / 16)
            n, k = 128 * round(2 ** (2.5 + 6 * v)), 64 * round(2 ** (3 + 6 * w))
        fits = m * n * k <= _WORK and n * k <= _WEIGHTS and m * n <= _OUTPUTS
        if fits and (m, n, k) not in found:
            found.append((m, n, k))
    return found


def fit_tables(
    folder: Path,
    kernels: Sequence[Kernel],
    executor: Executor,
    observer: Observer,
    *,
    count: int,
    fresh: bool,
    say: Callable[[str], None],
) -> Path | None:
    """Measures kernels one after the other on this GPU, and writes the table after each, so that
    what was measured stays. While one is measured the next is compiled.

    Args:
        folder: Of the kernels; the table goes to its `dispatch/`.
        kernels: Which.
        executor: What carries out the jobs.
        observer: Told of gates.
        count: Shapes of each.
        fresh: Whether to measure again what the table has of the same program by the same rules.
        say: Told a line for each kernel.

    Returns:
        The table's file; None where nothing was due.

    Raises:
        MachineError: there is no Hopper GPU.
    """
    from coda_agent.agent.judge.executor import usable

    gpu = usable(executor, "cuda")
    assert gpu is not None  # "cuda" demands one
    path, wanted = None, shapes(count)
    work = [(k, _spec(k, wanted), k.program.read_text("utf-8")) for k in kernels]
    table = read(folder, gpu.name)
    ahead: Future[None] | None = None
    with ThreadPoolExecutor(1) as thread:
        for i, (kernel, spec, text) in enumerate(work):
            digest = executor.load(text)[spec.variant(spec.bindings()[0])].digest
            known = table and table.kernels.get(kernel.name)
            if known and not fresh and (known.program, known.rules) == (digest, given("compile")):
                say(f"{kernel.name}: known, {_said(known.regret)}")
                continue
            if ahead:
                ahead.result()
            following = work[i + 1 : i + 2]
            ahead = thread.submit(_compile, executor, *following[0][1:]) if following else None
            try:
                found = survey_candidate(spec, text, executor, observer=observer)
                entry = _entry(found, digest, executor)
            except CodaError as error:
                say(f"{kernel.name}: {error}")
                continue
            entries = {**(table.kernels if table else {}), kernel.name: entry}
            table = Table(gpu=gpu.name, sms=found.sms, kernels=dict(sorted(entries.items())))
            path = table.write(folder)
            say(f"{kernel.name}: {_said(entry.regret)}")
    return path


def _spec(kernel: Kernel, wanted: Sequence[Shape]) -> Spec:
    spec = load_spec(kernel.spec)
    sizes = tuple(dict(zip(spec.gemm_dims, shape, strict=True)) for shape in wanted)
    return spec.model_copy(update={"bench_shapes": sizes})


def _compile(executor: Executor, spec: Spec, text: str) -> None:
    """Fills the object cache with what a survey needs."""
    name, (m, n, k) = spec.variant(spec.bindings()[0]), spec.gemm_dims
    jobs = compile_gate.jobs_for(
        spec,
        executor.load(text),
        [*next(iter(spec.types.values()), ["bfloat16"])][:1],
        all_tiles=True,
        newer=False,
        shapes=[(s[m], s[n], s[k]) for s in spec.bench_shapes],
    )
    executor.map([job for job in jobs if job.program.name == name], lambda *_: None)


def _entry(found: Survey, digest: str, executor: Executor) -> Entry:
    measured = {
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
        fit(measured, **about), program=digest, dtype=found.dtype, regret=regret, machine=kept,
        date=datetime.now(UTC).date().isoformat(), rules=given("compile"),
    )  # fmt: skip


def _said(regret: Regret) -> str:
    return (
        f"picks {regret.mean - 1:.1%} slower than the fastest tile in geometric mean and "
        f"{regret.worst - 1:.1%} at worst, at {regret.shapes} shapes held back"
    )
