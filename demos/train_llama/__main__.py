"""The command, `python -m coda_agent.demos.train_llama`.

Exit codes: 0 done, 1 losses beyond seed noise, 2 bad input, 3 no Hopper GPU, 130 interrupted.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from coda_agent.primitives.errors import CodaError, no_hopper


class Device(StrEnum):
    cpu = "cpu"
    cuda = "cuda"


app = typer.Typer(add_completion=False, rich_markup_mode=None, pretty_exceptions_enable=False)


@app.command()
def main(
    out: Annotated[Path, typer.Option(help="Folder of results, and of a run to go on with.")],
    steps: Annotated[int, typer.Option(min=1, help="Steps of each model.")] = 300,
    seeds: Annotated[int, typer.Option(min=1, help="Seeds, each of which trains all models.")] = 3,
    size: Annotated[
        str, typer.Option(help="tiny or 180m; by default tiny on a CPU and 180m on a GPU.")
    ] = "",
    device: Annotated[
        Device | None, typer.Option(help="By default the GPU, if there is a Hopper one.")
    ] = None,
    compare: Annotated[bool, typer.Option(help="Train by PyTorch as well.")] = True,
    save_every: Annotated[
        int, typer.Option(min=0, help="Steps between two states on disk; 0: when interrupted only.")
    ] = 100,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw the losses, too; needs matplotlib.")
    ] = None,
) -> None:
    """Train a small Llama by the kernels and by PyTorch, and compare losses, time and memory."""
    try:
        done = _run(out, steps, seeds, size, device, compare, save_every, figure)
    except (CodaError, OSError) as error:
        typer.echo(f"train_llama: {error}", err=True)
        raise typer.Exit(getattr(error, "exit_code", 2)) from error
    raise typer.Exit(done)


def _run(
    out: Path, steps: int, seeds: int, size: str, device: str | None, compare: bool,
    save_every: int, figure: Path | None,
) -> int:  # fmt: skip
    import torch
    from rich.console import Console
    from rich.progress import (
        BarColumn,
        MofNCompleteColumn,
        Progress,
        TextColumn,
        TimeRemainingColumn,
    )
    from rich.table import Table

    from coda_agent.demos.train_llama import results, training
    from coda_agent.demos.train_llama.model import SIZES

    hopper = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    device = device or ("cuda" if hopper else "cpu")
    if device == "cuda" and not hopper:
        raise no_hopper("--device cpu trains a tiny one")
    size = size or ("180m" if device == "cuda" else "tiny")
    if size not in SIZES:
        raise CodaError(f"no size {size!r}, expected {' or '.join(SIZES)}")
    settings = training.Settings(steps, seeds, size, str(device), compare)
    columns = (
        BarColumn(),
        MofNCompleteColumn(),
        TimeRemainingColumn(),
        TextColumn("{task.description}"),
    )
    with _asked_to_stop() as asked, Progress(*columns, console=Console(stderr=True)) as bar:
        task = bar.add_task("", total=steps * seeds)
        records = training.train(
            settings, out, save_every=save_every,
            tick=lambda done, said: bar.update(task, completed=done, description=said),
            stopped=lambda: bool(asked),
        )  # fmt: skip
    if records is None:
        typer.echo(f"Interrupted. The same command goes on from {out / 'state.pt'}.", err=True)
        return 130
    sizes = SIZES[size]
    header, *body = results.rows(records, sizes.batch * sizes.context)
    interpreted = "; on a CPU kernels are interpreted" if device == "cpu" else ""
    table = Table(*header, box=None, title=f"{steps} steps, {size}, {device}{interpreted}")
    for row in body:
        table.add_row(*row)
    Console().print(table)
    within, lines = results.verdict(records)
    typer.echo("\n".join(lines))
    if figure:
        results.draw(records, figure)
    return 0 if within else 1


@contextmanager
def _asked_to_stop() -> Iterator[list[int]]:
    """Signals to stop that came: the step under way ends first. A second one ends at once."""
    asked, before = list[int](), {}

    def ask(number: int, _: object) -> None:
        asked.append(number)
        for which, handler in before.items():
            signal.signal(which, handler)

    before = {which: signal.signal(which, ask) for which in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield asked
    finally:
        for which, handler in before.items():
            signal.signal(which, handler)


if __name__ == "__main__":
    sys.exit(app())
