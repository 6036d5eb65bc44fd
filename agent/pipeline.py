"""The main job: spec -> author -> judge -> accept, each step an event of the run's log.

The candidate's text is in the run's folder before it is judged, so a refusal, a crash or Ctrl-C
loses nothing an author wrote.
"""

import contextlib
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from coda_agent.agent import accept as acceptance
from coda_agent.agent.events import EventLog, plain
from coda_agent.agent.workspace import Run, Workspace

if TYPE_CHECKING:
    from coda_agent.agent.judge import Verdict
    from coda_agent.specs import Spec

Observer = Callable[[str, dict[str, Any]], None]
Device = Literal["auto", "cpu", "cuda"]

GATES = ("static", "compile", "numerics", "performance")


@dataclass(frozen=True)
class Outcome:
    """What became of one candidate.

    `level` is the kernel's level afterwards (a refusal stores nothing: None, or revoked by
    verify), `before` the one verify found, `commit` None where there was nothing to commit.
    """

    kernel: str
    passed: bool
    level: str | None
    before: str | None
    commit: str | None
    folder: Path | None
    run: Path
    verdict: "Verdict"

    def record(self) -> dict[str, Any]:
        """As plain JSON data."""
        return plain({**vars(self), "verdict": self.verdict.model_dump(mode="json")})


@contextlib.contextmanager
def _logged(run: Run, observer: Observer, **about: object) -> Iterator[Observer]:
    """An observer that also writes the run's log; a failure is its last event."""
    with EventLog(run.folder / "events.jsonl") as log:

        def tell(type: str, data: dict[str, Any]) -> None:
            # Progress is for eyes: no fold needs it, and each would cost a sync to disk.
            if type != "gate.progress":
                log.append(type, data)
            observer(type, data)

        tell("run.started", {"run": run.id, **about})
        try:
            yield tell
        except BaseException as error:
            message = "interrupted" if isinstance(error, KeyboardInterrupt) else str(error)
            log.append("run.failed", {"error": type(error).__name__, "message": message})
            raise
        tell("run.finished", {})


def _judge(
    spec: "Spec", text: str, run: Run, tell: Observer, device: Device, gates: tuple[str, ...]
) -> "Verdict":
    from coda_agent.agent.judge import judge_candidate

    (run.folder / "kernel.py").write_text(text, "utf-8")
    tell("candidate.saved", {"path": str(run.folder / "kernel.py")})
    verdict = judge_candidate(spec, text, device=device, gates=gates, observer=tell)
    (run.folder / "verdict.json").write_text(verdict.model_dump_json(indent=1), "utf-8")
    tell("verdict", {"passed": verdict.passed, "level": verdict.level})
    return verdict


def generate(
    workspace: Workspace,
    spec_path: Path,
    author_name: str,
    observer: Observer,
    *,
    device: Device = "auto",
    commit: bool = True,
) -> Outcome:
    """Has an author write a kernel for a spec, judges it, and accepts it when it passes.

    Raises:
        SpecError: the spec cannot be used.
        WorkspaceError: nothing could be committed; checked before the author starts.
    """
    from coda_agent.agent.authors import get_author
    from coda_agent.specs import admit, load_spec

    if commit:
        acceptance.check_identity(workspace)
    author = get_author(author_name)
    spec = load_spec(spec_path)
    run = workspace.new_run("generate", spec.name)
    with _logged(run, observer, kind="generate", spec=spec.name, author=author.name) as tell:
        admit(spec)
        tell("spec.admitted", {"path": str(spec_path), "digest": spec.digest})
        tell("author.started", {"author": author.name})
        text = author.write(spec, tell)
        tell("author.finished", {"author": author.name})
        verdict = _judge(spec, text, run, tell, device, GATES)
        sha: str | None = None
        level = verdict.level if verdict.passed else None
        if commit and verdict.passed:
            sha = acceptance.accept(
                workspace, spec, text, verdict, author=author.name, run_id=run.id
            )
            level = workspace.kernel(spec.name).level
            tell("committed" if sha else "unchanged", {"commit": sha, "level": level})
    folder = workspace.generated / spec.name if commit and verdict.passed else None
    return Outcome(spec.name, verdict.passed, level, None, sha, folder, run.folder, verdict)


def verify(
    workspace: Workspace,
    kernel: str,
    observer: Observer,
    *,
    device: Device = "auto",
    commit: bool = True,
) -> Outcome:
    """Judges an accepted kernel again on this machine, and raises or revokes its level.

    Raises:
        WorkspaceError: there is no such kernel, or nothing could be committed.
    """
    from coda_agent.specs import load_spec

    stored = workspace.kernel(kernel)
    if commit:
        acceptance.check_identity(workspace)
    before = str(stored.evidence.get("level"))
    text = stored.program.read_text("utf-8")
    spec = load_spec(stored.spec)
    run = workspace.new_run("verify", kernel)
    with _logged(run, observer, kind="verify", spec=kernel, author=None) as tell:
        verdict = _judge(spec, text, run, tell, device, GATES)
        sha: str | None = None
        level = verdict.level
        if commit:
            sha = acceptance.raise_or_revoke(workspace, kernel, verdict, run_id=run.id, text=text)
            level = workspace.kernel(kernel).level
            tell("committed" if sha else "unchanged", {"commit": sha, "level": level})
    return Outcome(kernel, verdict.passed, level, before, sha, stored.folder, run.folder, verdict)


def judge_only(
    run: Run,
    kind: str,
    spec: "Spec",
    text: str,
    observer: Observer,
    *,
    device: Device = "auto",
    gates: tuple[str, ...] = GATES,
) -> Outcome:
    """Judges a text and stores nothing but the run."""
    with _logged(run, observer, kind=kind, spec=spec.name, author=None) as tell:
        verdict = _judge(spec, text, run, tell, device, gates)
    level = verdict.level if verdict.passed else None
    return Outcome(spec.name, verdict.passed, level, None, None, None, run.folder, verdict)
