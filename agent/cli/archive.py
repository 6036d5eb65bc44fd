"""`coda-agent archive`: what pages were made from, in one file for each publication."""

from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent.cli.report import reported
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workspace import find
from coda_agent.evals import archive


@reported()
def check() -> Reply:
    """Say whether every archive holds what its name says."""
    found = archive.problems(find())
    return Reply({"problems": found}, "\n".join(found) or "complete", REFUSED if found else 0)


@reported()
def unpack(
    file: Annotated[Path, typer.Argument(metavar="ARCHIVE", dir_okay=False, exists=True)],
    into: Annotated[Path, typer.Option(help="Folder.")] = Path("build", "archive"),
) -> Reply:
    """Write the files of an archive."""
    written = archive.unpack(file, into)
    return Reply({"written": written}, f"wrote {len(written)} files below {into}")
