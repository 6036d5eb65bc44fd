"""Tips: what earlier work taught, and how runs shown it fared.

- `logs/tips.jsonl` is append-only, one record a line: a tip, the outcome of a run for a tip, or the
  removal of a tip. Counts are a fold over it, so merging two histories is joining their lines.
- A run may hold a tip back (`holdout`): then its outcome counts in the other arm, and the
  difference between the arms is what the tip is worth.
- A tip is kept under the gate and the fault of the attempt that failed. It is shown at that fault
  alone; the primitives and kinds that both programs use decide which comes first. One that a person
  wrote has words instead, of which the program has to have two.
- A tip that contains a solution is refused: it would measure copying. So is one that tells whoever
  is shown it how to go about checks, files, its budget or its end.
"""

import fcntl
import hashlib
import json
import math
import re
from collections.abc import Iterable, Iterator, Mapping, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import Literal, Self

from pydantic import BaseModel, TypeAdapter
from pydantic_core import from_json

from coda_agent.agent.judge.records import Finding, JsonObject
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.catalogue import vocabulary_names
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import open_own, reason

MAX_CHARACTERS = 400
SHOWN = 3
"""At one failure."""
FOUND = 12
"""By one search."""
HOLDOUT = 0.2
"""Share of the tips that a run is not shown, so that their worth is measured."""
PRUNE_AFTER = 8
"""How many runs must have been shown a tip before it may be pruned for its worth."""
_ORDER = (  # where a sentence, a clause or a line begins
    r"(?:^|[.!?:;,(\"\n]|-\s|\b(?:then|please|just|now)\b)\s*(?:(?:do\s+not|don't|never|always)\s+)?"
)
_CONDUCT = re.compile(
    "|".join((
        r"\b(?:system|assistant|user|human)\s*:|\byou\s+(?:must|should|have\s+to|need\s+to)\b",
        r"(?<!register\s)(?<!memory\s)\b(?:budget|allowance)\b",
        r"(?:^|\s)(?:~|\.{1,2})?/\w|\b(?:sudo|bash|curl|wget|ssh)\b|\brm\s+-|&&",
        r"\b(?:give_up|log_tip|search_tips|write_candidate|edit_candidate)\b",
        rf"{_ORDER}(?:ignore|disregard|(?:call\s+)?submit|hand\s+in|give\s+up|answer|reply)\b",
        rf"{_ORDER}(?:stop|quit|finish)(?:\s+(?:now|here|early))?\s*(?:[.!,;]|$)",
        rf"{_ORDER}(?:skip|read|open|write|paste|copy|print|send|give|raise|spend|run|edit|delete)"
        r"(?:\s+[\w']+){0,3}\s+(?:check\w*|tests?|judge|files?|answer|tokens|prompt|instructions)\b",
    )),
    re.IGNORECASE,
)  # fmt: skip
"""What is about an author's conduct: its checks, judge, files, budget, answer and end. Orders about
a kernel, as "take the maximum off first", are what tips are for."""
_MEND = "take the line out, or restore the file by git"
_SHARED_TOKENS = 9
"""This many tokens in a row shared with a program are a copy; shorter runs occur in prose."""


@dataclass
class Arm:
    """Runs in one arm of a tip, and those with accepted kernels."""

    runs: int = 0
    successes: int = 0


@dataclass
class Tip:
    """One tip, tagged by its fault (`fault_of`) and its program's primitives.

    Those that people wrote have words alone.
    """

    text: str
    tags: list[str]
    author: str
    failing: str
    passing: str
    run: str = ""
    shown: Arm = field(default_factory=Arm)
    held: Arm = field(default_factory=Arm)

    @property
    def id(self) -> str:
        return hashlib.sha256(" ".join(self.text.split()).encode()).hexdigest()[:8]

    @property
    def worth(self) -> float:
        """Success rate where shown, one success and one failure added (Laplace)."""
        return (self.shown.successes + 1) / (self.shown.runs + 2)

    @property
    def evidence(self) -> str:
        """What it rests on: the run, and the check that failed."""
        return f"{self.run}: {self.failing}" if self.run else self.failing

    def line(self) -> str:
        """Write it as an author reads it."""
        return f"[{self.id}] {self.text} (seen: {self.evidence})"

    def p_value(self) -> float | None:
        """Test that showing it helps (one-sided Fisher); None of an empty arm."""
        if not self.shown.runs or not self.held.runs:
            return None
        runs, held = self.shown.runs, self.held.runs
        good = self.shown.successes + self.held.successes
        ways = math.comb(runs + held, good)
        likely = range(self.shown.successes, min(runs, good) + 1)
        return sum(math.comb(runs, i) * math.comb(held, good - i) for i in likely) / ways


