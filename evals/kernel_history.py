"""The review of a kernel of a workspace: out of its files, its git history and its run's log."""

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

from coda_agent.agent import execution
from coda_agent.agent.judge.provenance import digests
from coda_agent.agent.judge.static import check_source
from coda_agent.agent.plain import dollars
from coda_agent.agent.runs import history
from coda_agent.agent.workspace import GitError, Kernel, Workspace, run_git
from coda_agent.evals.review import Review, Version
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.program import Program
from coda_agent.specs import Spec, load_spec


def reviewed(workspace: Workspace, kernel: Kernel, *, pictures: bool, whole: bool) -> Review:
    """The review of a kernel.

    The whole review has what gates saw, where the run is here. For pictures it has the kernel's
    programs too, traced in a worker.

    Damage is part of the review and raises nothing.
    """
    found = Review(kernel.name, Version("", "", "", {}), list(_history(workspace, kernel)))
    try:
        evidence = kernel.evidence
        held = evidence.model_dump(mode="json")
        found.current = Version("", "", "", held)
        found.cost = _cost(workspace.root / "logs" / "runs" / evidence.run)
        found.raw = _whole(workspace.root / "logs" / "runs" / evidence.run) if whole else {}
        text = kernel.program.read_text("utf-8")
        found.current = Version("", "", text, held)
        spec = found.spec = load_spec(kernel.spec)
        found.digests = digests(spec, text)
        found.stale = evidence.stale
        found.newer_spec = workspace.differing_spec(spec.name, spec.text) is not None
        if pictures:
            found.programs = _traced(spec, text)
    except (CodaError, OSError, UnicodeDecodeError) as error:
        found.faults = [" ".join(str(error).split())]
    return found


def _whole(run: Path) -> dict[str, Any]:
    """What each gate of a run's last verdict saw; nothing where the run is not here."""
    found = run.glob("artifacts/verdict-*.json")
    last = max(found, key=lambda path: int(path.stem.partition("-")[2]), default=None)
    gates = json.loads(last.read_text("utf-8"))["gates"] if last else []
    return {gate["name"]: gate["data"] for gate in gates}


def _traced(spec: Spec, text: str) -> dict[str, Program]:
    findings = check_source(text, [spec.variant(b) for b in spec.bindings()])
    if findings:
        raise CodaError(f"the program is not in the language: {findings[0].message}")
    return execution.executor().load(text)


def _history(workspace: Workspace, kernel: Kernel) -> Iterator[Version]:
    """The committed versions of a kernel, newest first."""
    folder = kernel.folder.relative_to(workspace.top).as_posix()
    paths = [f"{folder}/{file}" for file in ("kernel.py", "evidence.json")]
    try:
        said = workspace.git("log", "--format=%H %cI", "--", *paths)
    except GitError:  # nothing is committed yet
        return
    for line in said.splitlines():
        commit, _, date = line.partition(" ")
        # A commit that took the kernel away, or holds damage, is no version of it.
        with contextlib.suppress(GitError, ValueError):
            program, evidence = (
                run_git(workspace.top, "cat-file", "--filters", f"{commit}:{p}") for p in paths
            )
            yield Version(commit, date, program.decode(), json.loads(evidence))


def _cost(run: Path) -> str:
    """What the run behind a kernel took."""
    events, about = history(run)
    if not events:
        return ""
    first, last = (datetime.fromisoformat(events[i].time) for i in (0, -1))
    return (
        f"{about.steps} steps, {dollars(about.spent.usd)}, {(last - first).total_seconds():.0f} s"
    )
