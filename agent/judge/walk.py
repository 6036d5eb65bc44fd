"""One candidate on its way through the judge's gates."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import product
from typing import TYPE_CHECKING, Any, Literal

from coda_agent.agent.judge import compile_gate
from coda_agent.agent.judge.executor import Executor, usable
from coda_agent.agent.judge.instructions import check_instructions
from coda_agent.agent.judge.job import (
    CallJob,
    CompileJob,
    Job,
    NumericsJob,
    PerformanceJob,
    PrepareJob,
    SurveyJob,
    TuneJob,
)
from coda_agent.agent.judge.records import (
    GATES,
    SANITIZERS,
    VERSIONS,
    CompileReport,
    Finding,
    JsonObject,
    Key,
    NumericsReport,
    Observer,
    Outcome,
    Progress,
    Survey,
    Tiles,
    Tool,
    Tuned,
)
from coda_agent.agent.judge.verdict import GateResult
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.specs import Spec

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program

NO_GPU = "needs a Hopper GPU"
_DEFAULT = DEFAULT_CONFIGS["sm_90a"]
# What the interpreter reduces in: a block that divides the common shapes, and one that leaves a
# ragged block.
_INTERPRETED = (TileConfig(128, 128, 2, 1, True), TileConfig(128, 192, 2, 1, True))

_Early = tuple[list[Finding], Outcome[NumericsReport] | None, float]


@dataclass(frozen=True)
class Terms:
    """What a candidate is judged by.

    Attributes:
        device: "auto" uses a Hopper GPU where there is one; "cuda" demands it; "cpu" interprets.
        gates: Which gates to run, of `GATES` and `SANITIZERS` and in that order; "static" always
            runs, and the other gates a gate needs have to be asked for.
        types: Element types to check; all the spec declares by default.
        tiles: Configurations to try on a GPU; by default all that suit.
        known: The kernel's tuned.json. A configuration in it stays unless one is surely faster.
        seed: What all draws follow from; a secret one by default.
    """

    device: str = "auto"
    gates: tuple[str, ...] = GATES
    types: Sequence[str] | None = None
    tiles: Collection[TileConfig] | None = None
    known: JsonObject | None = None
    seed: int | None = None

    @property
    def whole(self) -> bool:
        """Whether all usual gates run, so that it may be stored."""
        return set(GATES) <= set(self.gates)


class Walk:
    """One candidate on its way through the gates.

    Raises:
        MachineError: the terms demand a Hopper GPU, and none is usable.

    Attributes:
        results: Of each gate that ran.
        programs: The candidate's, by variant name.
        tuned: What tuned.json will hold.
        surveyed: Times over shapes, where a survey was asked for.
    """

    def __init__(
        self, spec: Spec, text: str, executor: Executor, terms: Terms, observer: Observer
    ) -> None:
        self.spec, self.text, self.executor, self.terms = spec, text, executor, terms
        self.observer, self.gpu = observer, usable(executor, terms.device)
        self.types = terms.types or spec.elements
        self.variants = [spec.variant(b) for b in spec.bindings()]
        self.seed = secrets.randbits(62) if terms.seed is None else terms.seed
        self.results: list[GateResult] = []
        self.programs: dict[str, Program] = {}
        self.tuned: dict[str, Tuned] | None = None
        self.surveyed: Survey | None = None
        self._admitted: dict[Key, tuple[TileConfig, ...]] = {}
        self._begun: Future[_Early] | None = None
        self._approximated: dict[str, float] = {}

    def through(self) -> None:
        """Pass the gates in order, until one finds a fault."""
        gates = self.terms.gates
        if "compile" in gates:
            gpu = self.gpu is not None and bool(set(gates) - {"static", "compile"})
            ahead = None
            if gpu and "performance" in gates:  # done while the candidate is compiled
                ahead = PrepareJob(spec=self.spec, programs={}, tiles={}, types=tuple(self.types))
            self.executor.start(gpu=gpu, ahead=ahead)
        steps = {
            "static": self._static,
            "compile": self._compile,
            "numerics": self._numerics,
            "performance": self._performance,
            "tune": self._tune,
            "survey": self._survey,
            **{tool: partial(self._sanitized, tool=tool) for tool in SANITIZERS},
        }
        try:
            for name, step in steps.items():
                if name not in gates and name != "static":
                    continue
                with self._gate(name) as result:
                    step(result)
                if not result.passed:
                    break
        finally:
            if self._begun:
                # Left behind, it would compute beside the next walk; and two threads that parse at
                # once make CPython 3.11 raise SystemError.
                wait([self._begun])

    @contextmanager
    def _gate(self, name: str) -> Iterator[GateResult]:
        self.observer("gate.started", {"gate": name})
        start = time.monotonic()
        result = GateResult(name=name, passed=True, version=VERSIONS.get(name, 0))
        yield result
        result.passed = not result.findings
        result.seconds = round(result.seconds + time.monotonic() - start, 3)
        self.results.append(result)
        self.observer(
            "gate.finished", {**result.model_dump(exclude={"data", "name"}), "gate": name}
        )

    def _progress(self, gate: str) -> Progress:
        def tell(done: int, total: int, note: str) -> None:
            self.observer(
                "gate.progress", {"gate": gate, "done": done, "total": total, "note": note}
            )

        return tell

    def _static(self, result: GateResult) -> None:
        from coda_agent.agent.judge.static import read_candidate

        self.programs, result.findings = read_candidate(self.spec, self.text)

    def _compile(self, result: GateResult) -> None:
        result.findings = compile_gate.check_signature(self.spec, self.programs)
        result.findings += check_instructions(self.programs)
        if result.findings:
            return
        # Compiling is done by other processes.
        if "numerics" in self.terms.gates:
            self._begun = ThreadPoolExecutor(1).submit(self._without_kernels)
        jobs = _compile_jobs(self)
        result.findings, kernels = compile_gate.compile_all(
            self.executor, jobs, self._progress("compile")
        )
        digests = {name: program.digest for name, program in sorted(self.programs.items())}
        result.data = CompileReport(kernels=tuple(kernels), programs=digests)
        reported = [job for job in jobs if not job.again]
        for job, kernel in zip(reported, kernels, strict=True):
            if job.arch == "sm_90a" and kernel.error is None:
                key = job.program.name, job.element
                self._admitted[key] = (*self._admitted.get(key, ()), job.config)

    def _without_kernels(self) -> _Early:
        """Do what of the numerics gate needs nothing compiled, and time it.

        Meaning comes first: it says more of a wrong program than what it rounds to.
        """
        from coda_agent.agent.judge.meaning import check_meaning

        start, outcome = time.monotonic(), None
        findings = check_meaning(
            self.spec, self.programs, seed=self.seed, approximated=self._approximated
        )
        if not findings and self.gpu is None:
            keys = product(self.variants, self.types)
            outcome = self._rounded(dict.fromkeys(keys, _INTERPRETED), "cpu", lambda *_: None)
        return findings, outcome, time.monotonic() - start

    def _rounded(
        self, tiles: Tiles, device: Literal["cuda", "cpu"], progress: Progress
    ) -> Outcome[NumericsReport]:
        job = NumericsJob(
            spec=self.spec, programs=self.programs, tiles=tiles, device=device, seed=self.seed,
            approximated=self._approximated,
        )  # fmt: skip
        return self.executor.grade(job, progress)

    def _numerics(self, result: GateResult) -> None:
        start = time.monotonic()
        early = self._begun.result() if self._begun else self._without_kernels()
        result.findings, outcome, took = early
        if self.gpu is None or result.findings:  # else the seconds are the GPU's
            # What ran beside compiling is this gate's time all the same.
            result.seconds = took - (time.monotonic() - start)
        if result.findings:
            return
        if outcome is None:
            outcome = self._rounded(self._admitted, "cuda", self._progress(result.name))
        result.findings, result.data = [*outcome.findings], outcome.report
        self._admitted = dict(outcome.admitted)
        self._call(result)

    def _performance(self, result: GateResult) -> None:
        if self.gpu is None:
            result.skipped = NO_GPU
            return
        job = PerformanceJob(
            spec=self.spec, programs=self.programs, tiles=self._admitted,
            known=(self.terms.known or {}).get(self.gpu.name, {}),
        )  # fmt: skip
        self.tuned = {self.gpu.name: self._graded(job, result).tuned}
        self._call(result)

    def _tune(self, result: GateResult) -> None:
        assert self.gpu is not None
        job = TuneJob(spec=self.spec, programs=self.programs, tiles=self._admitted)
        self.tuned = {self.gpu.name: self._graded(job, result).tuned}

    def _survey(self, result: GateResult) -> None:
        job = SurveyJob(spec=self.spec, programs=self.programs, tiles=self._admitted)
        self.surveyed = self._graded(job, result).survey

    def _graded(self, job: Job[Any], result: GateResult) -> Outcome[Any]:
        """Carry out a gate's job; its result gets findings and report."""
        outcome = self.executor.grade(job, self._progress(result.name))
        result.findings, result.data = [*outcome.findings], outcome.report or result.data
        return outcome

    def _call(self, result: GateResult) -> None:
        """Call the function that a user would import."""
        if result.findings or (self.terms.tiles is not None and _DEFAULT not in self.terms.tiles):
            return
        # Where no tile was measured, the default one is dispatched.
        tiles = {key: (*dict.fromkeys([*kept, _DEFAULT]),) for key, kept in self._admitted.items()}
        refused = {tile.tile for r in (*self.results, result) for tile in r.refused_tiles}
        job = CallJob(
            spec=self.spec, programs=self.programs, tiles=tiles,
            device="cpu" if self.gpu is None else "cuda",
            tuned=self.tuned or {}, refused=tuple(sorted(refused)), seed=self.seed,
        )  # fmt: skip
        self._graded(job, result)

    def _sanitized(self, result: GateResult, tool: Tool) -> None:
        if self.gpu is None:
            result.skipped = NO_GPU
            return
        tiles = {(name, self.types[0]): (_DEFAULT,) for name in self.variants}
        job = NumericsJob(
            spec=self.spec, programs=self.programs, tiles=tiles, tool=tool, seed=self.seed
        )
        self._graded(job, result)


def _compile_jobs(walk: Walk) -> list[CompileJob]:
    """List what has to compile of a candidate, for a walk's terms."""
    m, n, k = walk.spec.gemm_dims
    shapes = [(s[m], s[n], s[k]) for s in walk.spec.bench_shapes]
    if walk.terms.whole:
        shapes += [(1, *s[1:]) for s in shapes[:1]]  # a call may have few rows
    jobs = compile_gate.jobs_for(
        walk.spec,
        walk.programs,
        walk.types,
        newer=walk.terms.whole,
        shapes=shapes if walk.gpu else None,
        among=walk.terms.tiles,
    )
    if {"tune", "survey"} & {*walk.terms.gates}:  # only the default program's times are due
        jobs = [job for job in jobs if job.program.name == walk.variants[0]]
    return jobs
