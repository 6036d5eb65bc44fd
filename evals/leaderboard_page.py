"""The leaderboard's pages: one matrix of authors by suites, what each of them is, the boards."""

import io
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import yaml
from rich.console import Console

from coda_agent.agent import authors, runs
from coda_agent.agent.workspace import Run
from coda_agent.evals import pages
from coda_agent.evals.leaderboard import Board, Entry
from coda_agent.evals.record_files import Problem, file_name
from coda_agent.evals.records import TrialRecord
from coda_agent.primitives.errors import CodaError

DIFFICULTIES = ("compose", "reparameterise", "extend")
_SOLVED = {
    "proved": "proved right, by the interpreter",
    "verified": "right on the GPU",
    "accepted": "right and fast enough on the GPU",
}


@dataclass(frozen=True)
class Overview:
    """Authors by suites, each suite as it was defined last.

    Attributes:
        boards: All of them, in their order on the page.
        titles: Of the suites that are known here, by name.
    """

    boards: Sequence[Board]
    titles: Mapping[str, str]

    @cached_property
    def columns(self) -> dict[str, Board]:
        """The latest board of each suite, device and goal, by its head."""
        found: dict[str, Board] = {}
        for board in self.boards:  # of one suite the latest comes first
            found.setdefault(f"{board.suite}, {'GPU' if board.device == 'cuda' else 'CPU'}", board)
        return found

    @cached_property
    def authors(self) -> list[str]:
        """Those on most suites first."""
        found = {name for board in self.columns.values() for name in board.trials}
        suites = {a: sum(a in board.trials for board in self.columns.values()) for a in found}
        return sorted(found, key=lambda author: (-suites[author], author))

    @cached_property
    def matrix(self) -> pages.Rows:
        """Solved of counted trials, the speed, then solved by difficulty."""
        rows: pages.Rows = [("author", *self.columns)]
        for author in self.authors:
            rows.append((author, *(_cell(board, author) for board in self.columns.values())))
        return rows

    @property
    def about_authors(self) -> dict[str, str]:
        """What each author is."""
        return {name: authors.meaning(name.partition(" without ")[0]) for name in self.authors}

    @property
    def about_suites(self) -> dict[str, str]:
        """What each suite asks for."""
        said: dict[str, str] = {}
        for head, board in self.columns.items():
            title = self.titles.get(board.suite) or "A suite that is not here"
            tried = f"{len(board.specs)} specs were tried"
            said[head] = f"{title}. {tried}; solved means {_SOLVED[board.goal]}."
        return said

    def record(self) -> dict[str, Any]:
        """As plain JSON data."""
        about = {"authors": self.about_authors, "suites": self.about_suites}
        return {"matrix": pages.named(self.matrix), **about}


def _cell(board: Board, author: str) -> str:
    """An author on a suite."""
    counted = [trial for trial in board.trials.get(author, ()) if trial.counts]
    if not counted:
        return "–"
    speeds = [speed for trial in counted if (speed := trial.mean("of_gemm"))]
    said = _solved(counted) + (f", {geometric_mean(speeds):.2f}× GEMM" if speeds else "")
    levels = {d: [t for t in counted if t.spec.level == d] for d in DIFFICULTIES}
    parts = [f"{level} {_solved(trials)}" for level, trials in levels.items() if trials]
    return f"{said} ({', '.join(parts)})"


def _solved(trials: Sequence[TrialRecord]) -> str:
    return f"{sum(trial.solved for trial in trials)}/{len(trials)}"


def write_markdown(path: Path, overview: Overview, problems: Sequence[Problem]) -> Path:
    """The same tables as Markdown."""
    return pages.write(path, "leaderboard.md", overview=overview, problems=_named(problems))


def write_page(path: Path, overview: Overview, problems: Sequence[Problem], *, root: Path) -> Path:
    """The page, and beside it one with program, verdict and run of each trial that is shown.

    Runs are those of the workspace at `root`, told as `coda-agent run show` tells them.
    """
    shown = {_anchor(e.shown): e.shown for board in overview.boards for e in board.entries.values()}
    trials = {name: _kept(trial, root) for name, trial in shown.items()}
    beside = path.with_name(f"{path.stem}-trials.html")

    def links(entry: Entry) -> dict[str, str]:
        name = _anchor(entry.shown)
        return {what: f"{beside.name}#{name}.{what}" for what in trials[name]}

    pages.write(beside, "trials.html", trials=trials, board=path.name)
    about = {"overview": overview, "problems": _named(problems)}
    return pages.write(path, "leaderboard.html", **about, links=links)


def _anchor(trial: TrialRecord) -> str:
    return file_name(trial.key).removesuffix(".json")


def _kept(trial: TrialRecord, root: Path) -> dict[str, str]:
    """What there is to read of a trial, without what is not kept."""
    kept: dict[str, str] = {}
    if trial.program is not None and trial.verdict:
        kept["program"] = trial.program
    record = trial.model_dump(mode="json", exclude={"program"})
    kept["verdict"] = yaml.safe_dump(record, default_flow_style=None, sort_keys=False, width=120)
    if log := trial.run.file(root):
        kept["log"] = _told(Run(trial.run.id, log.parent))
    return kept


def _told(run: Run) -> str:
    console = Console(file=io.StringIO(), width=120)
    try:
        with console.capture() as told:
            console.print(runs.timeline(run))
    except CodaError as damage:
        return str(damage)
    return "\n".join(line.rstrip() for line in told.get().splitlines())


def _named(problems: Sequence[Problem]) -> pages.Rows:
    return pages.tabulate(problems, {
        "file": lambda problem: problem.path.name,
        "kind": lambda problem: problem.kind,
        "why": lambda problem: problem.message,
    })  # fmt: skip
