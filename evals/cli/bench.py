"""`coda-agent bench`: the suites of cases, timed on this GPU."""

from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import execution
from coda_agent.agent.cli.options import completed
from coda_agent.agent.cli.report import columns, reported
from coda_agent.agent.judge.machine import require_idle
from coda_agent.agent.reply import Reply
from coda_agent.agent.tables import by_head
from coda_agent.agent.workspace import find
from coda_agent.evals import tables
from coda_agent.evals.benchmarks import SUITES, load
from coda_agent.evals.cells import Cell, Record, card, read
from coda_agent.evals.runner import Bench, Choice, chosen
from coda_agent.primitives.objects import use_cache

Some = list[str] | None


@reported(timed=True)
def bench(
    suite: Annotated[
        str, typer.Option(help=f"{', '.join(SUITES)}.", autocompletion=completed(lambda: SUITES))
    ] = "kernels",
    case: Annotated[
        Some, typer.Option("--case", "--kernel", help="Words of a case's name; repeatable.")
    ] = None,
    contender: Annotated[Some, typer.Option(help="One of the suite's; repeatable.")] = None,
    regime: Annotated[
        Some, typer.Option(help="idle, warm, steady, loop or host, not the suite's; repeatable.")
    ] = None,
    seconds: Annotated[
        float | None, typer.Option(min=0, help="Begin no further case after so long.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Measure anew what another commit measured.")
    ] = False,
    table: Annotated[
        bool, typer.Option("--table", help="Only write docs/results.md from the records.")
    ] = False,
    figure: Annotated[
        Path | None, typer.Option(metavar="FILE", help="Draw them, too; needs matplotlib.")
    ] = None,
) -> Reply:
    """Time a suite beside others on this GPU, and keep each cell; run it again to go on."""
    root = find().root
    cases, choice = (
        load(suite, root),
        Choice(case or (), contender or (), regime or (), again, seconds),
    )
    known = {one.name for one in chosen(cases, choice)}
    record = root / tables.FOLDER / f"{suite}.jsonl"
    if not table:
        execution.hopper()
        use_cache()
        require_idle()
        Bench(root, Record.now("cuda")).run(cases, choice, typer.echo)
    cells = [cell for cell in read(record, Cell).values() if not case or cell.case in known]
    cards = sorted({card(cell.machine) for cell in cells})
    written = [tables.write(root), *([tables.draw(cells, figure)] if figure else [])]
    text = ""
    for name in cards:
        rows = tables.means(cases, [cell for cell in cells if card(cell.machine) == name])
        text += f"{name}\n{columns(rows)}\n\n"
    text += "\n".join(f"wrote {path}" for path in written)
    found = by_head(tables.detail(cells)) if cells else []
    return Reply({"record": record, "pages": written, "cells": found}, text)
