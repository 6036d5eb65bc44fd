"""The judge: four gates in order, the first failure ends the trial. An author cannot touch it."""

from __future__ import annotations

import secrets
import time
from collections.abc import Collection, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.executor import Executor, usable
from coda_agent.agent.judge.job import (
    CallJob,
    Job,
    NumericsJob,
    PerformanceJob,
    PrepareJob,
    SanitizeJob,
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
    Level,
    NumericsReport,
    Observer,
    Outcome,
    Progress,
    Survey,
    Tool,
    Tuned,
)
from coda_agent.agent.judge.verdict import GateResult, Verdict
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.specs import Spec

if TYPE_CHECKING:
    from coda_agent.agent.judge.machine import Gpu
    from coda_agent.primitives.program import Program

__all__ = ["Finding", "GateResult", "Level", "Observer", "Verdict", "judge_candidate"]

NO_GPU = "needs a Hopper GPU"
_DEFAULT = DEFAULT_CONFIGS["sm_90a"]
# What the interpreter reduces in: a block that divides the common shapes, and one that leaves a
# ragged block.
_INTERPRETED = (TileConfig(128, 128, 2, 1, True), TileConfig(128, 192, 2, 1, True))


def judge_candidate(
    spec: Spec,
    text: str,
    executor: Executor,
    *,
    device: str = "auto",
    gates: tuple[str, ...] = GATES,
    observer: Observer = lambda *_: None,
    types: list[str] | None = None,
    tiles: Collection[TileConfig] | None = None,
    known: JsonObject | None = None,
    seed: int | None = None,
) -> Verdict:
    """Judge a candidate's text against a spec.

    Args:
        spec: The spec.
        text: The candidate, a complete kernel.py.
        executor: What carries out the gates' jobs.
        device: "auto" uses a Hopper GPU where there is one; "cuda" demands it; "cpu" interprets.
        gates: Which gates to run, of `GATES` and `SANITIZERS` and in that order; "static" always
            runs, and the other gates a gate needs have to be asked for.
        observer: Told of each gate's start, progress and end.
        types: Element types to check; all the spec declares by default.
        tiles: Configurations to try on a GPU; by default all that suit.
        known: The kernel's tuned.json. A configuration in it stays unless one is surely faster.
        seed: What all draws follow from; a secret one by default.

    Returns:
        The verdict; passed when no gate that ran found a fault.

    Raises:
        MachineError: `device` is "cuda" and no Hopper GPU is usable.
    """
    # What may be stored has to compile for newer architectures, too.
    whole = set(GATES) <= set(gates)
    walk = _Walk(
        spec, text, executor, usable(executor, device), observer, types or spec.elements, tiles,
        known or {}, whole, seed=secrets.randbits(62) if seed is None else seed,
    )  # fmt: skip
    walk.through(gates)
    return walk.verdict()


def tune_candidate(
    spec: Spec,
    text: str,
    executor: Executor,
    *,
    observer: Observer = lambda *_: None,
    tiles: Collection[TileConfig] | None = None,
) -> dict[str, Tuned]:
    """The fastest right configurations of the default program at the spec's bench shapes, for each
    element type; of `tiles`, or of all that suit.

    Returns:
        What tuned.json holds: GPU name to dtype of A to one line a shape.

    Raises:
        MachineError: no Hopper GPU is usable.
        CompileError: the program does not compile, or is wrong in every configuration at a shape.
    """
    gpu = usable(executor, "cuda")
    walk = _Walk(spec, text, executor, gpu, observer, spec.elements, tiles)
    walk.measure("tune")
    return walk.tuned or {}


def survey_candidate(
    spec: Spec, text: str, executor: Executor, *, observer: Observer = lambda *_: None
) -> Survey:
    """Times of the default program's right configurations at the spec's bench shapes, in the first
    element type.

    Raises:
        MachineError: no Hopper GPU is usable.
        CompileError: the program does not compile.
    """
    walk = _Walk(spec, text, executor, usable(executor, "cuda"), observer, spec.elements[:1])
    walk.measure("survey")
    assert walk.surveyed is not None
    return walk.surveyed


