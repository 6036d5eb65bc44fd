"""The record of a trial, made from its run's events and from nothing else."""

from collections.abc import Sequence
from dataclasses import dataclass, field
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.budget import gpu_seconds, tokens
from coda_agent.agent.events import Event
from coda_agent.agent.judge.records import Level, rank
from coda_agent.agent.judgement import Judgement, Machine
from coda_agent.evals.records import (
    Outcome,
    RunRef,
    SpecRef,
    Spent,
    Step,
    SuiteRef,
    TrialKey,
    TrialRecord,
)

if TYPE_CHECKING:
    from coda_agent.specs import Spec


@dataclass
class _Tally:
    """What a run's events say about a trial; a fold."""

    spent: Spent = field(default_factory=Spent)
    steps: list[Step] = field(default_factory=list[Step])
    attempts: int = 0
    texts: dict[str, str] = field(default_factory=dict[str, str])
    judged: dict[str, Any] = field(default_factory=dict[str, Any])
    """The full trial, the last where there were several."""
    machine: Machine | None = None
    writing: bool = False
    failed: dict[str, Any] = field(default_factory=dict[str, Any])
    ended: dict[str, Any] = field(default_factory=dict[str, Any])
    gave_up: bool = False
    time: datetime | None = None

    def apply(self, event: Event) -> None:
        data, now = event.data, datetime.fromisoformat(event.time)
        since = self.time if self.time and event.type != "run.resumed" else now
        wall_s = max(0.0, (now - since).total_seconds())
        self._spend(wall_s=wall_s, gpu_s=gpu_seconds(event))
        self.time = now
        match event.type:
            case "author.started":
                self.writing = True
            case "author.finished" | "tool.started":
                self.writing = False
            case "response" | "request.failed":
                self._spend(usd=data["usd"], tokens=tokens(data["usage"]))
            case "candidate.saved":
                from coda_agent.agent.judge.provenance import sha

                self.texts[sha(data["text"])] = data["text"]
            case "judged":
                self._judge(data)
            case "gave.up":
                self.gave_up = True
            case "run.failed":
                self.failed = data
            case "run.finished":
                self.ended = data
            case _:
                pass

    def _spend(self, **more: float) -> None:
        spent = self.spent.model_dump()
        self.spent = Spent(**{k: v + more.get(k, 0) for k, v in spent.items()})

    def _judge(self, data: dict[str, Any]) -> None:
        self.attempts += 1
        self.machine = Machine(**data["machine"])
        submitted = data["check"] == "submit"
        if submitted:
            self.judged = data
        verdict = Judgement(**data["judgement"])
        step = Step.of(verdict, self.spent, attempt=self.attempts, submitted=submitted)
        if step and (not self.steps or _shown(step) > _shown(self.steps[-1])):
            self.steps.append(step)

    def outcome(self) -> tuple[Outcome, str]:
        """How the trial ended, and why."""
        verdict = Judgement(**self.judged["judgement"]) if self.judged else None
        if verdict and verdict.passed and verdict.level:
            return verdict.level, ""
        reason = str(self.ended.get("reason") or "")
        if self.failed:
            kind, said = self.failed["error"], f"{self.failed['error']}: {self.failed['message']}"
            if self.writing and kind == "ProgramError":
                return "gave_up", self.failed["message"]
            return ("error" if self.writing or kind == "Stopped" else "harness_fault"), said
        if self.gave_up:
            return "gave_up", reason
        if not self.ended:
            return "harness_fault", "the run did not end"
        if reason.startswith("budget: "):
            return "budget", reason.removeprefix("budget: ")
        if verdict:
            return "refused", verdict.finding
        return "gave_up", reason


def _shown(step: Step) -> tuple[Any, ...]:
    return step.submitted, rank(step.level), step.roofline or 0.0


def record_of(
    events: Sequence[Event], key: TrialKey, spec: "Spec", goal: Level, log: Path
) -> TrialRecord:
    """The record of a trial, from its run's events.

    Scores come from the `judged` events, which the workbench writes from the judge's verdict, and
    costs from the usage of each call; no text of an author is read for either.

    Args:
        events: All that the run's log holds.
        key: Which trial it was.
        spec: The trial's spec, the suite's shapes in it.
        goal: The level that counts as solved.
        log: The events' file, relative to the workspace; its folder has the run's name.
    """
    tally = _Tally()
    for event in events:
        tally.apply(event)
    outcome, reason = tally.outcome()
    verdict = Judgement(**tally.judged["judgement"]) if tally.judged else None
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
        verdict=verdict,
        program=tally.texts.get(verdict.digests["candidate"]) if verdict else None,
        attempts=tally.judged.get("number", tally.attempts),
        spent=tally.spent,
        steps=tuple(tally.steps),
        machine=tally.machine or Machine(device=key.device),
        run=RunRef(id=log.parent.name, log=log.as_posix()),
    )
