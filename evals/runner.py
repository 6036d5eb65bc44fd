"""The runner: checks and times contenders, and keeps each cell.

- A cell is a contender at a case in a regime. Cells of this machine that are in the record are
  skipped; `again` measures those that another commit measured.
- All contenders of a case in a regime are timed side by side, so that ratios hold.
- A contender that is wrong or cannot run is kept with the reason. One about which the clocks
  disagree is said and not kept: the next run may fare better.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from coda_agent.agent import execution
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.judge.samples import Samples, speedup
from coda_agent.evals.cases import BASE, OURS, Absent, Call, Case, Contender, Setup, Suite
from coda_agent.evals.cells import FOLDER, Cell, Record, append, card, read
from coda_agent.evals.clocks import CLOCKS, Clock
from coda_agent.evals.workers import leave_with_parent
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.suggest import near_matches

UNTIMED = "untimed"
"""The regime of a cell that has errors alone."""
MODULES = {"liger": "liger_kernel", "liger, compiled": "liger_kernel", "flashinfer": "flashinfer"}
"""The libraries that contenders need; one that is not installed is as if it were not asked for."""
_HALF_ULP = 2.0**-9
"""Of bfloat16: an error below it counts as it in an `error_ratio`."""
Say = Callable[[str], None]


@dataclass(frozen=True)
class Choice:
    """What of a suite is measured; of each field nothing means all.

    Attributes:
        cases: Words of which a case's name has some in a row.
        contenders: Names; ours and PyTorch's own form take part in any case.
        regimes: Instead of the suite's.
        again: Whether cells that another commit measured are measured again.
        seconds: Begin no further case after so long.
    """

    cases: Sequence[str] = ()
    contenders: Sequence[str] = ()
    regimes: Sequence[str] = ()
    again: bool = False
    seconds: float | None = None


@dataclass(frozen=True)
class Bench:
    """Where and how cases are measured.

    Attributes:
        device: "cpu" interprets and compiles nothing, for tests.
        shrink: Divides the sizes of cases, for tests.
        clocks: By regime.
    """

    root: Path
    about: Record
    device: str = "cuda"
    shrink: int = 1
    clocks: Mapping[str, Clock] = field(default_factory=lambda: CLOCKS)

    def run(self, suite: Suite, choice: Choice, say: Say = print) -> Path:
        """Measure what evals/results/<suite>.jsonl does not have; its path.

        Raises:
            CodaError: nothing is called as the choice says.
            MachineError: the GPU faulted.
        """
        path, started = self.root / FOLDER / f"{suite.name}.jsonl", time.monotonic()
        known, cases = read(path, Cell), chosen(suite, choice)
        gpu = card(self.about.machine)
        missing: list[tuple[Case, Choice]] = []
        for case in cases:
            cells = {r: [known.get((case.name, n, r, gpu)) for n in _wanted(case, choice)]
                     for r in _regimes(case, suite, choice)}  # fmt: skip
            left = [r for r in cells if not all(self._holds(c, choice.again) for c in cells[r])]
            if left:
                missing.append((case, replace(choice, regimes=left)))
        say(f"{len(cases) - len(missing)} of {len(cases)} cases are in the record")
        if self.device == "cuda" and missing:
            _compile([case for case, _ in missing], say)
        for done, (case, due) in enumerate(missing):
            if done and choice.seconds is not None and time.monotonic() - started > choice.seconds:
                say(f"stopped after {choice.seconds:g} s: {len(missing) - done} cases are left")
                break
            began, found = time.monotonic(), list[Cell]()
            place = f"{done + 1}/{len(missing)} {case.name}"
            measure = self._spawned if case.ranks > 1 else self.measured
            try:
                for cell in measure(suite, case, due, say):
                    append(path, [cell])
                    found.append(cell)
            except Absent as why:
                say(f"{place}: left, since {why.message}")
                continue
            say(f"{place}: {_ratios(found)} ({time.monotonic() - began:.1f} s)")
        return path

    def _holds(self, cell: Cell | None, again: bool) -> bool:
        """Tell whether a cell need not be measured."""
        about = self.about
        if cell is None or cell.machine != about.machine:
            return False
        return not again or cell.commit == about.commit

    def measured(self, suite: Suite, case: Case, choice: Choice, say: Say) -> Iterator[Cell]:
        """Check a case's contenders once; time them in each regime."""
        wanted = _wanted(case, choice)
        torch.compiler.reset()  # a function is compiled eight times in a process, then not again
        setup = case.make(self.device, self.shrink)
        calls: dict[str, Call] = {}
        facts: dict[str, JsonObject] = {}
        base: dict[str, float] = {}
        for name in sorted(wanted, key=lambda name: name != BASE):
            try:
                contender, facts[name] = self._checked(setup, name, base)
                if self.device == "cuda" and case.regimes:
                    facts[name]["peak_mib"] = peak_mib(contender.call)
                calls[name] = contender.call
            except Exception as fault:  # foreign code: anything may come out of it
                if "CUDA error" in str(fault):
                    hint = "leave it out by --contender, and begin a new process"
                    raise MachineError(f"{case.name}: {name}: {_line(fault)}", hint=hint) from fault
                facts[name] = {"absent": _line(fault)}
        del setup
        for regime in _regimes(case, suite, choice):
            samples: Mapping[str, Samples] = {}
            if regime != UNTIMED:
                samples = self.clocks[regime](calls, suite.rounds, self.device)
            for name in wanted:
                timing = _timing(name, samples) if name in samples else {}
                if fault := timing.pop("fault", ""):
                    say(f"{case.name}: {name}, {regime}: not kept: {fault}")
                    continue
                where = {"suite": suite.name, "case": case.name, "contender": name}
                yield Cell(**self.about.model_dump(), **where, regime=regime,
                           **facts[name], **timing)  # fmt: skip
        del calls
        if self.device == "cuda":
            torch.cuda.empty_cache()

    def _checked(
        self, setup: Setup, name: str, base: dict[str, float]
    ) -> tuple[Contender, JsonObject]:
        """Build a contender, and compare it with the truth.

        Args:
            base: The errors of `BASE`, which goes first and is written there.

        Raises:
            Absent: it computes something else.
        """
        if "compile" in name and self.device != "cuda":
            raise Absent("needs a GPU")
        with fallbacks() as left:
            contender = setup.makers[name]()
            errors = setup.errors(contender.checked())
            contender.call(1)  # what fails on other inputs fails here, not while others are timed
        found: JsonObject = {}
        if errors:
            worst = max(errors.values())
            if worst > (math.inf if name == BASE else setup.limit) or math.isinf(worst):
                raise Absent(f"computes something else: error {worst:.1e}")
            found["error"] = float(f"{worst:.3g}")
            base.update(errors if name == BASE else {})
            over = [error / max(base[o], _HALF_ULP) for o, error in errors.items() if o in base]
            found |= {"error_ratio": round(max(over), 3)} if over else {}
        notes = [contender.note(), *(left if "compile" in name else ())]
        found["note"] = "; ".join(dict.fromkeys(filter(None, notes)))[:400]
        return contender, found

    def _spawned(self, suite: Suite, case: Case, choice: Choice, say: Say) -> Iterator[Cell]:
        """Measure in as many processes as ranks; the first one's cells."""
        from torch.multiprocessing.spawn import ProcessException, spawn

        if self.device == "cuda" and (there := torch.cuda.device_count()) < case.ranks:
            raise Absent(f"it needs {case.ranks} GPUs, and this machine has {there}")
        with TemporaryDirectory() as folder:
            settings = self.root, self.about, self.device, self.shrink
            try:
                spawn(_rank, (folder, settings, suite.name, case.name, choice), nprocs=case.ranks)
            except ProcessException as fault:
                line = str(fault).strip().splitlines()[-1].strip()
                raise CodaError(f"a process of {case.name} failed: {line}") from fault
            yield from read(Path(folder) / "cells", Cell).values()


