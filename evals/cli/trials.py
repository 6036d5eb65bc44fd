"""`coda-agent eval run` and `leaderboard`: authors on a suite, ranked."""

from pathlib import Path
from typing import Annotated

import typer

from coda_agent.agent import authors
from coda_agent.agent.cli.authoring import (
    BaseUrl,
    Effort,
    Model,
    Models,
    PriceIn,
    PriceOut,
    Samples,
    models_of,
    price_of,
)
from coda_agent.agent.cli.options import DeviceOption, completed
from coda_agent.agent.cli.report import columns, quiet, reported, waiting
from coda_agent.agent.device import Device
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.plain import dollars
from coda_agent.agent.reply import Reply
from coda_agent.agent.tables import by_head, filled
from coda_agent.agent.tips import Tips
from coda_agent.agent.workbench import WITHHELD
from coda_agent.agent.workspace import Workspace, find
from coda_agent.evals import leaderboard as boards
from coda_agent.evals import suites, trials
from coda_agent.evals.cluster import Cluster
from coda_agent.evals.workers import workers
from coda_agent.primitives.errors import CodaError, MachineError

_KINDS = authors.kinds().values()
_SPELLINGS = ", ".join(kind.spelling for kind in _KINDS)


@reported()
def run(
    suite: Annotated[
        str,
        typer.Option(
            help=f"{', '.join(suites.paths())}, a path.",
            autocompletion=completed(suites.paths, files=True),
        ),
    ],
    author: Annotated[list[str], typer.Option(help=f"{_SPELLINGS}; repeatable.")],
    count: Annotated[
        int | None, typer.Option("--trials", min=1, help="A spec; the suite's number by default.")
    ] = None,
    jobs: Annotated[
        int, typer.Option(min=1, help="Trials at a time, each in a process of its own.")
    ] = 1,
    dask: Annotated[
        str | None,
        typer.Option(metavar="HOST:PORT", help="Trials on the workers of a Dask scheduler."),
    ] = None,
    only: Annotated[list[str] | None, typer.Option(help="Some of the suite's specs.")] = None,
    without: Annotated[
        list[str] | None, typer.Option(help=f"Withhold {', '.join(WITHHELD)}; repeatable.")
    ] = None,
    again: Annotated[
        bool, typer.Option("--again", help="Try again what another commit tried.")
    ] = False,
    device: DeviceOption = "auto",
    model: Model = None,
    models: Models = "",
    samples: Samples = authors.Options.samples,
    effort: Effort = "high",
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    base_url: BaseUrl = "",
) -> Reply:
    """Try authors on a suite. What is done is kept; run it again to go on."""
    price, climbed = price_of(price_in, price_out), models_of(models)
    options = authors.Options(model or "", climbed, samples, effort, price=price, base_url=base_url)
    workspace = find()
    definition = suites.load(suite, workspace.root / "evals" / "suites")
    pool = Cluster(dask, workspace.root) if dask else workers(jobs)
    where = definition.device(device, pool.gpu if isinstance(pool, Cluster) else None)
    parts = _withheld(workspace, author, without or [], where)
    choice = trials.Choice([*dict.fromkeys(author)], count, only or (), again)
    plan = trials.plan(workspace, definition, choice, device=where, without=parts, options=options)
    left = len(plan.tasks)

    def tell(task: trials.Task, record: trials.Trial) -> None:
        nonlocal left
        left -= 1
        if not quiet():
            typer.echo(_said(task, record, left))

    with pool, waiting(f"{left} trials of {definition.name}"):
        made = trials.run(plan, pool, width=jobs, tell=tell)
    ranked, text = _tables(boards.boards(workspace, definition))
    path = trials.records_of(workspace.root, definition.name)
    return Reply({"records": path, **ranked, "trials": made}, text)


@reported()
def leaderboard(
    html: Annotated[
        Path | None,
        typer.Option(metavar="FILE", help="Write a page there, too, with specs by authors."),
    ] = None,
) -> Reply:
    """Rank authors from their trial records, and write docs/leaderboard.md."""
    workspace = find()
    found = boards.boards(workspace)
    if not found:
        message = "there are no trials of today's specs in evals/results"
        raise CodaError(message, hint="coda-agent eval run makes some")
    written = [boards.write(workspace.root, found)]
    written += [boards.write_html(html, found)] if html else []
    ranked, text = _tables(found)
    text = "\n".join([text, "", *(f"wrote {path}" for path in written)])
    return Reply({**ranked, "written": written}, text)


def _tables(found: boards.Boards) -> tuple[JsonObject, str]:
    """Show the table as text, and as plain data by whether a run was recorded."""
    rows = boards.table(found)
    known, said = by_head(rows), {"authors": "no", "recorded": "yes"}
    document = {key: [x for x in known if x["recorded"] == word] for key, word in said.items()}
    return document, columns(filled(rows))


def _said(task: trials.Task, record: trials.Trial, left: int) -> str:
    said = f": {record.reason}" if record.reason else ""
    cost = f"{record.spent.wall_s:.0f} s, {dollars(record.spent.usd)}; {left} left"
    return f"{task.author} {task.spec} {task.trial}: {record.outcome}{said} ({cost})"


def _withheld(
    workspace: Workspace, names: list[str], without: list[str], device: Device
) -> tuple[str, ...]:
    """List what authors are deprived of, sorted, each once.

    Raises:
        CodaError: nothing of that name can be withheld, or it would change nothing they see.
    """
    parts = tuple(sorted({*without}))
    if unknown := [part for part in parts if part not in WITHHELD]:
        raise CodaError(f"--without is {unknown[0]!r}, expected one of {', '.join(WITHHELD)}")
    deaf = [name for name in names if not authors.kind_of(name)[0].aided]
    if parts and deaf:
        raise CodaError(f"{deaf[0]} reads no tips, demos, profile or diagnosis to withhold")
    if "profile" in parts and device == "cpu":
        raise MachineError("without a GPU there is no profile to withhold")
    if "tips" in parts and not Tips.of(workspace).all():
        raise CodaError("this workspace has no tips to withhold")
    return parts
