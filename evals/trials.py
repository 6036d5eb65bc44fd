"""Trials: authors on a suite's specs, each a run, one record each.

- A trial has a workspace of its own: the tips as they were, no kernels, nothing committed. So no
  trial learns from another, and none changes what the user has. Its run is in the user's logs.
- A record is made from the run's events: scores are the judge's, and costs are counted from each
  call's usage. No text of an author is read for either.
- A trial is done when its line is in evals/results/trials-<suite>.jsonl. One that was killed has
  none, and starts anew.
"""

import contextlib
import fcntl
import itertools
import shutil
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import FIRST_COMPLETED, BrokenExecutor, Executor, Future, wait
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Literal, NamedTuple

from pydantic import Field, NonNegativeInt, PositiveFloat, PositiveInt

from coda_agent.agent import authors, pipeline
from coda_agent.agent.authors.claude.ladder import Ladder
from coda_agent.agent.authors.claude.loop import Claude
from coda_agent.agent.events import Event, Requested, RunStarted
from coda_agent.agent.judge.records import LEVELS, VERSIONS, JsonObject, Level, rank
from coda_agent.agent.judgement import Gate, Machine
from coda_agent.agent.log import read_events
from coda_agent.agent.state import Attempt, RunState, Spent
from coda_agent.agent.workspace import Workspace
from coda_agent.evals.cells import FOLDER, Judged, append, machine, program_commit, read
from coda_agent.evals.suites import Device, Suite
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import open_own
from coda_agent.specs import Spec

Outcome = Literal["proved", "verified", "accepted", "refused", "gave_up", "budget", "error",
                  "harness_fault"]  # fmt: skip
"""How a trial ended. A level says that the judge passed the candidate and showed that much. With
`refused` it did not. The others ended before a passing verdict: by the author, its budget, its
crash, or a fault of ours."""


class Trial(Judged):
    """What came of an author's one try at one spec.

    Attributes:
        suite_digest, spec_digest: Of the suite's definition, and of the spec's text in it.
        without: What the author was deprived of, sorted.
        goal: The level that counts as solved.
        reason: Why there is no passing verdict, for a reader; no score looks at it.
        program: The candidate that the outcome is about.
        attempts: How often a candidate was judged, up to the verdict that counts.
        roofline, of_gemm, over_compile: Geometric means over the timed cells: the roofline's time
            over ours, our speed over the bare product's, and over torch.compile's.
        models: That the author may ask, in its order, each as often as it begins with it.
        effort, prompt: Of a model; the prompt by the first digits of its SHA-256.
        run: The run's name: `coda-agent runs RUN`.
    """

    suite: str
    suite_digest: str
    device: Device
    spec: str
    spec_digest: str
    author: str = Field(min_length=1)
    trial: PositiveInt
    without: tuple[str, ...] = ()
    goal: Level
    outcome: Outcome
    reason: str = ""
    program: str | None = None
    attempts: NonNegativeInt = 0
    spent: Spent
    roofline: PositiveFloat | None = None
    of_gemm: PositiveFloat | None = None
    over_compile: PositiveFloat | None = None
    run: str
    models: tuple[str, ...] = ()
    effort: str = ""
    prompt: str = ""

    @property
    def key(self) -> tuple[object, ...]:
        """Two records with one key are the same trial."""
        who = self.author, self.models, self.effort, self.without
        return self.suite_digest, self.device, self.spec, self.trial, *who

    @property
    def counts(self) -> bool:
        """Whether it says something of its author, unlike faults of ours."""
        return self.outcome != "harness_fault"

    @property
    def solved(self) -> bool:
        """Whether the judge showed at least what the suite asks for."""
        return self.outcome in LEVELS and rank(self.outcome) >= rank(self.goal)

    @property
    def stale(self) -> list[str]:
        """The gates that decide otherwise now; all where it names none."""
        return super().stale if self.versions else [*VERSIONS]


@dataclass(frozen=True)
class Task:
    """One trial to be done.

    Attributes:
        options: What its author is told.
        models: Those that it may ask.
    """

    workspace: Workspace
    suite: Suite
    spec: str
    author: str
    trial: int
    device: Device
    without: tuple[str, ...] = ()
    options: authors.Options = field(default_factory=authors.Options)
    models: tuple[str, ...] = ()

    @property
    def effort(self) -> str:
        """How hard the models think, where there are any."""
        return self.options.effort if self.models else ""

    @property
    def key(self) -> tuple[object, ...]:
        """That of its record."""
        who = self.author, self.models, self.effort, self.without
        return self.suite.digest, self.device, self.spec, self.trial, *who


