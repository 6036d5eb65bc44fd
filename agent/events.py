"""The events of a run: classes whose fields are a log line's.

`type` is the name on disk. A line of a type that no class has is `Unknown`: older logs have such
lines, and nothing reads them. What a gate does while it works is told to observers and is no event;
the verdict is one, `Judged`.
"""

from datetime import datetime
from functools import cache
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, Field

from coda_agent.agent.device import Device
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.judgement import Judgement, Machine


class Event(BaseModel, frozen=True, populate_by_name=True):
    """One line of the log, which sets its place and time."""

    seq: int = -1
    time: str = ""
    """UTC, in milliseconds, as ISO 8601."""
    type: str

    @property
    def data(self) -> JsonObject:
        """The fields that were given, as the line holds them."""
        return self.model_dump(by_alias=True, exclude={"seq", "time", "type"}, exclude_unset=True)

    def line(self) -> JsonObject:
        """Write the event as its line holds it."""
        return {"seq": self.seq, "time": self.time, "type": self.type, "data": self.data}


class Unknown(Event, frozen=True):
    """A line of a kind that this version does not have."""

    fields: JsonObject = {}

    @property
    def data(self) -> JsonObject:
        return self.fields


class RunStarted(Event, frozen=True):
    """The first event: whose run it is, and of what."""

    type: Literal["run.started"] = "run.started"
    run: str = ""
    kind: str | None = None
    """A run of kind `generate` is an author's. `verify`, `tune`, `check` and others end with their
    command."""
    spec: str | None = None
    author: str | None = None
    device: Device = "auto"
    commit: bool = True
    withheld: tuple[str, ...] = ()
    options: JsonObject | None = None
    """The author's options, where its run can be resumed."""
    replays: str | None = None
    """The run that this one repeats."""


class RunResumed(Event, frozen=True):
    """Another process goes on with the run."""

    type: Literal["run.resumed"] = "run.resumed"
    run: str = ""
    options: JsonObject | None = None


class SpecAdmitted(Event, frozen=True):
    """The spec may be used."""

    type: Literal["spec.admitted"] = "spec.admitted"
    path: str
    digest: str


class AuthorStarted(Event, frozen=True):
    """The author goes to work."""

    type: Literal["author.started"] = "author.started"
    author: str = ""


class CandidateSaved(Event, frozen=True):
    """There is another text, which is on disk, too."""

    type: Literal["candidate.saved"] = "candidate.saved"
    path: str = "kernel.py"
    digest: str = ""
    """The first twelve digits of the text's SHA-256."""
    text: str = ""


class TipsGiven(Event, frozen=True):
    """Tips an author was shown, or that were held back from it."""

    type: Literal["tips"] = "tips"
    arms: dict[str, str]
    """`shown` or `held`, by tip."""


class ToolStarted(Event, frozen=True):
    """A call of a tool."""

    type: Literal["tool.started"] = "tool.started"
    id: str = ""
    name: str
    input: Any = None


class ToolFinished(Event, frozen=True):
    """What a call of a tool came to (`registry.Result`)."""

    type: Literal["tool.finished"] = "tool.finished"
    id: str = ""
    name: str
    seconds: float = 0.0
    ok: bool = True
    text: str = ""
    facts: JsonObject = Field(default={}, alias="data")
    artifacts: list[str] = []
    gpu: bool = False


class Judged(Event, frozen=True):
    """A verdict; the whole of it is the run's artifact `verdict-NUMBER.json`."""

    type: Literal["judged"] = "judged"
    number: int
    """Which of the run's judged candidates it is, from 1."""
    check: str
    """What was asked for: a level of `check`, `benchmark`, `submit`, or the kind of the run."""
    judgement: Judgement
    machine: Machine
    gpu_s: float
    replay: str = ""
    """Of one that was refused: seed, case and sizes, as `Verdict.replay`."""


class Stored(Event, frozen=True):
    """What became of a candidate that passed: committed, unchanged, or only passed.

    `kept` says that what had become of an earlier one stands.
    """

    type: Literal["committed", "unchanged", "passed", "kept"]
    commit: str | None = None
    level: str | None = None
    """The kernel's level afterwards."""

    @classmethod
    def of(cls, commit: str | None, level: str | None) -> Self:
        """After acceptance, which may find everything there already."""
        return cls(type="committed" if commit else "unchanged", commit=commit, level=level)


class GaveUp(Event, frozen=True):
    """The author ends the run without a kernel."""

    type: Literal["gave.up"] = "gave.up"
    reason: str


class Prompted(Event, frozen=True):
    """What every call of a model starts with: parameters and first messages."""

    type: Literal["prompt"] = "prompt"
    request: JsonObject
    messages: list[JsonObject]
    characters: int


class Switched(Event, frozen=True):
    """Of conversations that are held at once, another goes on: what follows is of it."""

    type: Literal["conversation"] = "conversation"
    number: int
    """From 0, in the order of their prompts."""


class Requested(Event, frozen=True):
    """A call of a model begins; `worst_usd` is set aside for it."""

    type: Literal["request"] = "request"
    digest: str = ""
    max_tokens: int = 0
    """Of the answer, as far as the budget pays for it."""
    worst_usd: float | None


class Responded(Event, frozen=True):
    """A model's whole answer, and its cost; None where that is unknown."""

    type: Literal["response"] = "response"
    id: str = ""
    model: str = ""
    content: list[JsonObject] = []
    stop_reason: str = ""
    stop_details: JsonObject | None = None
    usage: JsonObject
    usd: float | None
    seconds: float = 0.0


class RequestFailed(Event, frozen=True):
    """An attempt that brought no answer; it may have cost something."""

    type: Literal["request.failed"] = "request.failed"
    error: str = ""
    wait_s: float | None = None
    """How long until the next attempt; None where there is none."""
    usage: JsonObject = {}
    usd: float | None


class LimitReached(Event, frozen=True):
    """A budget has no room for more than one further call."""

    type: Literal["limit"] = "limit"
    reason: str


class Turned(Event, frozen=True):
    """It is the model's turn: all its calls' results, then `note`."""

    type: Literal["turn"] = "turn"
    note: str


class RunFinished(Event, frozen=True):
    """The run ended in order; where not over, it can be resumed."""

    type: Literal["run.finished"] = "run.finished"
    reason: str | None = None
    best: JsonObject | None = None
    """The attempt that showed most; its text is the run's `best.py`."""


class RunFailed(Event, frozen=True):
    """The run ended by an exception."""

    type: Literal["run.failed"] = "run.failed"
    error: str = ""
    message: str = ""


@cache
def _classes() -> dict[str, type[Event]]:
    """Map each type to its class."""
    kinds = [kind for kind in Event.__subclasses__() if kind is not Unknown]
    return {name: kind for kind in kinds for name in get_args(kind.model_fields["type"].annotation)}


def event_of(line: JsonObject) -> Event:
    """Read an event of a line: `seq`, `time`, `type`, fields as `data`.

    Raises:
        ValueError: it is none, or lacks what its kind has.
    """
    place = {key: line[key] for key in ("seq", "time", "type")}
    if datetime.fromisoformat(place["time"]).tzinfo is None:
        raise ValueError(f"time {place['time']} has no zone")
    data: JsonObject = line["data"]
    if kind := _classes().get(place["type"]):
        return kind.model_validate(data | place)
    return Unknown(**place, fields=data)