def _rank(rank: int, folder: str, settings: Any, suite: str, case: str, choice: Choice) -> None:
    import torch.distributed as dist

    from coda_agent.evals.benchmarks import load

    leave_with_parent()
    bench = Bench(*settings)
    whole = load(suite, bench.root)
    one = next(found for found in whole.cases if found.name == case)
    backend = "nccl" if bench.device == "cuda" else "gloo"
    if bench.device == "cuda":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, f"file://{folder}/store", rank=rank, world_size=one.ranks)
    try:
        cells = [*bench.measured(whole, one, choice, lambda _: None)]
        every: list[Any] = [None] * one.ranks
        dist.all_gather_object(every, [cell.peak_mib for cell in cells])
        if rank == 0:
            peaks = [max(p) if None not in p else None for p in zip(*every, strict=True)]
            most = (c.model_copy(update={"peak_mib": p}) for c, p in zip(cells, peaks, strict=True))
            append(Path(folder) / "cells", most)
        dist.barrier()
    finally:
        dist.destroy_process_group()


def chosen(suite: Suite, choice: Choice) -> list[Case]:
    """List the cases of a choice.

    Raises:
        CodaError: no case, contender or regime is called so.
    """

    def holds(case: Case, words: str) -> bool:
        return f" {words} " in f" {case.name} "

    for words in choice.cases:
        if not any(holds(case, words) for case in suite.cases):
            _check("case", words, [case.name for case in suite.cases])
    cases = [c for c in suite.cases if not choice.cases or any(holds(c, w) for w in choice.cases)]
    for name in choice.contenders:
        _check("contender", name, {n for case in suite.cases for n in case.contenders})
    for regime in choice.regimes:
        _check("regime", regime, [*CLOCKS, UNTIMED])
    return cases