@dataclass(frozen=True)
class Choice:
    """Which trials of a suite are done.

    Attributes:
        authors: As `authors.kind_of` takes them.
        trials: Instead of the suite's number.
        specs: Some of the suite's; none means all.
        again: Whether what another commit tried is tried again.
    """

    authors: Sequence[str]
    trials: int | None = None
    specs: Sequence[str] = ()
    again: bool = False


class Plan(NamedTuple):
    """What is to be done, and the records of what is done."""

    tasks: list[Task]
    done: list[Trial]


def records_of(root: Path, suite: str) -> Path:
    """Name the file of a suite's records in a workspace."""
    return root / FOLDER / f"trials-{suite}.jsonl"


def plan(
    workspace: Workspace,
    suite: Suite,
    choice: Choice,
    *,
    device: Device,
    without: tuple[str, ...] = (),
    options: authors.Options | None = None,
) -> Plan:
    """List the trials of a suite still to be done.

    Args:
        without: What the authors are deprived of, sorted.
        options: What the authors are told, within the budget of the suite.

    Raises:
        CodaError: an unknown author, or a spec the suite does not have.
    """
    known = suite.spec_names(workspace)
    if unknown := [name for name in choice.specs if name not in known]:
        raise CodaError(f"{unknown[0]} is not in suite {suite.name}, which has {', '.join(known)}")
    held, commit = read(records_of(workspace.root, suite.name), Trial), program_commit()
    specs = {name: suite.spec(workspace, name) for name in choice.specs or known}
    options = options or authors.Options()
    limits = suite.budget.model_dump(exclude_none=True)
    options = replace(options, budget=replace(options.budget, **limits))
    found = Plan([], [])
    for name in choice.authors:
        kind, which = authors.kind_of(name)
        count = 1 if kind.deterministic else choice.trials or suite.trials
        for author, tried in kind.tried(which, options, workspace, known).items():
            models = _models(authors.make(author, options, workspace))
            tries = itertools.product((name for name in tried if name in specs), range(count))
            for spec, i in tries:
                task = Task(workspace, suite, spec, author, i + 1, device, without, options, models)
                record = held.get(task.key)
                if record and _stands(record, specs[spec], choice.again and commit):
                    found.done.append(record)
                else:
                    found.tasks.append(task)
    return found


def _models(author: authors.Author) -> tuple[str, ...]:
    """Name the models that an author may ask, in its order."""
    if isinstance(author, Ladder):
        return tuple(rung.model for rung in author.rungs for _ in range(rung.start, rung.stop))
    return (author.options.model,) if isinstance(author, Claude) else ()


def _stands(record: Trial, spec: Spec, commit: str | Literal[False]) -> bool:
    """Say whether a trial, of a commit where given, still holds."""
    fresh = record.counts and not record.stale and record.spec_digest == spec.digest
    return fresh and (not commit or record.commit == commit)