_TIP = TypeAdapter(Tip)


class _Outcome(BaseModel):
    tip: str
    run: str
    arm: Literal["shown", "held"]
    success: bool


class Tips:
    """The tips of a workspace."""

    def __init__(self, path: Path) -> None:
        self.path = path

    @classmethod
    def of(cls, workspace: Workspace) -> Self:
        return cls(workspace.root / "logs" / "tips.jsonl")

    def all(self) -> dict[str, Tip]:
        """Read every tip that was not pruned, with its counts, by id.

        The run that wrote a tip does not count for it: it had learned it by itself.

        Raises:
            CodaError: a line is not a record.
        """
        tips: dict[str, Tip] = {}
        seen: set[tuple[str, str]] = set()
        for number, record in self._records():
            try:
                match record.pop("kind"):
                    case "tip":
                        tips.setdefault(str(record.pop("id")), _TIP.validate_python(record))
                    case "pruned":
                        tips.pop(str(record["tip"]), None)
                    case _:
                        _count(tips, _Outcome.model_validate(record), seen)
            except (KeyError, ValueError) as error:
                message = f"{self.path}:{number} is no record of a tip: {reason(error)}"
                raise CodaError(message, hint=_MEND) from error
        return tips

    def on(self, fault: str, names: Set[str]) -> list[Tip]:
        """List the tips on a fault of such a program, nearest first.

        One that names no fault has to share two words with the program.
        """
        words = {name.lower() for name in names}

        def shared(tip: Tip) -> int:
            return len(words & {tag.lower() for tag in tip.tags})

        def fits(tip: Tip) -> bool:
            faults = [tag for tag in tip.tags if ": " in tag]
            return fault in faults if faults else shared(tip) > 1

        found = [tip for tip in self.all().values() if fits(tip)]
        return sorted(found, key=lambda t: (fault not in t.tags, -shared(t), -t.worth, t.id))

    def search(self, query: str) -> list[Tip]:
        """List the tips with a word of the query, most words first."""
        words = _words(query)

        def hits(tip: Tip) -> int:
            return len(words & _words(f"{tip.text} {' '.join(tip.tags)}"))

        found = [tip for tip in self.all().values() if hits(tip)]
        return sorted(found, key=lambda t: (-hits(t), -t.worth, t.id))[:FOUND]

    def add(self, tip: Tip, programs: Iterable[str]) -> bool:
        """Keep a tip; False where it was there already.

        Raises:
            CodaError: it contains a solution, or is too long; says what to leave out.
        """
        scan(tip.text, programs)
        if tip.id in self.all():
            return False
        keys = ("text", "tags", "author", "failing", "passing", "run")
        record = {"kind": "tip", "id": tip.id} | {key: getattr(tip, key) for key in keys}
        self._append([record])
        return True

    def record_outcomes(self, run: str, arms: Mapping[str, str], *, success: bool) -> None:
        """Record what became of a run, for each tip shown or denied."""
        records = [
            {"kind": "outcome", "tip": tip, "run": run, "arm": arm, "success": success}
            for tip, arm in sorted(arms.items())
        ]
        self._append(records)  # of a run that was resumed and ends twice, the first is counted

    def prune(self, ids: Iterable[str] | None = None) -> list[Tip]:
        """Remove tips: those named, else those followed mostly by failure."""
        tips = self.all()
        if ids is None:
            gone = [t for t in tips.values() if t.shown.runs >= PRUNE_AFTER and t.worth < 0.5]
        else:
            if unknown := set(ids) - set(tips):
                raise CodaError(f"no tip {', '.join(sorted(unknown))}", hint="coda-agent tips")
            gone = [tips[id] for id in ids]
        self._append([{"kind": "pruned", "tip": tip.id} for tip in gone])
        return gone

    def _records(self) -> Iterator[tuple[int, JsonObject]]:
        text = self.path.read_bytes() if self.path.exists() else b""
        for number, line in enumerate(text.splitlines(), 1):
            try:
                yield number, dict(from_json(line))
            except (ValueError, TypeError) as error:
                message = f"{self.path}:{number} is not JSON: {reason(error)}"
                raise CodaError(message, hint=_MEND) from error

    def _append(self, records: list[JsonObject]) -> None:
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with open_own(self.path) as file:
            fcntl.flock(file, fcntl.LOCK_EX)
            lines = (json.dumps(r, ensure_ascii=False) + "\n" for r in records)
            file.write("".join(lines).encode())


