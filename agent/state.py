"""What a run's events say of it: the one fold."""

from collections.abc import Iterable
from dataclasses import dataclass, field
from datetime import datetime
from typing import NamedTuple, Self

from pydantic import NonNegativeFloat, NonNegativeInt

from coda_agent.agent import events as e
from coda_agent.agent.budget import tokens
from coda_agent.agent.device import Device
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.judgement import Judgement, Kept, Machine

CHECKS = ("static", "compile", "interpret", "gpu", "benchmark", "submit")
"""What an attempt of an author may be, from the least shown to the most."""


class Spent(Kept):
    """What was used up; None where nobody knows.

    `usd` holds what a killed process had set aside for a call: it is billed, and nobody saw the
    bill. GPU seconds are those of gates that ran on a GPU and of profiles, without compiling.
    `received` counts the characters that the author was sent: the prompt and the results of tools.
    """

    usd: NonNegativeFloat | None = 0.0
    tokens: NonNegativeInt | None = 0
    wall_s: NonNegativeFloat = 0.0
    gpu_s: NonNegativeFloat = 0.0
    received: NonNegativeInt | None = None

    def plus(self, **more: float | None) -> Self:
        """With more used up; what is unknown stays so."""

        def sum_of(before: float | None, added: float | None) -> float | None:
            return None if before is None or added is None else before + added

        now = {key: sum_of(getattr(self, key), value) for key, value in more.items()}
        return self.model_copy(update=now)


class Attempt(NamedTuple):
    """One candidate before the judge, and what had been spent by then."""

    number: int
    check: str
    text: str
    judgement: Judgement
    machine: Machine
    spent: Spent

    @property
    def passed(self) -> bool:
        return self.judgement.passed

    @property
    def candidate(self) -> str:
        """The first twelve digits of the candidate's digest."""
        return self.judgement.digests["candidate"].removeprefix("sha256:")[:12]

    def beats(self, other: Self) -> bool:
        """Tell whether it is faster than another, beside torch.compile."""
        ours, theirs = (a.judgement.mean("over_compile") or 0.0 for a in (self, other))
        return ours > theirs

    def record(self) -> JsonObject:
        """Write it in short, as plain data."""
        judged = self.judgement
        about = {"number": self.number, "check": self.check, "candidate": self.candidate}
        about |= {"passed": judged.passed, "level": judged.level, "finding": judged.finding}
        return about


