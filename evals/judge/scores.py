"""The judge's scores: run, and kept as records.

A cell is kept as soon as it is known, in evals/results/judge-<score>-<device>.jsonl. A run that was
interrupted goes on where it stopped, as long as commit and seed are the same.
"""

from __future__ import annotations

import itertools
import re
import secrets
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from coda_agent.agent import execution
from coda_agent.agent.judge.compile_gate import check_signature
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.meaning import meaning_fault
from coda_agent.agent.judge.numerics import TileCheck
from coda_agent.agent.judge.oracle import Case, make_cases
from coda_agent.agent.judge.records import VERSIONS, Finding, JsonObject
from coda_agent.agent.judge.runners import run_interpreter, run_kernel
from coda_agent.agent.judge.variant import Variant
from coda_agent.evals.cells import FOLDER, Judged, Record, append, read
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.mutants import Mutant, equivalent
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.tiles import DEFAULT_CONFIGS

if TYPE_CHECKING:
    from coda_agent.agent.judge.runners import Runner

Say = Callable[[int, int, str], None]


class Score(Judged):
    """What the judge said of one case, as the score's function says.

    Attributes:
        seed: What inputs, and mutants, were drawn from; 0 where each trial draws its own.
    """

    case: str
    seed: int = 0
    cell: JsonObject

    @property
    def key(self) -> tuple[str]:
        return (self.case,)


class Judge:
    """The scored gates, in a spec's first type and default tile."""

    def __init__(self, root: Path, device: str, say: Say = lambda *_: None) -> None:
        if device == "cuda":
            use_cache()
        self.root, self.device, self.say = root, device, say
        self.run: Runner = run_kernel if device == "cuda" else run_interpreter
        self._cases: dict[object, Iterable[Case]] = {}

    def signature(self, subject: Subject) -> list[str]:
        """List faults of a spec's programs against its declarations."""
        return [f.message for f in check_signature(subject.spec, {**subject.programs})]

    def numerics(self, subject: Subject, run: Runner, seed: int) -> Finding | None:
        """Find a program's first fault, run by `run`."""
        spec, program, binding = subject.spec, subject.program, subject.binding
        if fault := meaning_fault(spec, program, binding, seed):
            return fault[0]
        element, config = spec.elements[0], DEFAULT_CONFIGS["sm_90a"]
        key = spec.digest, subject.variant, seed
        if key not in self._cases:  # they take most of the gate's time: kept for the next program
            self._cases = {key: make_cases(spec, binding, element, self.device, seed)}
        cases, self._cases[key] = itertools.tee(self._cases[key])
        variant = Variant(spec, program, binding)
        return TileCheck(variant, element, config, run, seed).fault(cases, full=True)

    def compile(self, subjects: Iterable[Subject]) -> None:
        """Compile programs for this device by the pool, on all cores."""
        if self.device == "cuda":
            different = {s.program.digest: s for s in subjects}.values()
            config = DEFAULT_CONFIGS["sm_90a"]
            jobs = [
                CompileJob.of(s.program, config, "sm_90a", s.spec, s.spec.elements[0])
                for s in different
            ]
            execution.executor().map(jobs, lambda done, _: self.say(done, len(jobs), "compile"))


def trial(judge: Judge, mutant: Mutant, *, seed: int) -> JsonObject:
    """Judge a mutant: "signature", "numerics", "survived" or "equivalent"."""
    cell: JsonObject = {"operator": mutant.operator, "lowered": mutant.lowered}
    # A demonstration's spec has the inputs of its other programs too: no fault of a mutant.
    if set(judge.signature(mutant.wrong)) - set(judge.signature(mutant.right)):
        return {**cell, "layer": "signature"}
    found = judge.numerics(mutant.wrong, mutant.runner(judge.run), seed)
    if found is None:
        return {**cell, "layer": "equivalent" if equivalent(mutant, judge.device) else "survived"}
    cell["layer"] = "numerics"
    if mutant.faults and (fault := found.where.get("fault")):
        cell |= {"expected": mutant.faults, "fault": fault}
        said = found.message.rpartition("; ")[2]
        vague = fault in mutant.faults and not re.search(mutant.says, said)
        cell |= {"vague": True} if vague else {}
        cell |= {"said": found.message} if vague or fault not in mutant.faults else {}
    return cell


def score_mutants(judge: Judge, name: str, chosen: list[Mutant], *, seed: int) -> dict[str, Score]:
    """Judge mutants; cells are as `trial` gives them."""
    judge.compile(subject for m in chosen for subject in (m.right, m.wrong))
    jobs = {m.name: lambda m=m: trial(judge, m, seed=seed) for m in chosen}
    return recorded(judge, name, jobs, seed=seed)


def score_corpus(judge: Judge, corpus: list[Subject], *, repeat: int) -> dict[str, Score]:
    """Judge right programs with several fresh seeds, a cell a spec.

    Programs of one spec follow each other with equal seeds: they share their cases. A cell has the
    "programs", how many "trials", and what was said of the "refused".
    """

    def one(right: Subject, seed: int) -> list[str]:
        said = [] if right.name.startswith("demonstration") else judge.signature(right)
        fault = judge.numerics(right, judge.run, seed)
        return [f"{right.name}: {line}" for line in (*said, *([fault.message] if fault else []))]

    def spec(programs: list[Subject]) -> JsonObject:
        seeds = [secrets.randbits(32) for _ in range(repeat)]
        refused = [line for seed in seeds for right in programs for line in one(right, seed)]
        names = [right.name for right in programs]
        return {"programs": names, "trials": repeat * len(programs), "refused": refused}

    judge.compile(corpus)
    groups: dict[str, list[Subject]] = {}
    for right in corpus:
        groups.setdefault(right.name.partition(":")[0], []).append(right)
    return recorded(judge, "corpus", {n: lambda x=x: spec(x) for n, x in groups.items()})


def recorded(
    judge: Judge, name: str, jobs: Mapping[str, Callable[[], JsonObject]], *, seed: int = 0
) -> dict[str, Score]:
    """Run jobs that the record lacks, by versions and seed; all cells."""
    path = judge.root / FOLDER / f"judge-{name}-{judge.device}.jsonl"
    known = {score.case: score for score in read(path, Score).values()}
    about, found = Record.now(judge.device), dict[str, Score]()
    versions = {gate: VERSIONS[gate] for gate in ("compile", "numerics")}
    for done, (case, job) in enumerate(jobs.items(), 1):
        judge.say(done, len(jobs), case)
        score = known.get(case)
        if score is None or (score.versions, score.seed) != (versions, seed):
            score = Score(**about.model_dump(), versions=versions, case=case, seed=seed, cell=job())
            append(path, [score])
        found[case] = score
    return found
