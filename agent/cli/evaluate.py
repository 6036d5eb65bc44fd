"""`coda-agent eval run` and `ablate`: authors on a suite."""

import contextlib
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Annotated

import typer
from rich.live import Live
from rich.table import Table
from rich.text import Text

from coda_agent.agent import authors
from coda_agent.agent.cli.authoring import BaseUrl, Effort, PriceIn, PriceOut, price_of
from coda_agent.agent.cli.options import DeviceOption
from coda_agent.agent.cli.report import columns, quiet, reported
from coda_agent.agent.device import Device
from coda_agent.agent.plain import dollars
from coda_agent.agent.reply import Reply
from coda_agent.agent.workspace import find
from coda_agent.evals import comparison, definitions, metrics, records, trials
from coda_agent.evals.record_files import read_records, trials_folder
from coda_agent.evals.workers import workers
from coda_agent.primitives.errors import CodaError

_KINDS = authors.kinds().values()
_SPELLINGS = ", ".join(kind.spelling for kind in _KINDS)
_DETERMINISTIC = " and ".join(kind.name for kind in _KINDS if kind.deterministic)
_AIDED = ", ".join(kind.spelling for kind in _KINDS if kind.aided)

SuiteName = Annotated[str, typer.Option("--suite", help="smoke, paper, catalogue, blocks, a path.")]
Trials = Annotated[
    int | None, typer.Option("--trials", min=1, help="A spec; the suite's number by default.")
]
Jobs = Annotated[int, typer.Option(min=1, help="Trials at a time, each in a process of its own.")]
Only = Annotated[list[str] | None, typer.Option(help="Some of the suite's specs.")]
_Told = Callable[[trials.Task, records.TrialRecord | None], None]
Out = Annotated[Path | None, typer.Option(help="Folder of the records; evals/results/trials.")]


@reported("executor")
def run(
    suite: SuiteName,
    author: Annotated[list[str], typer.Option(help=f"{_SPELLINGS}; repeatable.")],
    count: Trials = None,
    jobs: Jobs = 1,
    only: Only = None,
    repeat: Annotated[
        bool, typer.Option("--repeat", help=f"More than one trial of {_DETERMINISTIC}, too.")
    ] = False,
    device: DeviceOption = "auto",
    effort: Effort = "high",
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    base_url: BaseUrl = "",
    out: Out = None,
) -> Reply:
    """Try authors on a suite. What is done is kept; run it again to go on."""
    options = authors.Options(effort=effort, price=price_of(price_in, price_out), base_url=base_url)
    session = _Session(suite, author, device, out, options)
    found = session.tried(count, jobs, only or [], repeat=repeat)
    together = session.suite.groups
    said = comparison.document(found, together)
    text = columns(comparison.summary(found))
    if together:
        text += f"\n\n{columns(comparison.chances(said, together))}"
    return Reply({"folder": session.folder, "authors": said}, text)


@reported("executor")
def ablate(
    suite: SuiteName,
    author: Annotated[str, typer.Option(help=f"{_AIDED}.")],
    without: Annotated[list[str], typer.Option(help="tips, demos, profile or diagnosis.")],
    count: Trials = None,
    jobs: Jobs = 1,
    only: Only = None,
    device: DeviceOption = "auto",
    effort: Effort = "high",
    price_in: PriceIn = None,
    price_out: PriceOut = None,
    base_url: BaseUrl = "",
    out: Out = None,
) -> Reply:
    """Try an author with a part of its help and without, and say what the part is worth."""
    options = authors.Options(effort=effort, price=price_of(price_in, price_out), base_url=base_url)
    session = _Session(suite, [author], device, out, options)
    parts = comparison.withheld(session.workspace, author, without, session.device)
    arms = [session.tried(count, jobs, only or [], without=w) for w in ((), parts)]
    full, deprived = (metrics.by_spec(r for rs in arm.values() for r in rs) for arm in arms)
    if not (found := comparison.compare(full, deprived)):
        hint = columns(comparison.summary(arms[0]))
        raise CodaError("no spec has a trial that counts in both arms", hint=hint)
    few = f"\n(fewer than {metrics.MIN_SPECS} specs show no difference, whatever the figures)"
    text = columns(comparison.ablation(found, f"without {', '.join(parts)}"))
    text += few * (len(set(full) & set(deprived)) < metrics.MIN_SPECS)
    return Reply({"without": parts, "differences": {one.name: one.record() for one in found}}, text)


class _Session:
    """What `run` and `ablate` share: the suite, where it runs, who is tried."""

    def __init__(
        self, suite: str, names: list[str], device: Device, out: Path | None,
        options: authors.Options,
    ) -> None:  # fmt: skip
        self.workspace = find()
        self.suite = definitions.load(suite, self.workspace.root / "evals" / "suites")
        self.device: records.Device = self.suite.device(device)
        self.folder = (out or trials_folder(self.workspace.root)) / self.suite.name
        self.authors = list(dict.fromkeys(names))
        self.options = options

    def tried(
        self, count: int | None, jobs: int, only: list[str], *, repeat: bool = False,
        without: tuple[str, ...] = (),
    ) -> dict[str, list[records.TrialRecord]]:  # fmt: skip
        """The records of every trial, by author; those that lack are made."""
        plan = trials.plan(
            self.workspace, self.suite, self.authors, folder=self.folder, device=self.device,
            trials=count, repeat=repeat, only=only, without=without, options=self.options,
        )  # fmt: skip
        for problem in read_records(self.folder).problems:
            typer.echo(f"not counted: {problem}", err=True)
        with _watched(plan) as told, workers(jobs) as pool:
            made = trials.run(plan, self.folder, pool, width=jobs, told=told)
        found: dict[str, list[records.TrialRecord]] = {}
        for record in sorted(made, key=lambda r: (self._place(r.author), r.author)):
            found.setdefault(record.author, []).append(record)
        return found

    def _place(self, author: str) -> int:
        """Where the author was named, or its kind."""
        kind = author.partition(":")[0]
        return next(i for i, n in enumerate(self.authors) if n in (author, kind))


@contextlib.contextmanager
def _watched(plan: trials.Plan) -> Iterator[_Told]:
    """Shows trials as they begin and end: in a live table on a terminal, elsewhere a line each."""
    states: dict[tuple[str, str], list[str]] = {}
    for record in plan.done:
        states.setdefault((record.author, record.spec.name), []).append(record.outcome)
    left = len(plan.tasks)
    live = not quiet() and sys.stdout.isatty() and left > 0

    def told(task: trials.Task, record: records.TrialRecord | None) -> None:
        nonlocal left
        of_spec = states.setdefault((task.author, task.spec), [])
        if record is None:
            of_spec.append("…")
            return
        of_spec[of_spec.index("…")] = record.outcome
        left -= 1
        if not live and not quiet():
            said = f": {record.reason}" if record.reason else ""
            typer.echo(
                f"{task.author} {task.spec} {task.trial}: {record.outcome}{said} "
                f"({record.spent.wall_s:.0f} s, {dollars(record.spent.usd)}; {left} left)"
            )

    def table() -> Table:
        found = Table("author", "spec", "trials", show_edge=False, caption=f"{left} left")
        for (author, spec), outcomes in sorted(states.items()):
            found.add_row(Text(author), Text(spec), Text(" ".join(outcomes)))
        return found

    shown = Live(get_renderable=table, refresh_per_second=2) if live else contextlib.nullcontext()
    with shown:
        yield told
