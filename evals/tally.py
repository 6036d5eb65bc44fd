"""The record of a trial, made from its run's events and from nothing else."""

from collections.abc import Sequence
from datetime import datetime
from pathlib import Path
from typing import Any

from coda_agent.agent.events import Event
from coda_agent.agent.judge.provenance import sha
from coda_agent.agent.judge.records import Level, rank
from coda_agent.agent.judgement import Machine
from coda_agent.agent.state import Attempt, RunState
from coda_agent.evals.records import Outcome, RunRef, SpecRef, Step, SuiteRef, TrialKey, TrialRecord
from coda_agent.specs import Spec


def record_of(
    events: Sequence[Event], key: TrialKey, spec: Spec, goal: Level, log: Path
) -> TrialRecord:
    """The record of a trial, from all events of its run.

    Scores come from the `judged` events, which the workbench writes from the judge's verdict, and
    costs from the usage of each call; no text of an author is read for either. The spec has the
    suite's shapes in it. The log's path is relative to the workspace, its folder the run's name.
    """
    state = RunState.of(events)
    submitted = [attempt for attempt in state.attempts if attempt.check == "submit"]
    final = submitted[-1] if submitted else None
    outcome, reason = _outcome(state, final)
    return TrialRecord(
        suite=SuiteRef(name=key.suite, digest=key.suite_digest),
        spec=SpecRef(name=spec.name, digest=spec.digest, level=spec.level),
        author=key.author,
        trial=key.trial,
        without=key.without,  # type: ignore[arg-type]
        goal=goal,
        started=datetime.fromisoformat(events[0].time),
        finished=datetime.fromisoformat(events[-1].time),
        outcome=outcome,
        reason=" ".join(reason.split())[:400],
        verdict=final and final.judgement,
        program=final and _text(final),
        attempts=final.number if final else len(state.attempts),
        spent=state.spent,
        steps=_steps(state.attempts),
        machine=state.attempts[-1].machine if state.attempts else Machine(device=key.device),
        run=RunRef(id=log.parent.name, log=log.as_posix()),
    )


def _outcome(state: RunState, final: Attempt | None) -> tuple[Outcome, str]:
    """How a trial ended, and why; `final` is its last full trial of a candidate."""
    verdict, reason = final and final.judgement, state.reason or ""
    if verdict and verdict.passed and verdict.level:
        return verdict.level, ""
    if failure := state.failure:
        if state.writing and failure.error == "ProgramError":
            return "gave_up", failure.message
        theirs = state.writing or failure.error == "Stopped"
        return ("error" if theirs else "harness_fault"), f"{failure.error}: {failure.message}"
    if state.gave_up:
        return "gave_up", reason
    if not state.finished:
        return "harness_fault", "the run did not end"
    if reason.startswith("budget: "):
        return "budget", reason.removeprefix("budget: ")
    return ("refused", verdict.finding) if verdict else ("gave_up", reason)


def _text(attempt: Attempt) -> str | None:
    """The program that was judged, where the log has it."""
    return attempt.text if sha(attempt.text) == attempt.judgement.digests["candidate"] else None


def _steps(attempts: Sequence[Attempt]) -> tuple[Step, ...]:
    """The verdicts that were better than all before them."""
    steps: list[Step] = []
    for count, attempt in enumerate(attempts, 1):
        submitted = attempt.check == "submit"
        step = Step.of(attempt.judgement, attempt.spent, attempt=count, submitted=submitted)
        if step and (not steps or _shown(step) > _shown(steps[-1])):
            steps.append(step)
    return tuple(steps)


def _shown(step: Step) -> tuple[Any, ...]:
    return step.submitted, rank(step.level), step.roofline or 0.0
