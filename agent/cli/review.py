"""`coda-agent review`: accepted kernels as a reviewer wants them, on the terminal and as pages."""

import contextlib
import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from coda_agent.agent.cli.report import Reply, columns, reported
from coda_agent.agent.cli.targets import Json
from coda_agent.agent.workspace import GitError, Kernel, Workspace, find, run_git
from coda_agent.primitives.errors import CodaError, WorkspaceError

if TYPE_CHECKING:
    from coda_agent.evals.review import Review, Version
    from coda_agent.primitives.program import Program
    from coda_agent.specs import Spec


@reported
def review(
    kernel: Annotated[str | None, typer.Argument(metavar="[KERNEL]")] = None,
    html: Annotated[bool, typer.Option("--html", help="Write a page per kernel.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of --html; build/review.")] = None,
    as_json: Json = False,
) -> Reply:
    """Show what accepted kernels stand on; what needs a look is on top."""
    from coda_agent.evals.review import ordered, write_pages

    workspace = find()
    chosen = [workspace.kernel(kernel)] if kernel else workspace.kernels()
    if not chosen:
        raise WorkspaceError("nothing is accepted yet", hint="coda-agent generate SPEC")
    folder = out or workspace.root / "build" / "review"
    if html:  # a place that cannot be written to is said before programs are traced
        folder.mkdir(parents=True, exist_ok=True)
    reviews = ordered([_reviewed(workspace, k, pictures=html) for k in chosen])
    if html:
        pages = write_pages(folder, reviews)
        return Reply({"pages": pages}, f"wrote {pages[0]} and {len(pages) - 1} kernels beside it")
    records = [r.record() for r in reviews]
    if kernel:
        return Reply(records[0], _whole(reviews[0]))
    return Reply({"kernels": records}, _list(reviews))


def _reviewed(workspace: Workspace, kernel: Kernel, *, pictures: bool) -> "Review":
    """The review of a kernel; for pictures with its programs, traced in a worker.

    Damage is part of the review and raises nothing.
    """
    from coda_agent.agent.judge.provenance import digests
    from coda_agent.evals.review import Review, Version
    from coda_agent.specs import load_spec

    found = Review(kernel.name, Version("", "", "", {}), list(_history(workspace, kernel)))
    try:
        evidence = kernel.evidence
        found.current = Version("", "", "", evidence)
        found.cost = _cost(workspace.root / "logs" / "runs" / str(evidence.get("run")))
        text = kernel.program.read_text("utf-8")
        found.current = Version("", "", text, evidence)
        spec = found.spec = load_spec(kernel.spec)
        found.digests = digests(spec, text)
        found.newer_spec = workspace.differing_spec(spec.name, spec.text) is not None
        if pictures:
            found.programs = _traced(spec, text)
    except (CodaError, OSError, UnicodeDecodeError) as error:
        found.faults = [" ".join(str(error).split())]
    return found


def _traced(spec: "Spec", text: str) -> "dict[str, Program]":
    from coda_agent.agent.execution import executor
    from coda_agent.agent.judge.static import check_source

    findings = check_source(text, [spec.variant(b) for b in spec.bindings()])
    if findings:
        raise CodaError(f"the program is not in the language: {findings[0].message}")
    return executor().load(text)


def _history(workspace: Workspace, kernel: Kernel) -> "Iterator[Version]":
    """The committed versions of a kernel, newest first."""
    from coda_agent.evals.review import Version

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
    from coda_agent.agent.events import read_events, summary

    if not (events := read_events(run / "events.jsonl")):
        return ""
    about = summary(events)
    first, last = (datetime.fromisoformat(events[i].time) for i in (0, -1))
    return f"{about.steps} steps, ${about.usd:.2f}, {(last - first).total_seconds():.0f} s"


def _list(reviews: "list[Review]") -> str:
    from coda_agent.evals.review import label

    rows = [("kernel", "level", "age", "of GEMM / over compile, slowest dtype",
             "since the version before", "needs a look")]  # fmt: skip
    for r in reviews:
        speed = "  ".join(
            f"{label(c['sizes'])} {c['of_gemm']['ratio']:.3f}/{c['over_compile']['ratio']:.3f}"
            for c in r.slowest
        )
        look = "; ".join(flag.text for flag in r.flags)
        rows.append((r.name, r.current.level, r.age, speed or "–", r.since, look or "no"))
    return columns(rows)


def _whole(r: "Review") -> str:
    """Everything about one kernel."""
    parts = [r.name + (f": {r.spec.summary}" if r.spec else ""), columns(r.facts())]
    for title, rows in r.tables().items():
        long = f"{len(rows) - 1} rows: coda-agent review {r.name} --html"
        parts.append(f"{title}\n{columns(rows) if len(rows) < 25 else long}")
    parts.append("\n".join(r.diff) or "No version has another program.")
    return "\n\n".join([*parts, f"grade again: coda-agent verify {r.name}"])
