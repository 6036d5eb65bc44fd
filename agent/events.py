"""The event log of a run: append-only JSON lines, on disk before the next step begins.

- One writer at a time, held by flock: two would give two events one number.
- A line counts once its newline is on disk. A torn last line is what a kill leaves; readers skip it
  and the next writer cuts it off. A bad line anywhere else is damage, and an error.
- The state of a run is a fold over its events (`summary`); nothing else is stored. A `Recorder`
  writes events and hands each to the folds that follow it, so what is remembered in a process and
  what is rebuilt from the file are the same.
- Secrets are taken out of the environment once (`take_secrets`) and out of whatever is written.
"""

import fcntl
import json
import math
import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import TracebackType
from typing import TYPE_CHECKING, Any, Protocol, Self, cast

from coda_agent.primitives.errors import WorkspaceError

if TYPE_CHECKING:
    from coda_agent.agent.judge import Observer

_SECRET_NAMES = ("ANTHROPIC_API_KEY", "ANTHROPIC_AUTH_TOKEN")
_secrets: dict[str, str] = {}


def take_secrets() -> dict[str, str]:
    """The keys this process was started with, by name; no child process inherits them after."""
    for name in _SECRET_NAMES:
        if value := os.environ.pop(name, ""):
            _secrets[name] = value
    return _secrets


def has_secrets() -> bool:
    """Whether there is a key, taken already or not."""
    return bool(_secrets) or any(os.environ.get(name) for name in _SECRET_NAMES)


def redacted(text: str) -> str:
    """`text` without the secrets of `take_secrets`."""
    for name, value in _secrets.items():
        text = text.replace(value, f"<{name}>")
    return text


def plain(value: object) -> Any:
    """`value` as JSON can hold it: records become dicts, non-finite floats and the rest strings."""
    if isinstance(value, float):
        return value if math.isfinite(value) else str(value)
    if value is None or isinstance(value, bool | int | str):
        return value
    if isinstance(value, Mapping):
        items = cast(Mapping[object, object], value).items()
        return {str(key): plain(item) for key, item in items}
    if isinstance(value, list | tuple | set | frozenset):
        return [plain(item) for item in cast(Iterable[object], value)]
    dump = getattr(value, "model_dump", None)
    return plain(dump()) if callable(dump) else str(value)


def utc_now() -> str:
    return datetime.now(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")


@dataclass(frozen=True)
class Event:
    """One line of the log."""

    seq: int
    time: str
    type: str
    data: dict[str, Any]


def _parse(path: Path) -> tuple[list[Event], int]:
    """The events of `path`, and the length in bytes of its complete lines."""
    raw = path.read_bytes() if path.exists() else b""
    whole = raw.rfind(b"\n") + 1
    events: list[Event] = []
    for number, line in enumerate(raw[:whole].splitlines(), start=1):
        try:
            events.append(Event(**json.loads(line)))
        except (ValueError, TypeError) as error:
            raise WorkspaceError(f"{path}:{number} is not an event: {error}") from error
    return events, whole


def read_events(path: Path) -> list[Event]:
    """The events of a log, without a torn last line; a log that is not there has none.

    Raises:
        WorkspaceError: a line before the last is not an event.
    """
    return _parse(path)[0]


class EventLog:
    """The one writer of a log file; a context manager.

    Raises:
        WorkspaceError: another writer holds the file, or it is damaged.
    """

    def __init__(self, path: Path) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path = path
        self._file = path.open("ab")
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            events, whole = _parse(path)
        except BlockingIOError as error:
            self._file.close()
            raise WorkspaceError(f"{path} is being written by another process") from error
        except WorkspaceError:
            self._file.close()
            raise
        self._file.truncate(whole)
        self._next = events[-1].seq + 1 if events else 0

    def append(self, type: str, data: Mapping[str, object] | None = None) -> Event:
        """Writes one event; it is on disk when this returns."""
        event = Event(self._next, utc_now(), type, plain(data or {}))
        line = json.dumps(vars(event), ensure_ascii=False, separators=(",", ":"), allow_nan=False)
        if (clean := redacted(line)) != line:
            line, event = clean, Event(**json.loads(clean))
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._next += 1
        return event

    def close(self) -> None:
        """Gives the file up to other writers."""
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()


class Fold(Protocol):
    """A state that events build."""

    def apply(self, event: Event) -> None:
        """Takes the next event."""
        ...


class Recorder:
    """Writes a run's events, and hands each to the folds and to the observer.

    Callable as an observer. Progress is for eyes only: no fold needs it, and each would cost a
    sync to disk.
    """

    def __init__(self, log: EventLog, observer: "Observer" = lambda *_: None) -> None:
        self._log, self.observer = log, observer
        self._folds: list[Fold] = []

    def follow(self, fold: Fold) -> None:
        """Brings `fold` up to date and keeps it so."""
        for event in read_events(self._log.path):
            fold.apply(event)
        self._folds.append(fold)

    def __call__(self, type: str, data: dict[str, Any]) -> None:
        if type != "gate.progress":
            event = self._log.append(type, data)
            for fold in self._folds:
                fold.apply(event)
        self.observer(type, data)


@dataclass(frozen=True)
class GateState:
    """How far one gate came; `passed` is None while it runs."""

    passed: bool | None = None
    seconds: float | None = None


@dataclass(frozen=True)
class RunState:
    """What a run's events say about it.

    `outcome` is running, passed, refused, failed, or stopped: an author ended without a verdict,
    and `reason` says why.
    """

    kind: str | None = None
    spec: str | None = None
    author: str | None = None
    gates: dict[str, GateState] = field(default_factory=dict[str, GateState])
    level: str | None = None
    commit: str | None = None
    outcome: str = "running"
    reason: str | None = None
    error: str | None = None
    usd: float = 0.0
    steps: int = 0


def summary(events: Iterable[Event]) -> RunState:
    """Folds the events of a run into its state; unknown types change nothing."""
    state = RunState()
    for event in events:
        data = event.data
        if event.type == "run.started":
            state = replace(state, **{key: data.get(key) for key in ("kind", "spec", "author")})
        elif event.type in ("gate.started", "gate.finished"):
            gate = GateState(data.get("passed"), data.get("seconds"))
            state = replace(state, gates=state.gates | {str(data["gate"]): gate})
        elif event.type == "verdict":
            outcome = "passed" if data.get("passed") else "refused"
            state = replace(state, level=data.get("level"), outcome=outcome)
        elif event.type == "committed":
            state = replace(state, commit=data.get("commit"))
        elif event.type == "run.failed":
            state = replace(state, outcome="failed", error=data.get("message"))
        elif event.type == "run.resumed" and state.outcome in ("stopped", "failed"):
            state = replace(state, outcome="running", reason=None, error=None)
        elif event.type == "run.finished":
            outcome = "stopped" if state.outcome == "running" else state.outcome
            state = replace(state, outcome=outcome, reason=data.get("reason"))
        elif event.type in ("response", "request.failed"):
            step = int(event.type == "response")
            usd = state.usd + data.get("usd", 0.0)
            state = replace(state, usd=usd, steps=state.steps + step)
    return state
