"""Trial records: what came of one author's one try at one spec of a suite.

- One JSON file a trial, in `evals/results/trials/<suite>/`, beside the suite as it was run
  (`suite-<digest>.json`). docs/evaluation.md is the schema in words.
- Every figure is the judge's, or the run log's count of what was spent; nothing an author wrote is
  read for it. The program is there to be read and judged again.
- A file is written whole or not at all, and carries a checksum. What is damaged, double or not ours
  is named by `read_records` and counts for nothing.
"""

import hashlib
import json
import os
import re
import tempfile
from pathlib import Path
from typing import Any, Literal, NamedTuple, Self

from pydantic import (
    AwareDatetime,
    BaseModel,
    ConfigDict,
    Field,
    NonNegativeFloat,
    NonNegativeInt,
    PositiveInt,
    ValidationError,
    model_validator,
)

from coda_agent.agent.judge.provenance import sha
from coda_agent.agent.judge.records import LEVELS, Level, rank
from coda_agent.agent.judgement import FIGURES, Cell, Digest, Figure, Judgement, Machine

Part = Literal["tips", "demos", "profile", "diagnosis"]
"""What an ablation takes from an author."""
Outcome = Literal[
    "proved", "verified", "accepted",
    "refused", "gave_up", "budget", "error", "harness_fault",
]  # fmt: skip
"""A level: the judge passed the candidate, and showed that much. `refused`: it did not. The others
ended before a passing verdict: by the author, its budget, its crash, or a fault of ours."""

TRIALS = Path("evals", "results", "trials")
"""Where records are, in a workspace."""
SCHEMA = 1

_CHECKSUM = '"checksum": "{}"'


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, allow_inf_nan=False)


class SuiteRef(_Model):
    """The suite a trial belongs to, as it was when the trial ran."""

    name: str
    digest: Digest


class SpecRef(_Model):
    """The spec of a trial; the digest is of its text, the suite's shapes in it."""

    name: str
    digest: Digest
    level: Literal["compose", "reparameterise", "extend"]
    """How difficult it is."""


class Spent(_Model):
    """What was used up: since the start of the trial."""

    usd: NonNegativeFloat = 0.0
    tokens: NonNegativeInt = 0
    wall_s: NonNegativeFloat = 0.0
    gpu_s: NonNegativeFloat = 0.0


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


class RunRef(_Model):
    """The run, which is like any other: `coda-agent run show ID`."""

    id: str
    log: str
    """Its events.jsonl, relative to the workspace."""


class Audit(_Model):
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
    device: str
    spec: str
    author: str
    trial: int
    without: tuple[str, ...]


class TrialRecord(_Model):
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
        return self.verdict.cells if self.solved and self.verdict else ()

    def mean(self, figure: Figure) -> float | None:
        """Of the timings that count; None where there are none."""
        return self.verdict.mean(figure) if self.solved and self.verdict else None


class Problem(NamedTuple):
    """A file that was not counted."""

    path: Path
    kind: Literal["truncated", "corrupted", "duplicated", "foreign"]
    message: str

    def __str__(self) -> str:
        return f"{self.path}: {self.kind}: {self.message}"


class Results(NamedTuple):
    """What a folder of records holds."""

    records: list[TrialRecord]
    problems: list[Problem]


def file_name(key: TrialKey) -> str:
    """The name of a record's file: readable, and never that of another key."""
    author = re.sub(r"[^\w.-]+", "-", key.author)[:60]
    end = hashlib.sha256(json.dumps(key).encode()).hexdigest()[:10]
    return f"{key.spec}-{author}-{key.trial}-{end}.json"


def record_path(folder: Path, record: TrialRecord) -> Path | None:
    """The file of a record under a folder of suites or in a suite's own; None where there is none
    of its name."""
    name = file_name(record.key)
    places = (folder / record.suite.name / name, folder / name)
    return next((place for place in places if place.is_file()), None)


def write_record(folder: Path, record: TrialRecord) -> Path:
    """Writes one record into a suite's folder, whole or not at all; its path.

    A record of the same key is replaced.
    """
    text = record.model_copy(update={"checksum": ""}).model_dump_json(indent=1) + "\n"
    digest = hashlib.sha256(text.encode()).hexdigest()
    path = folder / file_name(record.key)
    write_whole(path, text.replace(_CHECKSUM.format(""), _CHECKSUM.format(digest), 1))
    return path


