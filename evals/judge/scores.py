"""The judge's scores: run and kept as records, which `report.py` writes as docs/judge.md.

A record is written as it grows. A run that was interrupted goes on where it stopped, as long as the
rules mean the same.
"""

from __future__ import annotations

import itertools
import json
import math
import os
import random
import re
import time
from collections.abc import Callable, Iterable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent import execution
from coda_agent.agent.execution.environment import environment
from coda_agent.agent.judge.compile_gate import check_signature
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.meaning import meaning_fault
from coda_agent.agent.judge.numerics import TileCheck
from coda_agent.agent.judge.oracle import make_cases
from coda_agent.agent.judge.records import Finding
from coda_agent.agent.judge.runners import run_interpreter, run_kernel
from coda_agent.evals import contenders
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.mutants import Mutant, equivalent
from coda_agent.evals.pages import gpu_record, today, write_record
from coda_agent.evals.staleness import scored_versions
from coda_agent.evals.workloads import make_workload
from coda_agent.generated.kernel import Kernel
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.tiles import DEFAULT_CONFIGS

if TYPE_CHECKING:
    from coda_agent.agent.judge.runners import Runner

Say = Callable[[int, int, str], None]
_WRITE_S = 10.0
KERNEL = "gemm_residual_partial_rmsnorm"
"""Two launches, reading and writing tiles: more to vary than a bare product."""


class Judge:
    """The gates that are scored, in a spec's first element type and the default tile: signature and
    numerics, interpreted on "cpu", on "cuda" by compiled kernels in this process."""

    def __init__(self, root: Path, device: str, say: Say = lambda *_: None) -> None:
        if device == "cuda":
            use_cache()
        self.root, self.device, self.say = root, device, say
        self.run: Runner = run_kernel if device == "cuda" else run_interpreter
        self._cases: dict[Any, Iterable[Any]] = {}

    def signature(self, subject: Subject) -> list[str]:
        """Faults of a spec's programs against its declarations."""
        return [f.message for f in check_signature(subject.spec, {**subject.programs})]

    def numerics(self, subject: Subject, run: Runner, seed: int) -> Finding | None:
        """The first fault of a program, run by `run`. The cases of a spec and seed take most of the
        gate's time, so they are kept for the next program."""
        spec, program, binding = subject.spec, subject.program, subject.binding
        if fault := meaning_fault(spec, program, binding, seed):
            return fault
        element, config = spec.elements[0], DEFAULT_CONFIGS["sm_90a"]
        key = spec.digest, subject.variant, seed
        if key not in self._cases:
            self._cases = {key: make_cases(spec, binding, element, self.device, seed)}
        cases, self._cases[key] = itertools.tee(self._cases[key])
        return TileCheck(spec, program, binding, element, config, run, seed).fault(cases, full=True)

    def compile(self, subjects: Iterable[Subject]) -> None:
        """Compile programs for this device in the pool, all cores at once; here they would be
        compiled one by one."""
        if self.device == "cuda":
            different = {s.program.digest: s for s in subjects}.values()
            config = DEFAULT_CONFIGS["sm_90a"]
            jobs = [
                CompileJob.of(s.program, config, "sm_90a", s.spec, s.spec.elements[0])
                for s in different
            ]
            execution.executor().map(jobs, lambda done, _: self.say(done, len(jobs), "compile"))


def trial(judge: Judge, mutant: Mutant, *, seed: int) -> dict[str, Any]:
    """What became of a mutant: its layer is "signature", "numerics", "survived" or "equivalent"."""
    cell: dict[str, Any] = {"operator": mutant.operator, "lowered": mutant.lowered}
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


def score_mutants(judge: Judge, name: str, chosen: list[Mutant], *, seed: int) -> dict[str, Any]:
    """Judge mutants; the record, judge-<name>-<device>.json."""
    judge.compile(subject for m in chosen for subject in (m.right, m.wrong))
    jobs = {m.name: lambda m=m: trial(judge, m, seed=seed) for m in chosen}
    return recorded(judge, name, {"seed": seed}, jobs)


