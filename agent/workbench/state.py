"""What a run's events say about the work on its candidate: a fold, nothing else is remembered."""

from dataclasses import dataclass, field

from coda_agent.agent.budget import gpu_seconds
from coda_agent.agent.events import Event

CHECKS = ("static", "compile", "interpret", "gpu", "benchmark", "submit")
"""What an attempt may be, from the least shown to the most."""


@dataclass(frozen=True)
class Attempt:
    """One candidate before the judge; `level` is what a passing one was shown to be."""

    number: int
    check: str
    candidate: str
    passed: bool
    level: str | None
    finding: str


@dataclass
class State:
    """The candidate, the attempts, and how the run stands."""

    spec: str = ""
    author: str = ""
    device: str = "auto"
    commit: bool = True
    candidate: str = ""
    attempts: list[Attempt] = field(default_factory=list[Attempt])
    tips: dict[str, str] = field(default_factory=dict[str, str])
    """Arm (shown, held) by tip."""
    over: str | None = None
    """Why there is nothing more to do: accepted, refused, or gave up."""
    level: str | None = None
    sha: str | None = None
    gpu_s: float = 0.0
    best: Attempt | None = None
    """The attempt that showed most, the latest of equals; `best_text` is its candidate."""
    best_text: str = ""

    def apply(self, event: Event) -> None:
        """Takes the next event."""
        data = event.data
        self.gpu_s += gpu_seconds(event)
        if event.type == "run.started":
            self.spec, self.author = str(data["spec"]), str(data["author"])
            self.device, self.commit = data.get("device", "auto"), data.get("commit", True)
        elif event.type == "candidate.saved":
            self.candidate = data.get("text", "")
        elif event.type == "attempt":
            self._attempted(Attempt(**data))
        elif event.type == "tips":
            self.tips |= data["arms"]
        elif event.type in ("committed", "unchanged", "passed"):
            self.over, self.level, self.sha = "accepted", data["level"], data["commit"]
        elif event.type == "gave.up":
            self.over = f"gave up: {data['reason']}"

    def _attempted(self, attempt: Attempt) -> None:
        self.attempts.append(attempt)
        known = CHECKS.index(self.best.check) if self.best else -1
        if attempt.passed and CHECKS.index(attempt.check) >= known:
            self.best, self.best_text = attempt, self.candidate
