"""The command that tells other people's agents what authors here are told."""

from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import skill as skills
from coda_agent.agent.cli.report import reported
from coda_agent.agent.reply import Reply


@reported()
def skill(
    out: Annotated[Path, typer.Option(help="The skill's folder, whose name is the skill's.")],
) -> Reply:
    """Write an agent skill: how to write specs and programs, with every demonstration."""
    paths = skills.write(out)
    return Reply({"folder": out, "files": paths}, f"{out}: {len(paths)} files")