def score_corpus(
    judge: Judge, corpus: list[Subject], left_out: list[str], *, repeat: int
) -> dict[str, Any]:
    """Judge right programs, each with several fresh seeds; the record, judge-corpus-<device>.json.

    Programs of one spec follow each other with equal seeds: they share their cases.
    """

    def one(right: Subject, seed: int) -> dict[str, Any]:
        fault = judge.numerics(right, judge.run, seed)
        shown = right.name.startswith("demonstration")
        said = [] if shown else judge.signature(right)
        return {"seed": seed, "refused": [*said, *([fault.message] if fault else [])]}

    judge.compile(corpus)
    seeds = [random.SystemRandom().getrandbits(32) for _ in range(repeat)]
    jobs = {
        f"{right.name} #{i + 1}": lambda right=right, seed=seed: one(right, seed)
        for i, seed in enumerate(seeds)
        for right in corpus
    }
    return recorded(judge, "corpus", {"left_out": left_out}, jobs)


def score_latency(
    judge: Judge, timed: Callable[[str], dict[str, float]], names: list[str], *, repeat: int
) -> dict[str, Any]:
    """Time `repeat` verdicts of each kernel, the workers warmed up by one: seconds of the "whole"
    verdict and of each gate, as `timed` says. The record is judge-latency-<device>.json."""
    head = {"load": [round(x, 1) for x in os.getloadavg()]}
    timed(names[0])

    def one(name: str) -> dict[str, Any]:
        return {"seconds": [timed(name) for _ in range(repeat)]}

    jobs = {name: lambda name=name: one(name) for name in names}
    return recorded(judge, "latency", head, jobs, resume=False)


def score_timing(
    root: Path, kernel: Kernel, *, clock: Any, machine: Mapping[str, Any],
    trials: int = 200, device: str = "cuda", say: Say = lambda *_: None,
) -> Path:  # fmt: skip
    """Compare a kernel with itself, and cuBLAS's product with itself, at its smallest bench shape,
    where noise is the largest share; the record, judge-timing-<gpu>.json in evals/results/.

    `clock` is `coda_agent.agent.judge.timing`. Device "cpu" interprets instead, for tests.

    Raises:
        MachineError: the GPU is in use, or its clocks disagree.
    """
    clock.require_idle()
    sizes = min(kernel.spec.bench_shapes, key=lambda s: math.prod(s.values()))
    workload = make_workload(kernel, sizes, "bfloat16", device)
    config = kernel.choose(*workload.mnk, "bfloat16") or DEFAULT_CONFIGS["sm_90a"]
    calls = {"ours": contenders.ours(workload, config), "gemm": contenders.gemm(workload)}
    cells: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        before = clock.gpu_state()

        def tell(done: int, total: int, _: str, name: str = name) -> None:
            say(done + 1, total, f"{name} against itself")

        found = clock.a_a(call, trials=trials, rounds=50, progress=tell)
        state = {"before": before, "after": clock.gpu_state()}
        cells[name] = {"sizes": workload.sizes, **found, "gpu": state}
    path = gpu_record(root, "judge-timing", machine, device)
    compared, different = (sum(c[k] for c in cells.values()) for k in ("trials", "different"))
    head = {"kernel": kernel.spec.name, "machine": machine, "date": today(), "compared": compared}
    write_record(path, {**head, "different": different}, cells)
    return path


def recorded(
    judge: Judge, name: str, head: Mapping[str, Any],
    jobs: Mapping[str, Callable[[], dict[str, Any]]], *, resume: bool = True,
) -> dict[str, Any]:  # fmt: skip
    """Run the jobs that the record judge-<name>-<device>.json does not have, and keep it: cells by
    name, written every few seconds and at the end."""
    path = judge.root / "evals" / "results" / f"judge-{name}-{judge.device}.json"
    machine = environment(judge.device) | {"cores": len(os.sched_getaffinity(0))}
    head = {
        "versions": scored_versions(),
        "machine": machine,
        **head,
        "date": today(),
    }
    cells: dict[str, Any] = {}
    if resume and path.is_file():
        old = json.loads(path.read_text("utf-8"))
        if all(old.get(key) == head[key] for key in ("versions", "seed") if key in head):
            cells = old["cells"]
    written = time.monotonic()
    try:
        for done, (cell, job) in enumerate(jobs.items(), 1):
            judge.say(done, len(jobs), cell)
            if cell not in cells:
                cells[cell] = job()
            if time.monotonic() - written > _WRITE_S:
                write_record(path, head, cells)
                written = time.monotonic()
    finally:
        write_record(path, head, cells)
    return {**head, "cells": cells}
