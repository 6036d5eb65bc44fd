"""Trial records: what came of one author's one try at one spec of a suite.

- `record_files.py` has them on disk; docs/evaluation.md is the schema in words.
- Every figure is the judge's, or the run log's count of what was spent; nothing an author wrote is
  read for it. The program is there to be read and judged again.
"""

import json
import re
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import AwareDatetime, Field, NonNegativeInt, PositiveInt, model_validator

from coda_agent.agent.judge.provenance import sha
from coda_agent.agent.judge.records import LEVELS, Level, rank
from coda_agent.agent.judgement import (
    DIGESTS,
    FIGURES,
    Cell,
    Digest,
    Figure,
    Judgement,
    Kept,
    Machine,
)
from coda_agent.agent.state import Spent

Part = Literal["tips", "demos", "profile", "diagnosis"]
"""What an ablation takes from an author."""
Outcome = Literal[
    "proved", "verified", "accepted",
    "refused", "gave_up", "budget", "error", "harness_fault",
]  # fmt: skip
"""How a trial ended. A level says that the judge passed the candidate and showed that much. With
`refused` it did not. The others ended before a passing verdict: by the author, its budget, its
crash, or a fault of ours."""

Device = Literal["cpu", "cuda"]
"""Where the numerics ran: interpreted, or on a Hopper GPU."""
SCHEMA = 1


class SuiteRef(Kept):
    """The suite a trial belongs to, as it was when the trial ran."""

    name: str
    digest: Digest


class SpecRef(Kept):
    """The spec of a trial; the digest is of its text, the suite's shapes in it."""

    name: str
    digest: Digest
    level: Literal["compose", "reparameterise", "extend"]
    """How difficult it is."""


class Step(Spent):
    """A verdict better than all before it, and what had been spent by then."""

    attempt: PositiveInt
    submitted: bool
    """Whether it was the full trial; only then does a level count as solved."""
    level: Level
    roofline: float | None = None
    """Geometric mean over the cells, where it was timed; likewise the two below."""
    over_compile: float | None = None
    of_gemm: float | None = None

    @classmethod
    def of(cls, verdict: Judgement, spent: Spent, *, attempt: int, submitted: bool) -> Self | None:
        """The step that a verdict is; None of one that shows nothing."""
        if not verdict.passed or verdict.level is None:
            return None
        means = {figure: verdict.mean(figure) for figure in FIGURES}
        about = {"attempt": attempt, "submitted": submitted, "level": verdict.level}
        return cls(**about, **means, **spent.model_dump())


class RunRef(Kept):
    """The run, which is like any other: `coda-agent run show ID`."""

    id: str
    log: str
    """Its events.jsonl, relative to the workspace."""

    def file(self, root: Path) -> Path | None:
        """The log in the workspace at `root`; None where it is not there. It is None too where the
        record, which anybody may write, names something else than a run's log."""
        found = re.fullmatch(r"logs/runs/[\w-]+/events\.jsonl", self.log)
        return root / self.log if found and (root / self.log).is_file() else None


class Audit(Kept):
    """What a person, or a later check, found out about the trial."""

    finding: Literal["unaudited", "clean", "exploit", "leak", "harness fault"] = "unaudited"
    evidence: str = ""
    date: str | None = None

    @model_validator(mode="after")
    def _founded(self) -> Self:
        if self.finding != "unaudited" and not (self.evidence.strip() and self.date):
            raise ValueError(f"{self.finding!r} needs evidence and a date")
        return self


class TrialKey(NamedTuple):
    """What makes two records the same trial."""

    suite: str
    suite_digest: str
    device: Device
    spec: str
    author: str
    trial: int
    without: tuple[str, ...]


class TrialRecord(Kept):
    """One trial."""

    checksum: str = ""
    """SHA-256 of the file with this field empty; set where a file is written."""
    schema_version: Literal[1] = SCHEMA
    suite: SuiteRef
    spec: SpecRef
    author: str = Field(min_length=1)
    """`composer`, `replay:<trajectory>`, `claude:<model>`, `mcp:<client>`."""
    trial: PositiveInt
    without: tuple[Part, ...] = ()
    """What the author was deprived of, sorted."""
    goal: Level
    """The level that counts as solved."""
    seed: NonNegativeInt | None = None
    """The judge's, where it says."""
    started: AwareDatetime
    finished: AwareDatetime
    outcome: Outcome
    reason: str = ""
    """Why there is no passing verdict, for a reader; no score looks at it."""
    verdict: Judgement | None = None
    program: str | None = None
    """The candidate that `verdict` is about."""
    attempts: NonNegativeInt
    """How often a candidate was judged, up to the verdict that counts."""
    spent: Spent
    steps: tuple[Step, ...] = ()
    machine: Machine
    run: RunRef
    audit: Audit = Audit()

    @model_validator(mode="after")
    def _agrees(self) -> Self:
        judged = self.verdict
        if (self.outcome in LEVELS) != (judged is not None and judged.passed):
            raise ValueError(f"the outcome is {self.outcome}, the verdict says otherwise")
        if judged and judged.passed and judged.level != self.outcome:
            raise ValueError(f"the outcome is {self.outcome}, the verdict's level {judged.level}")
        if self.outcome == "refused" and judged is None:
            raise ValueError("the outcome is refused, and there is no verdict")
        if judged and not judged.digests.keys() >= set(DIGESTS):
            found = ", ".join(judged.digests)
            raise ValueError(f"digests of {found}, expected {', '.join(DIGESTS)}")
        if judged and judged.digests["spec"] != self.spec.digest:
            raise ValueError("the verdict is about another spec")
        program = self.program
        if judged and program is not None and sha(program) != judged.digests["candidate"]:
            raise ValueError("the program is not the one the verdict is about")
        if self.finished < self.started:
            raise ValueError("it finished before it started")
        if self.without != tuple(sorted(set(self.without))):
            raise ValueError(f"without is {self.without}, expected it sorted, each once")
        return self

    @property
    def key(self) -> TrialKey:
        """Two records with one key are the same trial."""
        return TrialKey(
            self.suite.name, self.suite.digest, self.machine.device, self.spec.name, self.author,
            self.trial, self.without,
        )  # fmt: skip

    @property
    def counts(self) -> bool:
        """Whether it says anything about its author: a fault of ours does not."""
        return self.outcome != "harness_fault" and self.audit.finding != "harness fault"

    @property
    def valid(self) -> bool:
        """Whether its verdict stands: an exploit or a leak solves nothing."""
        return self.counts and self.audit.finding not in ("exploit", "leak")

    @property
    def solved(self) -> bool:
        """Whether the judge showed at least what the suite asks for."""
        return rank(self.outcome) >= rank(self.goal) and self.valid

    @property
    def cells(self) -> tuple[Cell, ...]:
        """The timings that count: none of a candidate that was refused."""
        cells = self.verdict.cells if self.solved and self.verdict else ()
        return tuple(cell for cell in cells if cell.times)

    def mean(self, figure: Figure) -> float | None:
        """Of the timings that count; None where there are none."""
        return self.verdict.mean(figure) if self.solved and self.verdict else None


def suite_digest(definition: dict[str, Any]) -> str:
    """The digest of a suite's definition, as plain data."""
    return sha(json.dumps(definition, sort_keys=True))
