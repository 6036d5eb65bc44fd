"""The judge: four gates in order; the first failure ends the trial."""

from __future__ import annotations

from collections.abc import Collection

from coda_agent.agent.judge.compile_gate import NEWER
from coda_agent.agent.judge.executor import Executor
from coda_agent.agent.judge.provenance import digests
from coda_agent.agent.judge.records import CompileReport, Finding, Level, Observer, Survey, Tuned
from coda_agent.agent.judge.verdict import GateResult, Verdict
from coda_agent.agent.judge.walk import Terms, Walk
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.tiles import TileConfig, carries
from coda_agent.specs import Spec

__all__ = ["Finding", "GateResult", "Level", "Observer", "Terms", "Verdict", "judge_candidate"]


def judge_candidate(
    spec: Spec,
    text: str,
    executor: Executor,
    *,
    terms: Terms | None = None,
    observer: Observer = lambda *_: None,
) -> Verdict:
    """Judge a candidate's text against a spec.

    Args:
        text: The candidate, a complete kernel.py.
        executor: What carries out the gates' jobs.
        terms: Gates, device and what else there is to choose.
        observer: Told of each gate's start, progress and end.

    Returns:
        The verdict; passed when no gate that ran found a fault.

    Raises:
        MachineError: the terms demand a Hopper GPU, and none is usable.
    """
    walk = Walk(spec, text, executor, terms or Terms(), observer)
    walk.through()
    return verdict_of(walk)


def tune_candidate(
    spec: Spec,
    text: str,
    executor: Executor,
    *,
    observer: Observer = lambda *_: None,
    tiles: Collection[TileConfig] | None = None,
) -> dict[str, Tuned]:
    """Find the default program's fastest right configurations at the bench shapes.

    They are found for each element type; of `tiles`, or of all that suit.

    Returns:
        What tuned.json holds: GPU name to dtype of A to one line a shape.

    Raises:
        MachineError: no Hopper GPU is usable.
        CompileError: the program does not compile, or is wrong in every configuration at a shape.
    """
    terms = Terms("cuda", ("static", "compile", "tune"), tiles=tiles)
    return _measured(Walk(spec, text, executor, terms, observer)).tuned or {}


def survey_candidate(
    spec: Spec, text: str, executor: Executor, *, observer: Observer = lambda *_: None
) -> Survey:
    """Time the default program's right configurations, in the first element type.

    Raises:
        MachineError: no Hopper GPU is usable.
        CompileError: the program does not compile.
    """
    terms = Terms("cuda", ("static", "compile", "survey"), types=spec.elements[:1])
    surveyed = _measured(Walk(spec, text, executor, terms, observer)).surveyed
    assert surveyed is not None
    return surveyed


def _measured(walk: Walk) -> Walk:
    walk.through()
    if findings := walk.results[-1].findings:
        raise CompileError(findings[0].message, hint=findings[0].hint)
    return walk


def verdict_of(walk: Walk) -> Verdict:
    """Say what the gates of a walk come to."""
    passed = all(r.passed for r in walk.results)
    ran = {r.name for r in walk.results if r.skipped is None and r.passed}
    level: Level | None = None
    if passed and {"compile", "numerics"} <= ran:
        level = "proved"
        if walk.gpu is not None:
            level = "accepted" if "performance" in ran else "verified"
    missing = []
    if walk.gpu is None:
        missing = ["performance: no Hopper GPU here"]
        if "numerics" in ran:
            stood = "no Hopper GPU here, the interpreter stood in for them"
            missing.insert(0, f"numerics of the compiled kernels: {stood}")
    elif "performance" in ran and len(walk.variants) > 1:
        _, *others = walk.variants
        missing = [f"performance of {', '.join(others)} at every shape and type: timed at one"]
    if "compile" in ran and not walk.terms.whole:
        newer = " and ".join(NEWER)
        missing.append(f"that it compiles for {newer}: `coda-agent generate` shows it")
    elif "compile" in ran:
        why = "no kernel there has statistics of groups"
        lost = [(p.name, a) for p in walk.programs.values() for a in NEWER if not carries(p, a)]
        missing += [f"that {name} compiles for {arch}: {why}" for name, arch in lost]
    missing += [
        f"that it compiles for {kernel.arch}: {kernel.error}"
        for result in walk.results
        if isinstance(report := result.data, CompileReport)
        for kernel in report.kernels
        if kernel.arch in NEWER and kernel.error
    ]
    return Verdict(
        passed=passed,
        level=level,
        gates=walk.results,
        tuned=walk.tuned,
        environment=walk.executor.environment("cuda" if walk.gpu else "cpu"),
        digests=digests(walk.spec, walk.text),
        not_shown=missing,
    )