def _count(tips: Mapping[str, Tip], outcome: _Outcome, seen: set[tuple[str, str]]) -> None:
    """Count a run for its arm of a tip, once."""
    id, run = outcome.tip, outcome.run
    if run and id in tips and run != tips[id].run and (id, run) not in seen:
        arm = tips[id].shown if outcome.arm == "shown" else tips[id].held
        arm.runs, arm.successes = arm.runs + 1, arm.successes + outcome.success
        seen.add((id, run))


def scan(text: str, programs: Iterable[str]) -> None:
    """Refuse a tip that gives a solution away.

    Raises:
        CodaError: it is code, repeats a program, or says how to work; names the passage.
    """
    if len(text) > MAX_CHARACTERS:
        raise CodaError(f"a tip has at most {MAX_CHARACTERS} characters, this one {len(text)}")
    if match := re.search(r"@epilogue|\bdef \w+\(|return \{|import |```|\n\s*\w+ = ", text):
        hint = "say what to look out for, in a sentence"
        raise CodaError(f"a tip holds no code, this one has {match[0].strip()!r}", hint=hint)
    if match := _CONDUCT.search(text):
        hint = "say what went wrong in the kernel and why"
        passage = match[0].strip(' \n.,:;!?-("')
        raise CodaError(f"a tip tells nobody how to work, this one has {passage!r}", hint=hint)
    mine = _tokens(text)
    grams = {tuple(mine[i : i + _SHARED_TOKENS]) for i in range(len(mine) - _SHARED_TOKENS + 1)}
    for program in programs:
        theirs = _tokens(program)
        for i in range(len(theirs) - _SHARED_TOKENS + 1):
            if (gram := tuple(theirs[i : i + _SHARED_TOKENS])) in grams:
                raise CodaError(f"the tip repeats a program: {' '.join(gram)!r}")


def _words(text: str) -> set[str]:
    """List words of four letters or more; shorter ones are everywhere."""
    return set(re.findall(r"\w{4,}", text.lower()))


def _tokens(text: str) -> list[str]:
    return re.findall(r"\w+|[^\w\s]", text)


def fault_of(gate: str, finding: Finding) -> str:
    """Name what went wrong: the gate, and the fault or message."""
    said = re.sub(r"`[^`]*`|'[^']*'|\"[^\"]*\"|[\d.]+", "", finding.message)
    named = finding.where.get("fault") or " ".join(re.findall(r"[a-z]+", said.lower())[:8])
    return f"{gate}: {named}"


def names_in(text: str) -> set[str]:
    """List the primitives that a program's text names."""
    return {*vocabulary_names()}.intersection(_tokens(text)) - {"epilogue"}


def arms(tips: Iterable[Tip], run: str, holdout: float) -> dict[str, str]:
    """Give each tip its arm in a run, `held` with probability `holdout`."""
    return {tip.id: "held" if _uniform(f"{run} {tip.id}") < holdout else "shown" for tip in tips}


def _uniform(text: str) -> float:
    return int.from_bytes(hashlib.sha256(text.encode()).digest()[:7], "big") / 2**56