_Early = tuple[list[Finding], Outcome[NumericsReport] | None, float]


@dataclass
class _Walk:
    """One candidate on its way through the gates."""

    spec: Spec
    text: str
    executor: Executor
    gpu: Gpu | None
    observer: Observer
    types: Sequence[str]
    tiles: Collection[TileConfig] | None = None
    known: JsonObject = field(default_factory=dict[str, Any])
    whole: bool = False
    results: list[GateResult] = field(default_factory=list[GateResult])
    programs: dict[str, Program] = field(default_factory=dict[str, "Program"])
    admitted: dict[Key, tuple[TileConfig, ...]] = field(default_factory=dict[Any, Any])
    tuned: dict[str, Tuned] | None = None
    surveyed: Survey | None = None
    early: bool = False
    begun: Future[_Early] | None = None
    tuning: bool = False
    seed: int | None = None

    def measure(self, step: str) -> None:
        """Only as far as a kernel's times need it, of the default program alone."""
        self.tuning = True
        self.through(("static", "compile", step))
        if findings := self.results[-1].findings:
            raise CompileError(findings[0].message, hint=findings[0].hint)

    def through(self, gates: tuple[str, ...]) -> None:
        self.early = "numerics" in gates
        if "compile" in gates:
            gpu = self.gpu is not None and bool(set(gates) - {"static", "compile"})
            ahead = self._ahead() if gpu and "performance" in gates else None
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
            if self.begun:
                # Left behind, it would compute beside the next walk; and two threads that parse at
                # once make CPython 3.11 raise SystemError.
                wait([self.begun])

    def _ahead(self) -> PrepareJob:
        """What the GPU can do while the candidate is compiled."""
        name, *_ = self._variants()
        return PrepareJob(
            spec=self.spec, programs={}, tiles={(name, element): () for element in self.types}
        )

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

    def _variants(self) -> list[str]:
        return [self.spec.variant(b) for b in self.spec.bindings()]

    def _compile(self, result: GateResult) -> None:
        from coda_agent.agent.judge import compile_gate
        from coda_agent.agent.judge.instructions import check_instructions

        result.findings = compile_gate.check_signature(self.spec, self.programs)
        result.findings += check_instructions(self.programs)
        if result.findings:
            return
        # Compiling is done by other processes.
        if self.early:
            self.begun = ThreadPoolExecutor(1).submit(self._without_kernels)
        m, n, k = self.spec.gemm_dims
        shapes = [(s[m], s[n], s[k]) for s in self.spec.bench_shapes]
        if self.whole:
            shapes += [(1, *s[1:]) for s in shapes[:1]]  # a call may have few rows
        jobs = compile_gate.jobs_for(
            self.spec,
            self.programs,
            self.types,
            newer=self.whole,
            shapes=shapes if self.gpu else None,
            among=self.tiles,
        )
        if self.tuning:
            jobs = [job for job in jobs if job.program.name == self._variants()[0]]
        result.findings, kernels = compile_gate.compile_all(
            self.executor, jobs, self._progress("compile")
        )
        digests = {name: program.digest for name, program in sorted(self.programs.items())}
        result.data = CompileReport(kernels=tuple(kernels), programs=digests)
        reported = [job for job in jobs if not job.again]
        for job, kernel in zip(reported, kernels, strict=True):
            if job.arch == "sm_90a" and kernel.error is None:
                key = job.program.name, job.element
                self.admitted[key] = (*self.admitted.get(key, ()), job.config)

    def _without_kernels(self) -> _Early:
        """What of the numerics gate needs nothing compiled, and its seconds: meaning, and all of it
        without a GPU.

        Meaning comes first: it says more of a wrong program than what it rounds to.
        """
        from coda_agent.agent.judge.meaning import check_meaning

        start, outcome = time.monotonic(), None
        findings = check_meaning(self.spec, self.programs, seed=self.seed)
        if not findings and self.gpu is None:
            outcome = self._interpreted()
        return findings, outcome, time.monotonic() - start

    def _interpreted(self) -> Outcome[NumericsReport]:
        keys = [(name, element) for name in self._variants() for element in self.types]
        tiles = dict.fromkeys(keys, _INTERPRETED)
        job = NumericsJob(
            spec=self.spec, programs=self.programs, tiles=tiles, device="cpu", seed=self.seed
        )
        return self.executor.grade(job, lambda *_: None)

    def _numerics(self, result: GateResult) -> None:
        start = time.monotonic()
        early = self.begun.result() if self.begun else self._without_kernels()
        result.findings, outcome, took = early
        if self.gpu is None or result.findings:  # else the seconds are the GPU's
            # What ran beside compiling is this gate's time all the same.
            result.seconds = took - (time.monotonic() - start)
        if result.findings:
            return
        if outcome is None:
            job = NumericsJob(
                spec=self.spec, programs=self.programs, tiles=self.admitted, seed=self.seed
            )
            outcome = self.executor.grade(job, self._progress(result.name))
        result.findings, result.data = [*outcome.findings], outcome.report
        self.admitted = dict(outcome.admitted)
        self._call(result)

    def _performance(self, result: GateResult) -> None:
        if self.gpu is None:
            result.skipped = NO_GPU
            return
        job = PerformanceJob(
            spec=self.spec, programs=self.programs, tiles=self.admitted,
            known=self.known.get(self.gpu.name, {}),
        )  # fmt: skip
        self.tuned = {self.gpu.name: self._graded(job, result).tuned}
        self._call(result)

    def _tune(self, result: GateResult) -> None:
        assert self.gpu is not None
        job = TuneJob(spec=self.spec, programs=self.programs, tiles=self.admitted)
        self.tuned = {self.gpu.name: self._graded(job, result).tuned}

    def _survey(self, result: GateResult) -> None:
        job = SurveyJob(spec=self.spec, programs=self.programs, tiles=self.admitted)
        self.surveyed = self._graded(job, result).survey

    def _graded(self, job: Job[Any], result: GateResult) -> Outcome[Any]:
        """The outcome of a gate's job, with its findings and report in the gate's result."""
        outcome = self.executor.grade(job, self._progress(result.name))
        result.findings, result.data = [*outcome.findings], outcome.report or result.data
        return outcome

    def _call(self, result: GateResult) -> None:
        """Call the function that a user would import, after all else that the gate found right."""
        if result.findings or (self.tiles is not None and _DEFAULT not in self.tiles):
            return
        # Where no tile was measured, the default one is dispatched.
        tiles = {key: (*dict.fromkeys([*kept, _DEFAULT]),) for key, kept in self.admitted.items()}
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
        tiles = {(name, self.types[0]): (_DEFAULT,) for name in self._variants()}
        job = SanitizeJob(spec=self.spec, programs=self.programs, tiles=tiles, tool=tool)
        self._graded(job, result)

    def verdict(self) -> Verdict:
        from coda_agent.agent.judge import compile_gate
        from coda_agent.agent.judge.provenance import digests

        passed = all(r.passed for r in self.results)
        ran = {r.name for r in self.results if r.skipped is None and r.passed}
        level: Level | None = None
        if passed and {"compile", "numerics"} <= ran:
            level = "proved"
            if self.gpu is not None:
                level = "accepted" if "performance" in ran else "verified"
        missing = []
        if self.gpu is None:
            missing = [
                "numerics of the compiled kernels: no Hopper GPU here, the interpreter stood in "
                "for them",
                "performance: no Hopper GPU here",
            ]
        elif "performance" in ran and len(self._variants()) > 1:
            _, *others = self._variants()
            missing = [f"performance of {', '.join(others)} at every shape and type: timed at one"]
        if "compile" in ran and not self.whole:
            newer = " and ".join(compile_gate.NEWER)
            missing.append(f"that it compiles for {newer}: `coda-agent generate` shows it")
        return Verdict(
            passed=passed,
            level=level,
            gates=self.results,
            tuned=self.tuned,
            environment=self.executor.environment("cuda" if self.gpu else "cpu"),
            digests=digests(self.spec, self.text),
            not_shown=missing,
        )
