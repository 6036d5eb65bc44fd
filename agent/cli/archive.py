"""`coda-agent archive`: what evidence was made from, in one file for each publication."""

import json
from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent.cli.report import reported
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workspace import find
from coda_agent.evals import archive


@reported()
def pack() -> Reply:
    """Pack the raw records of all kernels into evals/archive/."""
    path = archive.pack_kernels(find())
    return Reply({"archive": path}, f"wrote {path}, {path.stat().st_size / 1e6:.1f} MB")


@reported()
def show(kernel: str) -> Reply:
    """Print what each gate saw of a kernel, whole."""
    workspace = find()
    records = archive.raw(workspace, workspace.kernel(kernel))
    return Reply(records, json.dumps(records, indent=1) if records else "no raw record is here")


@reported()
def check() -> Reply:
    """Say whether every archive holds what its name and the evidence say."""
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
