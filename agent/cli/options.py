"""Arguments and options that commands share, and names that a shell completes."""

from collections.abc import Callable, Iterable
from glob import iglob
from typing import Annotated

import typer

from coda_agent.agent.device import Device


def completed(
    *kinds: Callable[[], Iterable[str]], files: bool = False
) -> Callable[[str], list[str]]:
    """Make a completion of names of some kinds, and of files."""

    def complete(incomplete: str) -> list[str]:
        names = {name for kind in kinds for name in kind() if name.startswith(incomplete)}
        return sorted(names) + sorted(iglob(f"{incomplete}*")) * files

    return complete


def known_kernels() -> Iterable[str]:
    """List the accepted kernels, of the workspace and of the package."""
    from coda_agent.agent.workspace import here, kernel_names

    return kernel_names(here())


def known_specs() -> Iterable[str]:
    """List the specs, of the workspace and of the package."""
    from coda_agent.agent.workspace import here, spec_names

    return spec_names(here())


DeviceOption = Annotated[Device, typer.Option("--device", help="Where the numerics run.")]
NoCommit = Annotated[bool, typer.Option("--no-commit", help="Judge, but store nothing.")]
All = Annotated[bool, typer.Option("--all", help="Every kernel of the workspace.")]
RUN = 'Name, part of one, folder or "last".'
RunName = Annotated[str, typer.Argument(metavar="RUN", help=RUN)]
Kernels = Annotated[
    list[str] | None, typer.Argument(metavar="[KERNEL]...", autocompletion=completed(known_kernels))
]
SpecName = Annotated[
    str,
    typer.Argument(
        help="A spec's path or name.", autocompletion=completed(known_specs, files=True)
    ),
]


AsJson = Annotated[bool, typer.Option("--json", help="One JSON document on stdout.")]
Contended = Annotated[bool, typer.Option("--contended", help="Time on a GPU that others use, too.")]