def _compile(cases: Sequence[Case], say: Say) -> None:
    """Compile cases' kernels side by side: alone each takes 3 s."""
    started = time.monotonic()
    jobs = [case.job() for case in cases if case.job]
    jobs = [*{(job.program.digest, job.config): job for job in jobs}.values()]
    if jobs:
        execution.executor().map(jobs, lambda *_: None)
        say(f"{len(jobs)} kernels compiled in {time.monotonic() - started:.0f} s")


def _check(what: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise CodaError(f"no {what} {name!r}", hint=near_matches(name, known))


def _wanted(case: Case, choice: Choice) -> list[str]:
    """List who takes part in a case, of installed libraries alone."""
    always = {OURS, BASE, *choice.contenders}
    return [
        name
        for name in case.contenders
        if (not choice.contenders or name in always)
        and (name not in MODULES or find_spec(MODULES[name]))
    ]


def _regimes(case: Case, suite: Suite, choice: Choice) -> Sequence[str]:
    """List the regimes asked for that the case can be timed in."""
    asked = choice.regimes or suite.regimes
    if not case.regimes or UNTIMED in asked:
        return (UNTIMED,)
    return [regime for regime in asked if regime in case.regimes] or case.regimes[:1]


def _timing(name: str, samples: Mapping[str, Samples]) -> JsonObject:
    """Time a contender by its samples; `fault` where there are none."""
    own, ours = samples[name], samples.get(OURS)
    if own.fault:
        return {"fault": own.fault}
    timing = own.timing()
    found: JsonObject = {"time_us": timing.median_us, "interval_us": timing.interval_us}
    if ours and not ours.fault:
        try:
            ratio = speedup(ours, own)
        except MachineError as error:
            return {"fault": error.message}
        found |= {"ratio": ratio.ratio, "ratio_interval": (ratio.low, ratio.high)}
    return found


def _ratios(cells: Sequence[Cell]) -> str:
    """Say what was measured, in a line."""
    shown = []
    for cell in cells:
        if cell.absent:
            shown.append(f"{cell.contender} absent: {cell.absent}")
        elif cell.contender != OURS and cell.ratio:
            shown.append(f"over {cell.contender} {cell.ratio:.3f} {cell.regime}")
        elif cell.contender == OURS and cell.error_ratio:
            shown.append(f"error {cell.error_ratio:.2f} of {BASE}")
    return ", ".join(dict.fromkeys(shown)) or "measured"


def _line(fault: Exception) -> str:
    """Say why a contender takes no part."""
    if isinstance(fault, Absent):
        return fault.message
    what = "not installed" if isinstance(fault, ImportError) else type(fault).__name__
    return f"{what}: {(str(fault).strip().splitlines() or [''])[0]}"[:200]


def peak_mib(call: Call) -> int:
    """Measure the MiB that a call takes beyond what was there."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call(0)
    torch.cuda.synchronize()
    return round((torch.cuda.max_memory_allocated() - before) / 2**20)


@contextmanager
def fallbacks() -> Iterator[list[str]]:
    """Collect what torch.compile left as it was, and why.

    That is a graph that breaks, a frame it gives up on, a kernel of which it assumes the worst.
    """
    from torch._dynamo.utils import counters

    counters["graph_break"].clear()
    said = list[str]()

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            fault = (record.exc_info or (None, None))[1]
            because = f" ({type(fault).__name__})" if fault else ""
            said.append(f"{record.getMessage().splitlines()[0][:150]}{because}")

    listener = Listener(logging.WARNING)
    loggers = [logging.getLogger(f"torch.{n}") for n in ("_dynamo", "_higher_order_ops")]
    for logger in loggers:
        logger.addHandler(listener)
    try:
        yield said
    finally:
        for logger in loggers:
            logger.removeHandler(listener)
        said += [f"graph break: {why.splitlines()[0][:150]}" for why in counters["graph_break"]]
