"""The main job: spec → author → judge → accept, as events.

`drive` is the loop. An author proposes a candidate, the judge gives its verdict, and what passes
the full trial is accepted. Judge and acceptance are called here alone; an author sees verdicts.

The candidate's text is in the run's log and folder before it is judged, so a refusal, a crash or
Ctrl-C loses nothing an author wrote. A run can be left and taken up again (`reopened`).
"""

import contextlib
import importlib
import threading
from collections.abc import Iterator
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from coda_agent.agent import accept as acceptance
from coda_agent.agent import events as e
from coda_agent.agent import execution, judge, publish, references, runs
from coda_agent.agent.authors import Author
from coda_agent.agent.device import Device
from coda_agent.agent.judge import Observer, Verdict
from coda_agent.agent.judge.records import GATES, JsonObject
from coda_agent.agent.log import logged
from coda_agent.agent.plain import dollars, plain
from coda_agent.agent.workbench import Proposal, Work, Workbench, open_bench
from coda_agent.agent.workspace import Run, Workspace
from coda_agent.primitives.errors import CodaError, WorkspaceError
from coda_agent.specs import Spec, load_spec

T = TypeVar("T")

CHECKED = {"static": GATES[:1], "compile": GATES[:2], "interpret": GATES[:3], "gpu": GATES[:3]}
"""The gates of each check; `benchmark` and `submit` run them all."""
_DEVICE: dict[str, Device] = {"interpret": "cpu", "gpu": "cuda", "benchmark": "cuda"}


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate.

    `level` is the kernel's level afterwards. A refusal stores nothing, so it is None then, or
    revoked by verify. `before` is the level that verify found. `commit` is None where there was
    nothing to commit. `verdict` is None where the author ended before any, and `reason` says why it
    ended. `remark` is what is unusual about where the commit went, `cost` what a model took.
    """

    kernel: str
    passed: bool
    level: str | None
    before: str | None
    commit: str | None
    folder: Path | None
    run: Path | None
    verdict: Verdict | None
    reason: str | None = None
    remark: str = ""
    cost: str = ""

    def record(self) -> JsonObject:
        """Write it as plain JSON data."""
        verdict = self.verdict and self.verdict.model_dump(mode="json")
        return plain({**vars(self), "verdict": verdict})


def generate(
    workspace: Workspace,
    spec_path: Path,
    author: Author,
    observer: Observer,
    *,
    device: Device = "auto",
    commit: bool = True,
) -> Outcome:
    """Have an author write a kernel; judge it; accept what passes.

    Raises:
        SpecError: the spec cannot be used.
        WorkspaceError: nothing could be committed; checked before the author starts.
    """
    begin = e.RunStarted(author=author.name, device=device, commit=commit, **author.settings())
    with opened(workspace, spec_path, begin, observer) as bench:
        return work(bench, author)


def resume(workspace: Workspace, run: Run, author: Author, observer: Observer) -> Outcome:
    """Have the author of a run go on where it stopped.

    Raises:
        WorkspaceError: it is no run of an author, or another process works on it.
    """
    with reopened(workspace, run, observer, settings=author.settings()) as bench:
        return work(bench, author)


def work(bench: Workbench, author: Author) -> Outcome:
    """Have an author work at a bench; say what came of it."""
    bench.log.append(e.AuthorStarted(author=author.name))
    bench.gpu_limit_s = author.gpu_limit_s
    drive(bench, author.work(bench))
    return outcome(bench)


def drive(bench: Workbench, work: Work[T]) -> T:
    """Answer an author's proposals by verdicts; accept what passes the full trial.

    What the judge or the acceptance cannot do is raised in the author, which may go on.
    """
    try:
        proposal = next(work)
        while True:
            try:
                verdict = judge_proposal(bench, proposal)
                if proposal.check == "submit" and verdict.passed:
                    accept(bench, proposal, verdict)
            except CodaError as error:
                proposal = work.throw(error)
            else:
                proposal = work.send(verdict)
    except StopIteration as end:
        return end.value


def judge_proposal(bench: Workbench, proposal: Proposal) -> Verdict:
    """Judge a candidate before the gates of its check."""
    check = proposal.check
    terms = judge.Terms(_DEVICE.get(check, bench.state.device), CHECKED.get(check, GATES))
    bench.verdict = judge.judge_candidate(
        bench.spec, proposal.text, execution.executor(), terms=terms, observer=bench.log.observer
    )
    bench.log.verdict(bench.verdict, check)
    return bench.verdict


def accept(bench: Workbench, proposal: Proposal, verdict: Verdict) -> None:
    """Commit a candidate that passed the full trial, where the run commits.

    One that is no faster than what the run has accepted already is left.

    Raises:
        WorkspaceError: it could not be committed.
    """
    if (kept := bench.state.kept) and not bench.state.attempts[-1].beats(kept):
        bench.keep(kept)
        return
    if not bench.state.commits:
        bench.log.append(e.Stored(type="passed", level=verdict.level))
        return
    sha = acceptance.accept(
        bench.workspace, bench.spec, proposal.text, verdict,
        author=bench.state.writer or str(bench.state.author), run_id=bench.run.id,
    )  # fmt: skip
    bench.log.append(e.Stored.of(sha, bench.workspace.kernel(bench.spec.name).level))


def outcome(bench: Workbench) -> Outcome:
    """Say how the run of a workbench stands."""
    state, name = bench.state, bench.spec.name
    passed = state.passed
    folder = bench.workspace.generated / name if passed and state.commits else None
    cost = f"{state.steps} turns, {dollars(state.spent.usd)}" * bool(state.steps)
    return Outcome(
        name, passed, state.level, None, state.commit, folder, bench.run.folder, bench.verdict,
        None if passed else bench.reason, publish.remark(bench.workspace, state.commit),
        cost,
    )  # fmt: skip


@lru_cache(maxsize=64)
def _admit(spec_path: Path, text: str) -> None:
    """Admit a spec's text, once a process.

    It takes up to a second, and trials, resumed runs and sessions open the same spec again and
    again. What raises is tried again.
    """
    # Authors and gates need torch next; a worker takes as long to import it.
    threading.Thread(target=importlib.import_module, args=("torch",)).start()
    references.admitted(load_spec(spec_path, text=text))


def _check_fit(workspace: Workspace, spec: Spec) -> None:
    """Refuse what would stop a kernel's commit, before anything is spent.

    Raises:
        WorkspaceError: as `publish.check_place`; or specs/ has another text of the spec, which is
            what a kernel of this name is to be.
    """
    publish.check_place(workspace, spec.name)
    if path := workspace.differing_spec(spec.name, spec.text):
        message = f"this run's spec {spec.name} is not what {path} holds"
        raise WorkspaceError(message, hint="start a run of that, or give yours another name")


@contextlib.contextmanager
def opened(
    workspace: Workspace, spec_path: Path, begin: e.RunStarted, observer: Observer
) -> Iterator[Workbench]:
    """Open a new run's workbench.

    Args:
        begin: The run's first event, but for the run and the spec, which are added here.

    Raises:
        SpecError: the spec cannot be used; there is no run then.
        WorkspaceError: nothing could be committed; checked before the author starts.
    """
    spec = load_spec(spec_path)
    if begin.commit:
        _check_fit(workspace, spec)
    execution.executor().start(gpu=False)  # which imports while the spec is admitted
    _admit(spec_path, spec.text)
    run = workspace.new_run("generate", spec.name)
    (run.folder / "spec.md").write_text(spec.text, "utf-8")
    begin = begin.model_copy(update={"run": run.id, "kind": "generate", "spec": spec.name})
    with logged(run, observer, begin) as log:
        log.append(e.SpecAdmitted(path=spec_path.name, digest=spec.digest))
        yield open_bench(workspace, run, spec, log)


@contextlib.contextmanager
def reopened(
    workspace: Workspace, run: Run, observer: Observer, *, settings: JsonObject | None = None
) -> Iterator[Workbench]:
    """Open a run's workbench as it was left, with its own spec.

    A run that was left between two calls of tools goes on without an event of its own, so the time
    between them is its author's.

    Raises:
        SpecError: its spec cannot be used.
        WorkspaceError: it is no run of an author, its spec is not the one that was admitted,
            another process works on it, or nothing that it may still accept could be committed.
    """
    state = runs.state(run)
    if state.kind != "generate":
        raise WorkspaceError(f"{run.id} is not the run of an author")
    spec = load_spec(run.folder / "spec.md")
    if state.admitted is None:
        _admit(spec.path, spec.text)  # the process was killed before it wrote that down
    elif spec.digest != state.admitted:
        raise WorkspaceError(f"{spec.path} was not admitted", hint="start another run")
    if state.commits and not state.over:
        _check_fit(workspace, spec)
    ended = state.over is None and state.outcome in ("stopped", "failed")
    resumed = e.RunResumed(run=run.id, **(settings or {})) if settings or ended else None
    with logged(run, observer, resumed) as log:
        if state.admitted is None:
            log.append(e.SpecAdmitted(path=spec.path.name, digest=spec.digest))
        yield open_bench(workspace, run, spec, log)
