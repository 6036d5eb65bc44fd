"""Trials: authors on the specs of a suite, each a run like any other, each leaving one record.

- A trial has a workspace of its own: the tips as they were, no kernels, nothing committed. So no
  trial learns from another, and none changes what the user has. Its run is in the user's logs.
- `tally.record_of` makes the record from the run's events and from nothing else.
- A trial is done when its record is on disk. One that was killed has none, and starts anew.
"""

import contextlib
import fcntl
import os
import shutil
import tempfile
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from coda_agent.agent import authors, pipeline
from coda_agent.agent.judge.records import Level
from coda_agent.agent.log import read_events
from coda_agent.agent.workspace import Workspace
from coda_agent.evals import staleness
from coda_agent.evals.definitions import Suite
from coda_agent.evals.record_files import read_records, write_definition, write_record
from coda_agent.evals.records import Device, TrialKey, TrialRecord
from coda_agent.evals.tally import record_of
from coda_agent.primitives.errors import CodaError
from coda_agent.specs import Spec


@dataclass(frozen=True)
class Task:
    """One trial to be done.

    Attributes:
        author: As in the record.
        options: What its author is told; each kind reads what concerns it.
    """

    workspace: Workspace
    suite: Suite
    spec: str
    author: str
    trial: int
    device: Device
    without: tuple[str, ...] = ()
    options: authors.Options = field(default_factory=authors.Options)

    @property
    def key(self) -> TrialKey:
        return TrialKey(
            self.suite.name, self.suite.digest, self.device, self.spec, self.author, self.trial,
            self.without,
        )  # fmt: skip

    @property
    def goal(self) -> Level:
        """The level that counts as solved: a machine without a GPU shows no more than proved."""
        return "proved" if self.device == "cpu" else self.suite.goal


class Plan(NamedTuple):
    """What is to be done, and the records of what is done."""

    tasks: list[Task]
    done: list[TrialRecord]


def plan(
    workspace: Workspace,
    suite: Suite,
    names: Sequence[str],
    *,
    folder: Path,
    device: Device,
    trials: int | None = None,
    repeat: bool = False,
    only: Sequence[str] = (),
    without: tuple[str, ...] = (),
    options: authors.Options | None = None,
) -> Plan:
    """The trials of a suite still to be done, of authors named as `authors.kind_of` takes them.

    Args:
        folder: The suite's records.
        trials: Instead of the suite's number.
        repeat: Whether deterministic authors have more than one.
        only: Some of the suite's specs; none means all.
        without: What the author is deprived of, sorted.
        options: What the authors are told, within the budget of the suite.

    Raises:
        CodaError: an unknown author, or a spec the suite does not have.
    """
    known = suite.spec_names(workspace)
    if unknown := [name for name in only if name not in known]:
        raise CodaError(f"{unknown[0]} is not in suite {suite.name}, which has {', '.join(known)}")
    held = {record.key: record for record in read_records(folder).records}
    specs = {name: suite.spec(workspace, name) for name in only or known}
    tasks: list[Task] = []
    done: list[TrialRecord] = []
    limits = {k: v for k, v in suite.budget.model_dump().items() if v is not None}
    options = options or authors.Options()
    options = replace(options, budget=replace(options.budget, **limits))
    for name in names:
        kind, which = authors.kind_of(name)
        count = 1 if kind.deterministic and not repeat else trials or suite.trials
        for author, tried in kind.tried(which, options, workspace, known).items():
            for spec in (name for name in tried if name in specs):
                for trial in range(1, count + 1):
                    task = Task(workspace, suite, spec, author, trial, device, without, options)
                    record = held.get(task.key)
                    if record and not staleness.needs_trial(record, suite, specs[spec]):
                        done.append(record)
                    else:
                        tasks.append(task)
    return Plan(tasks, done)


def run(
    plan: Plan,
    folder: Path,
    pool: Executor,
    *,
    width: int,
    told: Callable[[Task, TrialRecord | None], None] = lambda *_: None,
) -> list[TrialRecord]:
    """Does the trials of a plan, `width` at a time, and writes each one's record as soon as it is
    done. A fault of ours that cost no money is tried once more, after all others.

    The suite's folder is held by one `run` at a time. `run_trial` and its task are pickled where
    the pool needs that. `told` is called when a trial begins (None) and when it is done.

    Returns:
        The records, those that were there already first.

    Raises:
        CodaError: another `run` writes there, or a worker died.
    """
    found = list(plan.done)
    if not plan.tasks:
        return found
    suite = plan.tasks[0].suite
    with _held(folder):
        write_definition(folder, suite.definition)
        waiting, running = list(reversed(plan.tasks)), dict[Future[TrialRecord], Task]()
        again = set[TrialKey]()
        try:
            while waiting or running:
                while waiting and len(running) < width:
                    task = waiting.pop()
                    if task.key not in again:
                        told(task, None)
                    running[pool.submit(run_trial, task)] = task
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    task, record = running.pop(future), future.result()
                    write_record(folder, record)
                    if record.counts or record.spent.usd != 0 or task.key in again:
                        found.append(record)
                        told(task, record)
                    else:
                        again.add(task.key)
                        waiting.insert(0, task)
        except BrokenExecutor as error:
            hint = "the same command goes on; finished trials are kept"
            raise CodaError(f"a worker died: {error}", hint=hint) from error
        finally:
            for future in running:
                future.cancel()
    return found


@contextlib.contextmanager
def _held(folder: Path) -> Iterator[None]:
    """The folder, to this process alone."""
    folder.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(folder, os.O_RDONLY)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        yield
    except BlockingIOError:
        raise CodaError(f"another evaluation writes to {folder}") from None
    finally:
        os.close(descriptor)


def run_trial(task: Task) -> TrialRecord:
    """Does one trial; its record."""
    begun: list[str] = []

    def watch(type: str, data: dict[str, Any]) -> None:
        if type == "run.started":
            begun.append(data["run"])

    spec = task.suite.spec(task.workspace, task.spec)
    author = authors.make(task.author, task.options, task.workspace)
    with _aside(task.workspace, spec, tips="tips" not in task.without) as (where, path):
        try:
            pipeline.generate(
                where, path, author, watch,
                device=task.device, commit=False, withheld=task.without,
            )  # fmt: skip
        except Exception:
            # What went wrong is the run's last event, which is what the record is made from.
            if not begun:
                raise
    log = Path("logs", "runs", begun[0], "events.jsonl")
    return record_of(read_events(task.workspace.root / log), task.key, spec, task.goal, log)


@contextlib.contextmanager
def _aside(workspace: Workspace, spec: Spec, *, tips: bool) -> Iterator[tuple[Workspace, Path]]:
    """A workspace for one trial: today's tips, the spec, and the logs of `workspace`."""
    runs = workspace.root / "logs" / "runs"
    runs.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(prefix="coda-agent-trial-") as name:
        root = Path(name)
        for room in ("specs", "generated", "logs"):
            (root / room).mkdir()
        (root / "logs" / "runs").symlink_to(runs)
        known = workspace.root / "logs" / "tips.jsonl"
        if tips and known.is_file():
            shutil.copy(known, root / "logs")
        path = root / "specs" / f"{spec.name}.md"
        path.write_text(spec.text, "utf-8")
        yield Workspace(root, root), path