def write_whole(path: Path, text: str) -> None:
    """Writes a file, synced to disk before it has its name."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.NamedTemporaryFile(
        "w", encoding="utf-8", dir=path.parent, prefix=".", suffix=".tmp", delete=False
    ) as file:
        try:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
            os.chmod(file.name, 0o644)
            os.replace(file.name, path)
        except BaseException:
            os.unlink(file.name)
            raise


def read_records(folder: Path) -> Results:
    """The records under a folder, and each file that is none or counts for nothing, with the
    reason; a folder that is not there has neither."""
    records: dict[TrialKey, tuple[Path, TrialRecord]] = {}
    problems: list[Problem] = []
    suites: set[tuple[Path, str]] = set()
    for path in sorted(folder.rglob("*.json"), key=lambda p: (not _is_definition(p), p)):
        if _is_definition(path):
            found = _definition(path)
            if isinstance(found, str):
                suites.add((path.parent, found))
                continue
        else:
            found = _read(path)
        if isinstance(found, TrialRecord) and (path.parent, found.suite.digest) not in suites:
            said = f"no definition of suite {found.suite.name} {found.suite.digest[:19]} here"
            found = Problem(path, "foreign", said)
        if not isinstance(found, TrialRecord):
            problems.append(found)
            continue
        if held := records.get(found.key):
            # The file with the name that belongs to the key is the one the program wrote.
            right = path.name == file_name(found.key) != held[0].name
            kept, other = (path, held[0]) if right else (held[0], path)
            problems.append(Problem(other, "duplicated", f"the same trial is in {kept}"))
            if not right:
                continue
        records[found.key] = path, found
    return Results([record for _, record in records.values()], problems)


def suite_digest(definition: dict[str, Any]) -> str:
    """The digest of a suite's definition, as plain data."""
    return sha(json.dumps(definition, sort_keys=True))


def write_definition(folder: Path, definition: dict[str, Any]) -> Path:
    """Puts a suite's definition beside its records, which are foreign without it."""
    path = folder / _definition_name(suite_digest(definition))
    write_whole(path, json.dumps(definition, indent=1, sort_keys=True) + "\n")
    return path


def _definition_name(digest: str) -> str:
    return f"suite-{digest.removeprefix('sha256:')[:12]}.json"


def _is_definition(path: Path) -> bool:
    return path.name.startswith("suite-")


def _definition(path: Path) -> str | Problem:
    """The digest of the suite in a file, whose name it must fit."""
    try:
        digest = suite_digest(json.loads(path.read_text("utf-8")))
    except (ValueError, OSError) as error:
        return Problem(path, "corrupted", f"no definition of a suite: {error}")
    if path.name != _definition_name(digest):
        return Problem(path, "corrupted", "its name is not its digest")
    return digest


def _read(path: Path) -> TrialRecord | Problem:
    try:
        text = path.read_bytes().decode()
    except (OSError, UnicodeDecodeError) as error:
        return Problem(path, "foreign", f"not text: {error}")
    try:
        record = TrialRecord.model_validate_json(text)
    except ValidationError as error:
        return _refused(path, text, error)
    bare = text.replace(_CHECKSUM.format(record.checksum), _CHECKSUM.format(""), 1)
    if hashlib.sha256(bare.encode()).hexdigest() != record.checksum:
        return Problem(path, "corrupted", "its checksum does not fit its text")
    return record


def _refused(path: Path, text: str, error: ValidationError) -> Problem:
    fault = error.errors()[0]
    if fault["type"] == "json_invalid":
        if "EOF" in fault["msg"]:
            return Problem(path, "truncated", fault["msg"])
        return Problem(path, "foreign", f"not JSON: {fault['msg']}")
    data: Any = json.loads(text)
    version = data.get("schema_version") if isinstance(data, dict) else None
    if version != SCHEMA:
        return Problem(path, "foreign", f"schema_version is {version!r}, expected {SCHEMA}")
    where = ".".join(map(str, fault["loc"])) or "record"
    return Problem(path, "corrupted", f"{where}: {fault['msg'].removeprefix('Value error, ')}")
