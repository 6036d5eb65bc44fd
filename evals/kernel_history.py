"""The review of a kernel of a workspace: out of its files, its git history and its run's log."""

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from coda_agent.agent.judge.provenance import digests
from coda_agent.agent.plain import dollars
from coda_agent.agent.runs import history
from coda_agent.agent.workspace import GitError, Kernel, Workspace, run_git
from coda_agent.evals.archive import raw
from coda_agent.evals.review import Review, Version
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import load_spec


def reviewed(workspace: Workspace, kernel: Kernel, *, pictures: bool, whole: bool) -> Review:
    """The review of a kernel.

    The whole review has the raw records that are here. For pictures it has the kernel's programs
    too.

    Damage is part of the review and raises nothing.
    """
    found = Review(kernel.name, Version("", "", "", {}), list(_history(workspace, kernel)))
    try:
        evidence = kernel.evidence
        held = evidence.model_dump(mode="json")
        found.current = Version("", "", "", held)
        found.cost = _cost(workspace.root / "logs" / "runs" / evidence.run)
        found.raw = raw(workspace, kernel) if whole else {}
        text = kernel.program.read_text("utf-8")
        found.current = Version("", "", text, held)
        spec = found.spec = load_spec(kernel.spec)
        found.digests = digests(spec, text)
        found.stale = evidence.stale(found.digests)
        found.newer_spec = workspace.differing_spec(spec.name, spec.text) is not None
        if pictures:
            found.programs = read_programs(text, [spec.variant(b) for b in spec.bindings()])
    except (CodaError, OSError, UnicodeDecodeError) as error:
        found.faults = [" ".join(str(error).split())]
    return found


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
