"""Commands that write for other people's frameworks and agents."""

from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import skill as skills
from coda_agent.agent.cli import targets
from coda_agent.agent.cli.options import completed, known_kernels
from coda_agent.agent.cli.report import progress, reported
from coda_agent.agent.export.objects import RUN, Wanted
from coda_agent.agent.export.repository import write
from coda_agent.agent.reply import Reply
from coda_agent.primitives.errors import CodaError
from coda_agent.runtime.dispatch import H200
from coda_agent.runtime.target import ARCHITECTURES


@reported(compiles=True)
def export(
    kernels: Annotated[
        list[str],
        typer.Argument(metavar="KERNEL...", autocompletion=completed(known_kernels)),
    ],
    out: Annotated[Path, typer.Option(help="The folder of the repository.")],
    gpu: Annotated[str, typer.Option(help="Whose measured times choose tiles.")] = H200.name,
    tiles: Annotated[int, typer.Option(min=1, help="Tiles of a kernel, at most.")] = 8,
    dtype: Annotated[
        list[str] | None, typer.Option(help="An element type of A; by default every one.")
    ] = None,
    arch: Annotated[
        list[str] | None, typer.Option(help="An architecture beside sm_90a: compiled, never run.")
    ] = None,
) -> Reply:
    """Compile kernels ahead, into a repository that torch and apache-tvm-ffi alone load."""
    if unknown := sorted(set(arch or ()) - set(ARCHITECTURES)):
        known = ", ".join(ARCHITECTURES)
        raise CodaError(f"unknown architecture {unknown[0]!r}, expected one of {known}")
    archs = tuple(dict.fromkeys((RUN, *(arch or ()))))
    wanted = Wanted(gpu, tiles, tuple(dtype or ()), archs)
    chosen = [targets.accepted(name) for name in dict.fromkeys(kernels)]
    with progress() as observer:

        def tell(done: int, total: int, note: str) -> None:
            observer(
                "gate.progress", {"gate": "export", "done": done, "total": total, "note": note}
            )

        observer("gate.started", {"gate": "export"})
        done = write(chosen, out, wanted, tell)
    lines = [
        f"{name}: {x['objects']} objects, {x['bytes'] / 2**20:.1f} MiB"
        for name, x in done["kernels"].items()
    ]
    return Reply(done, "\n".join([*lines, f"{', '.join(done['variants'])} in {out / 'build'}"]))


@reported()
def skill(
    out: Annotated[
        Path, typer.Option(help="The skill's folder, whose name is the skill's.")
    ] = Path(".agents/skills/coda-agent"),
) -> Reply:
    """Write an agent skill: how to write specs and programs, with every demonstration."""
    paths = skills.write(out)
    return Reply({"folder": out, "files": paths}, f"{out}: {len(paths)} files")
