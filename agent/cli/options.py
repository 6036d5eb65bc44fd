"""Arguments and options that commands share."""

from typing import Annotated

import typer

from coda_agent.agent.device import Device

DeviceOption = Annotated[Device, typer.Option("--device", help="Where the numerics run.")]
NoCommit = Annotated[bool, typer.Option("--no-commit", help="Judge, but store nothing.")]
All = Annotated[bool, typer.Option("--all", help="Every kernel of the workspace.")]
RUN = 'Name, part of one, folder or "last".'
RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN)]
Kernels = Annotated[list[str] | None, typer.Argument(metavar="[KERNEL]...")]


SHARED = {
    "as_json": Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")],
    "contended": Annotated[
        bool, typer.Option("--contended", help="Time on a GPU that others use, too.")
    ],
}
"""Options that `report.reported` gives commands, which do not take them themselves. All but --json
hold for what a command calls: the judge and its children read them in the environment, as
CODA_AGENT_<NAME>."""