@dataclass
class RunState:
    """The fold.

    Attributes:
        writer: Who writes for the author now; where it has no others, itself.
        options: The author's options, where its run can be resumed.
        replays: The run that this one repeats.
        commits: Whether what passes is committed.
        admitted: The digest of the spec, once it was admitted.
        candidate: The last text that was saved.
        tips: Arm (shown, held) by tip.
        over: Why an author has nothing more to do: the kernel's level, or it gave up.
        outcome: running, passed, refused, failed (by an exception), or stopped. A stopped author
            ended without a verdict, and `reason` says why.
        level: The kernel's level after the last full trial.
        kept: The attempt that was accepted; of several, the fastest.
        failure: The exception that ended the run.
        begun: The call of a tool that has no result yet.
        writing: Whether the author is at work and has neither saved a text nor called a tool.
        metered: Whether the program itself drives the author. What an agent at the tools spends on
            its model is not known here.
        talks: How many conversations with models there were. `talk` is the present one, from 0.
        under_way: Dollars set aside for calls that are under way, by conversation.
    """

    run: str | None = None
    kind: str | None = None
    spec: str | None = None
    author: str | None = None
    writer: str = ""
    replays: str | None = None
    device: Device = "auto"
    commits: bool = True
    withheld: tuple[str, ...] = ()
    options: JsonObject | None = None
    admitted: str | None = None
    candidate: str = ""
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    tips: dict[str, str] = field(default_factory=dict[str, str])
    over: str | None = None
    gave_up: bool = False
    outcome: str = "running"
    level: str | None = None
    kept: Attempt | None = None
    commit: str | None = None
    reason: str | None = None
    failure: e.RunFailed | None = None
    finished: bool = False
    begun: e.ToolStarted | None = None
    writing: bool = False
    metered: bool = False
    spent: Spent = field(default_factory=lambda: Spent(received=0))
    talks: int = 0
    talk: int = 0
    under_way: dict[int, float | None] = field(default_factory=dict[int, float | None])
    steps: int = 0
    """Answers of a model."""
    time: datetime | None = None

    @classmethod
    def of(cls, events: Iterable[e.Event]) -> Self:
        """Fold events into a state."""
        state = cls()
        for event in events:
            state.apply(event)
        return state

    @property
    def error(self) -> str | None:
        """What the exception said."""
        return self.failure and self.failure.message

    @property
    def why(self) -> str:
        """Why it did not pass, as far as somebody said so."""
        return "" if self.outcome == "passed" else self.reason or self.error or ""

    @property
    def gates(self) -> dict[str, JsonObject]:
        """The last verdict's by name: `passed`, None where it was skipped, and `seconds`."""
        last = self.attempts[-1].judgement.gates if self.attempts else {}
        return {x: {"passed": gate.passed, "seconds": gate.seconds} for x, gate in last.items()}

    @property
    def passed(self) -> bool:
        """Whether a candidate passed the full trial of an author's run."""
        return self.over is not None and not self.gave_up

    @property
    def best(self) -> Attempt | None:
        """What was accepted, else the attempt that passed the most, the latest of equals."""
        passed = [attempt for attempt in self.attempts if attempt.passed]
        return self.kept or max(reversed(passed), key=lambda a: CHECKS.index(a.check), default=None)

    def record(self) -> JsonObject:
        """Say how the run stands, as plain data."""
        keys = ("kind", "spec", "author", "gates", "level", "commit", "outcome", "reason", "error")
        about = {key: getattr(self, key) for key in keys}
        return about | {"usd": self.spent.usd, "steps": self.steps}

    def _spend(self, **more: float | None) -> None:
        self.spent = self.spent.plus(**more)

    def apply(self, event: e.Event) -> None:
        """Take the next event; of unknown ones, the time."""
        now = datetime.fromisoformat(event.time)
        if self.time and not isinstance(event, e.RunResumed):
            self._spend(wall_s=max(0.0, (now - self.time).total_seconds()))
        self.time = now
        match event:
            case e.RunStarted():
                self._started(event)
            case e.RunResumed():
                for usd in self.under_way.values():
                    self._spend(usd=usd)
                self.under_way.clear()
                if self.outcome in ("stopped", "failed"):
                    self.outcome, self.reason, self.failure = "running", None, None
                    self.finished = False
            case e.SpecAdmitted():
                self.admitted = event.digest
            case e.AuthorStarted():
                self.writing, self.writer = True, event.author
                if self.over and event.author != self.author:  # another goes on
                    self.over, self.gave_up = None, False
                if not self.metered:
                    self.metered = True
                    self.spent = self.spent.model_copy(update={"usd": 0.0, "tokens": 0})
            case e.Prompted():
                self.talk, self.talks = self.talks, self.talks + 1
                self._spend(received=event.characters)
            case e.Switched():
                self.talk = event.number
                if self.gave_up:  # another goes on
                    self.over, self.gave_up = None, False
            case e.Turned():
                self._spend(received=len(event.note))
            case e.ToolStarted():
                self.writing, self.begun = False, event
            case e.CandidateSaved():
                self.writing, self.candidate = False, event.text
            case e.TipsGiven():
                self.tips |= event.arms
            case e.ToolFinished():
                self.begun = None
                profiled = event.name == "profile" and event.gpu
                self._spend(received=len(event.text), gpu_s=event.seconds * profiled)
            case e.Judged():
                self._judged(event)
            case e.Stored():
                self.commit = event.commit
                if self.kind == "generate":
                    self.over = self.level = event.level or "passed"
                    self.gave_up, self.outcome = False, "passed"
                    if event.type != "kept" and self.attempts:
                        self.kept = self.attempts[-1]
            case e.GaveUp():
                self.gave_up, self.over = True, f"gave up: {event.reason}"
            case e.Requested():
                self.under_way[self.talk] = event.worst_usd
            case e.Responded():
                self._spend(usd=event.usd, tokens=tokens(event.usage))
                self.steps += 1
                self.under_way.pop(self.talk, None)
            case e.RequestFailed():
                self._spend(usd=event.usd, tokens=tokens(event.usage))
            case e.RunFinished():
                self.finished, self.reason = True, event.reason
                self.under_way.clear()
                self.outcome = "stopped" if self.outcome == "running" else self.outcome
            case e.RunFailed():
                self.outcome, self.failure = "failed", event
            case _:
                pass

    def _started(self, event: e.RunStarted) -> None:
        self.run, self.kind = event.run, event.kind
        self.spec, self.author = event.spec, event.author
        self.device, self.commits = event.device, event.commit
        self.withheld, self.options = event.withheld, event.options
        self.replays = event.replays
        if self.kind == "generate":
            self._spend(usd=None, tokens=None)

    def _judged(self, event: e.Judged) -> None:
        self._spend(gpu_s=event.gpu_s)
        judged = event.judgement
        about = (event.number, event.check, self.candidate, judged, event.machine, self.spent)
        self.attempts.append(Attempt(*about))
        if event.check == "submit" or self.kind != "generate":
            self.outcome = "passed" if judged.passed else "refused"
            self.level = judged.level
