"""`coda-agent review`: accepted kernels as a reviewer wants them, on the terminal and as pages."""

from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import review as reviews
from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.reply import Reply
from coda_agent.agent.tables import by_head
from coda_agent.agent.workspace import find
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
    if html:
        folder.mkdir(parents=True, exist_ok=True)
    found = reviews.review(workspace, chosen)
    if html:
        pages = reviews.write_pages(folder, found)
        return Reply({"pages": pages}, f"wrote {pages[0]} and {len(pages) - 1} kernels beside it")
    records = [
        {"kernel": r.kernel.name, "level": r.kernel.level, "look": r.look,
         "tables": {title: by_head(rows) for title, rows in reviews.tables(r.kernel).items()}}
        for r in found
    ]  # fmt: skip
    if kernel is None:
        return Reply({"kernels": records}, columns(reviews.index(found)))
    parts = [kernel, columns(reviews.facts(found[0]))]
    parts += [f"{title}\n{columns(rows)}" for title, rows in reviews.tables(chosen[0]).items()]
    return Reply(records[0], "\n\n".join(parts))
