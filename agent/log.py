"""A run's log: append-only JSON lines, on disk before the next step.

- One writer at a time, held by flock: two would give two events one number.
- A line counts once its newline is on disk. A torn last line is what a kill leaves; readers skip it
  and the next writer cuts it off. A bad line anywhere else is damage, and an error.
- The state of a run is a fold over its events (`state.py`); nothing else is stored. An event is
  handed to the folds once it is on disk, so what is remembered and what is rebuilt from
  the file are the same.
- Keys are taken out of whatever is written.
"""

import contextlib
import fcntl
import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Protocol, Self

from pydantic_core import from_json

from coda_agent.agent import events as e
from coda_agent.agent.events import CandidateSaved, Event, Judged, event_of
from coda_agent.agent.judge import Observer, Verdict
from coda_agent.agent.judge.provenance import sha
from coda_agent.agent.judgement import Judgement, Machine, gpu_seconds
from coda_agent.agent.keys import KEYS
from coda_agent.agent.plain import plain, utc_now
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import Run
from coda_agent.primitives.errors import WorkspaceError
from coda_agent.primitives.objects import open_own, reason


def _parse(path: Path) -> tuple[list[Event], int]:
    """Read the events of `path`, and the length of its complete lines."""
    raw = path.read_bytes() if path.exists() else b""
    whole = raw.rfind(b"\n") + 1
    events: list[Event] = []
    for number, line in enumerate(raw[:whole].splitlines(), start=1):
        try:
            events.append(event_of(dict(from_json(line, allow_inf_nan=False))))
        except (ValueError, TypeError, KeyError) as error:
            hint = "take the line out, or the run's folder away"
            raise WorkspaceError(
                f"{path}:{number} is not an event: {reason(error)}", hint=hint
            ) from error
    return events, whole


def read_events(path: Path) -> list[Event]:
    """Read a log's events, if any, without a torn last line.

    Raises:
        WorkspaceError: a line before the last is not an event.
    """
    return _parse(path)[0]


class Fold(Protocol):
    """A state that events build."""

    def apply(self, event: Event) -> None:
        """Take the next event."""
        ...


def is_written(path: Path) -> bool:
    """Whether a process holds a log to write it."""
    with path.open("rb") as file:
        try:
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError:
            return True
    return False


class RunLog:
    """The one writer of a run's log; a context manager.

    Attributes:
        observer: Told of every event, and of what gates and authors do meanwhile.
        state: What the events so far say.

    Raises:
        WorkspaceError: another writer holds the file, or it is damaged.
    """

    def __init__(self, path: Path, observer: Observer = lambda *_: None) -> None:
        path.parent.mkdir(parents=True, exist_ok=True)
        self.path, self.folder, self.observer = path, path.parent, observer
        with contextlib.ExitStack() as stack:
            self._file = stack.enter_context(open_own(path))
            try:
                fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                raise WorkspaceError(f"{path} is being written by another process") from error
            events, whole = _parse(path)
            self._file.truncate(whole)
            self._open = stack.pop_all()
        self._next = events[-1].seq + 1 if events else 0
        self.state = RunState.of(events)
        self._folds: list[Fold] = [self.state]

    def follow(self, fold: Fold) -> None:
        """Bring `fold` up to date, and keep it so."""
        for event in read_events(self.path):
            fold.apply(event)
        self._folds.append(fold)

    def append(self, event: Event) -> Event:
        """Write an event on disk, then tell folds and the observer."""
        event = event.model_copy(update={"seq": self._next, "time": utc_now()})
        line = json.dumps(
            plain(event.line()), ensure_ascii=False, separators=(",", ":"), allow_nan=False
        )
        if (clean := KEYS.redacted(line)) != line:
            line, event = clean, event_of(json.loads(clean))
        self._file.write(line.encode("utf-8", "backslashreplace") + b"\n")
        self._file.flush()
        os.fsync(self._file.fileno())
        self._next += 1
        for fold in self._folds:
            fold.apply(event)
        self.observer(event.type, event.data)
        return event

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._open.close()

    def artifact(self, name: str, text: str) -> str:
        """Write a file of the run; its path from the run's folder."""
        path = self.folder / "artifacts" / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(KEYS.redacted(text), "utf-8", errors="replace")
        return str(path.relative_to(self.folder))

    def candidate(self, text: str) -> str:
        """Make `text` the candidate, on disk before it is judged; its digest."""
        (self.folder / "kernel.py").write_text(text, "utf-8", errors="replace")
        saved = CandidateSaved(path="kernel.py", digest=short_digest(text), text=text)
        self.append(saved)
        return saved.digest

    def verdict(self, verdict: Verdict, check: str) -> None:
        """Record a verdict: whole as an artifact, in short as an event."""
        number = len(self.state.attempts) + 1
        self.artifact(f"verdict-{number}.json", verdict.model_dump_json(indent=1))
        judged = Judged(
            number=number, check=check, judgement=Judgement.of(verdict),
            machine=Machine.of(verdict.environment), gpu_s=gpu_seconds(verdict),
            replay=verdict.replay,
        )  # fmt: skip
        self.append(judged)


@contextlib.contextmanager
def logged(run: Run, observer: Observer, begin: Event | None) -> Iterator[RunLog]:
    """Open a run's log; `begin` comes first, and a failure last."""
    KEYS.take()
    with RunLog(run.folder / "events.jsonl", observer) as log:
        try:
            if begin:
                log.append(begin)
            yield log
        except BaseException as error:
            message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            log.append(e.RunFailed(error=error.__class__.__name__, message=message))
            raise


@contextlib.contextmanager
def short_run(run: Run, observer: Observer, kind: str, spec: str) -> Iterator[RunLog]:
    """Open the log of a run that ends with the command."""
    with logged(run, observer, e.RunStarted(run=run.id, kind=kind, spec=spec)) as log:
        yield log
        log.append(e.RunFinished())


def short_digest(text: str) -> str:
    """Name a text by the first twelve digits of its SHA-256."""
    return sha(text).removeprefix("sha256:")[:12]