def run(
    plan: Plan, pool: Executor, *, width: int, tell: Callable[[Task, Trial], None] = lambda *_: None
) -> list[Trial]:
    """Do a plan's trials, `width` at a time, keeping each when done.

    A fault of ours that cost no money is tried once more, after all others. The records are held by
    one `run` at a time. `run_trial` and its task are pickled where the pool needs that.

    Returns:
        The records, those that were there already first.

    Raises:
        CodaError: another `run` writes there, or a worker died.
    """
    found = [*plan.done]
    if not plan.tasks:
        return found
    path = records_of(plan.tasks[0].workspace.root, plan.tasks[0].suite.name)
    waiting, running, again = [*reversed(plan.tasks)], dict[Future[Trial], Task](), set[object]()
    with _held(path):
        try:
            while waiting or running:
                while waiting and len(running) < width:
                    task = waiting.pop()
                    running[pool.submit(run_trial, task)] = task
                for future in wait(running, return_when=FIRST_COMPLETED).done:
                    task, record = running.pop(future), future.result()
                    append(path, [record])
                    if record.counts or record.spent.usd != 0 or task.key in again:
                        found.append(record)
                        tell(task, record)
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
def _held(path: Path) -> Iterator[None]:
    """Hold a file of records for this process alone."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with open_own(path) as file:
        try:
            fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            raise CodaError(f"another evaluation writes to {path}") from None
        yield


def run_trial(task: Task) -> Trial:
    """Do one trial; its record."""
    begun: list[str] = []

    def watch(type: str, data: JsonObject) -> None:
        if type == "run.started":
            begun.append(data["run"])

    spec = task.suite.spec(task.workspace, task.spec)
    author = authors.make(task.author, task.options, task.workspace)
    settings = author.settings()
    if task.without:
        settings["withheld"] = task.without
    begin = RunStarted(author=author.name, device=task.device, commit=False, **settings)
    with _aside(task.workspace, spec, tips="tips" not in task.without) as (where, path):
        try:
            with pipeline.opened(where, path, begin, watch) as bench:
                pipeline.work(bench, author)
        except Exception:
            # What went wrong is the run's last event, which is what the record is made from.
            if not begun:
                raise
    log = task.workspace.root / "logs" / "runs" / begun[0] / "events.jsonl"
    return record_of(read_events(log), task, spec, begun[0])


@contextlib.contextmanager
def _aside(workspace: Workspace, spec: Spec, *, tips: bool) -> Iterator[tuple[Workspace, Path]]:
    """Make a trial's workspace: today's tips, the spec, shared logs."""
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


def record_of(events: Sequence[Event], task: Task, spec: Spec, run: str) -> Trial:
    """Make the record of a trial from all events of its run."""
    state = RunState.of(events)
    submitted = [attempt for attempt in state.attempts if attempt.check == "submit"]
    final = state.kept or (submitted[-1] if submitted else None)
    outcome, reason = _outcome(state, final)
    judged = final.judgement if final and outcome in (*LEVELS, "refused") else None
    gates = judged.gates if judged else {}
    timed = judged if outcome in LEVELS else None
    where = state.attempts[-1].machine if state.attempts else Machine(device=task.device)
    return Trial(
        commit=program_commit(), date=events[-1].time[:10],
        machine=machine(where),
        suite=task.suite.name, suite_digest=task.suite.digest, device=task.device,
        spec=spec.name, spec_digest=spec.digest,
        author=task.author, trial=task.trial, without=task.without,
        goal="proved" if task.device == "cpu" else task.suite.goal,  # a CPU shows no more
        outcome=outcome, reason=" ".join(reason.split())[:400],
        program=final and final.text, attempts=final.number if final else len(state.attempts),
        spent=state.spent, run=run, models=task.models, effort=task.effort,
        prompt=next((e.digest[:12] for e in events if isinstance(e, Requested)), ""),
        versions=_versions(gates),
        roofline=timed and timed.mean("roofline"), of_gemm=timed and timed.mean("of_gemm"),
        over_compile=timed and timed.mean("over_compile"),
    )  # fmt: skip


def _versions(gates: Mapping[str, Gate]) -> dict[str, int]:
    """Take the deciding gates' versions, or all where none decided."""
    ran = {name: gate.version for name, gate in gates.items() if gate.passed is not None}
    return ran or dict(VERSIONS)


def _outcome(state: RunState, final: Attempt | None) -> tuple[Outcome, str]:
    """Say how a trial ended, and why, by its last full trial."""
    verdict, reason = final and final.judgement, state.reason or ""
    if verdict and verdict.passed and verdict.level:
        return verdict.level, ""
    failure = state.failure
    if state.options is not None and not state.steps and not state.gave_up:
        return "harness_fault", f"no call was answered: {failure.message if failure else reason}"
    if failure:
        if state.writing and failure.error in ("ProgramError", "Refusal"):
            return "gave_up", failure.message
        theirs = state.writing or failure.error in ("Stopped", "Declined")
        return ("error" if theirs else "harness_fault"), f"{failure.error}: {failure.message}"
    if state.gave_up:
        return "gave_up", reason
    if not state.finished:
        return "harness_fault", "the run did not end"
    if reason.startswith("budget: "):
        return "budget", reason.removeprefix("budget: ")
    return ("refused", verdict.finding) if verdict else ("gave_up", reason)
