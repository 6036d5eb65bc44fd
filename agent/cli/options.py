"""Arguments and options that commands share."""

import functools
import inspect
import os
from collections.abc import Callable
from typing import Annotated, Any, Literal

import typer

from coda_agent.agent.device import Device
from coda_agent.agent.reply import Reply

Json = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
DeviceOption = Annotated[Device, typer.Option("--device", help="Where the numerics run.")]
NoCommit = Annotated[bool, typer.Option("--no-commit", help="Judge, but store nothing.")]
All = Annotated[bool, typer.Option("--all", help="Every kernel of the workspace.")]
RunName = Annotated[str, typer.Argument(metavar="RUN", help='Name, part of one, folder or "last".')]
Kernels = Annotated[list[str] | None, typer.Argument(metavar="[KERNEL]...")]


_SHARED = {
    "sandbox": Annotated[
        Literal["bubblewrap", "landlock", "process"] | None,
        typer.Option(help="The weakest sandbox to compile in; else $CODA_AGENT_SANDBOX."),
    ],
    "contended": Annotated[
        bool, typer.Option("--contended", help="Time on a GPU that others use, too.")
    ],
    "executor": Annotated[
        str | None,
        typer.Option(
            metavar="dask://HOST:PORT",
            help="Compile, check and time on a Dask cluster; else $CODA_AGENT_EXECUTOR, else here.",
        ),
    ],
}
"""Options that hold for all that a command calls: the judge and its children read them in the
environment, as CODA_AGENT_<NAME>."""


def sharing(*names: str) -> Callable[[Callable[..., Reply]], Callable[..., Reply]]:
    """Gives a command options of `_SHARED`, before its --json; it does not take them itself.

    One that has `sandbox` begins only where a sandbox as strong works, and raises `MachineError`.
    """

    def decorate(command: Callable[..., Reply]) -> Callable[..., Reply]:
        @functools.wraps(command)
        def run(**given: Any) -> Reply:
            for name in names:
                if value := given.pop(name):
                    os.environ[f"CODA_AGENT_{name.upper()}"] = str(1 if value is True else value)
            if "sandbox" in names and os.environ.get("CODA_AGENT_SANDBOX"):
                from coda_agent.agent import sandbox

                sandbox.choose()
            return command(**given)

        signature = inspect.signature(command)
        own = list(signature.parameters.values())
        kind = inspect.Parameter.POSITIONAL_OR_KEYWORD
        last = len(own) - (own[-1].name == "as_json")
        own[last:last] = (
            inspect.Parameter(n, kind, default=None, annotation=_SHARED[n]) for n in names
        )
        run.__signature__ = signature.replace(parameters=own)  # type: ignore[attr-defined]
        return run

    return decorate
