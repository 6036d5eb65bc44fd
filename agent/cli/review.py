"""`coda-agent review`: accepted kernels as a reviewer wants them, on the terminal and as pages."""

from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import find
from coda_agent.evals.kernel_history import reviewed
from coda_agent.evals.review import Review, index, ordered, write_pages
from coda_agent.primitives.errors import WorkspaceError


@reported()
def review(
    kernel: Annotated[str | None, typer.Argument(metavar="[KERNEL]")] = None,
    html: Annotated[bool, typer.Option("--html", help="Write a page per kernel.")] = False,
    out: Annotated[Path | None, typer.Option(help="Folder of --html; build/review.")] = None,
) -> Reply:
    """Show what accepted kernels stand on; what needs a look is on top."""
    workspace = find()
    chosen = [workspace.kernel(kernel)] if kernel else workspace.kernels()
    if not chosen:
        raise WorkspaceError("nothing is accepted yet", hint="coda-agent generate SPEC")
    folder = out or workspace.root / "build" / "review"
    if html:  # a place that cannot be written to is said before programs are traced
        folder.mkdir(parents=True, exist_ok=True)
    whole = html or kernel is not None
    reviews = ordered([reviewed(workspace, k, pictures=html, whole=whole) for k in chosen])
    if html:
        pages = write_pages(folder, reviews)
        return Reply({"pages": pages}, f"wrote {pages[0]} and {len(pages) - 1} kernels beside it")
    records = [r.record() for r in reviews]
    if kernel:
        return Reply(records[0], _whole(reviews[0]))
    return Reply({"kernels": records}, columns(index(reviews)))


def _whole(r: Review) -> str:
    """Everything about one kernel."""
    parts = [r.name + (f": {r.spec.summary}" if r.spec else ""), columns(r.facts())]
    for title, rows in r.tables().items():
        long = f"{len(rows) - 1} rows: coda-agent review {r.name} --html"
        parts.append(f"{title}\n{columns(rows) if len(rows) < 25 else long}")
    parts.append("\n".join(r.diff) or "No version has another program.")
    return "\n\n".join([*parts, f"grade again: coda-agent verify {r.name}"])
