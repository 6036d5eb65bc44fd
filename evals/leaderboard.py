"""The leaderboard: what trial records amount to, as rows for a terminal, Markdown and one page.

- One board a suite, as it was when it was run, and a device: no figure mixes two of either.
- Scores, intervals and ranks are those of metrics.py, made from the judge's verdicts alone.
- A cell is one author at one spec. Of several solved trials the one of median speed is shown.
"""

from __future__ import annotations

import os
import statistics
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, Literal

from markupsafe import Markup

from coda_agent.evals import html, metrics
from coda_agent.evals.pages import table
from coda_agent.evals.records import Problem, TrialRecord, file_name

Rows = list[Sequence[str]]
Stale = Callable[[TrialRecord], list[str]]
"""What decided a record and is another by now: of judge, toolchain and spec."""

_GRAVITY = ("unaudited", "clean", "harness fault", "leak", "exploit")
_BUDGETS: tuple[tuple[Literal["usd", "wall_s"], str], ...] = (
    ("usd", "US dollars a trial"), ("wall_s", "seconds a trial"))  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One author's trials at one spec."""

    trials: Sequence[TrialRecord]
    stale: Sequence[str]

    @cached_property
    def shown(self) -> TrialRecord:
        """The solved trial of median speed, else the last one."""
        solved = sorted((t for t in self.trials if t.solved), key=metrics.roofline)
        return solved[len(solved) // 2] if solved else self.trials[-1]

    @cached_property
    def counted(self) -> int:
        return sum(trial.counts for trial in self.trials)

    @cached_property
    def solved(self) -> int:
        return sum(trial.solved for trial in self.trials)

    @cached_property
    def speed(self) -> str:
        """Beside both baselines; empty where nothing was timed."""
        gemm, compiled = (metrics.speed(self.shown, over) for over in ("gemm", "compile"))
        return f"{gemm:.3f}× GEMM, {compiled:.3f}× compile" if gemm and compiled else ""

    @cached_property
    def audit(self) -> str:
        """The gravest finding, and its date."""
        worst = max((t.audit for t in self.trials), key=lambda a: _GRAVITY.index(a.finding))
        return f"{worst.finding} {worst.date or ''}".rstrip()

    @property
    def text(self) -> str:
        """All of it, on one line."""
        grave = "" if self.audit[:2] in ("un", "cl") else self.audit
        stale = f"stale: {', '.join(self.stale)}" if self.stale else ""
        return " ".join(filter(None, (f"{self.solved}/{self.counted}", self.speed, stale, grave)))


@dataclass(frozen=True)
class Board:
    """The trials of one suite on one kind of device.

    Attributes:
        title: Name, digest, device and goal.
        trials: By author, those of an ablation under a name that says so.
        stale: Of each record.
    """

    title: str
    trials: Mapping[str, Sequence[TrialRecord]]
    stale: Stale

    @cached_property
    def values(self) -> dict[str, metrics.Value]:
        """What authors are compared by, computed once a record: resampling asks many times."""
        return {
            "solved@1": _once(metrics.solved),
            "roofline score": _once(metrics.roofline),
            "faster than compile": _once(metrics.fast(1, "compile")),
            "than GEMM": _once(metrics.fast(1, "gemm")),
        }

    @cached_property
    def groups(self) -> dict[str, metrics.Groups]:
        return {author: metrics.by_spec(trials) for author, trials in self.trials.items()}

    @cached_property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """By solved@1 and by roofline score; best first."""
        solved, roofline = list(self.values.values())[:2]
        one, other = (metrics.ranks(self.groups, value) for value in (solved, roofline))

        def order(author: str) -> tuple[float, ...]:
            means = (-_mean(self.groups[author], value) for value in (roofline, solved))
            return (one[author], other[author], *means)

        return {a: (one[a], other[a]) for a in sorted(self.trials, key=order)}

    @property
    def authors(self) -> list[str]:
        return list(self.ranks)

    @property
    def first(self) -> str:
        """Who is ahead, in a sentence."""
        ahead = [author for author, (rank, _) in self.ranks.items() if rank == 1]
        if len(self.ranks) == 1:
            return f"{ahead[0]} is the only author."
        if len(ahead) == 1:
            return f"{ahead[0]} solves most."
        return f"Tied for first: {', '.join(ahead)}. What they solve differs by chance at most."

    @cached_property
    def specs(self) -> list[str]:
        return sorted({t.spec.name for trials in self.trials.values() for t in trials})

    @cached_property
    def cells(self) -> dict[tuple[str, str], Cell]:
        """By spec and author."""
        found: dict[tuple[str, str], list[TrialRecord]] = {}
        for author, trials in self.trials.items():
            for trial in sorted(trials, key=lambda t: t.trial):
                found.setdefault((trial.spec.name, author), []).append(trial)
        return {
            key: Cell(trials, sorted({why for t in trials for why in self.stale(t)}))
            for key, trials in found.items()
        }

    @cached_property
    def ranking(self) -> Rows:
        """Authors, best first; the first row is the head."""
        spent = [metrics.attempts, *map(metrics.cost, ("usd", "tokens", "wall_s", "gpu_s"))]
        rows: Rows = [("author", "rank", "by speed", *self.values, "pass@k", "attempts", "USD",
                       "tokens", "wall, s", "GPU, s", "trials", "stale")]  # fmt: skip
        for author, ranks in self.ranks.items():
            groups, trials = self.groups[author], self.trials[author]
            k = min(map(len, groups.values()), default=0)
            tries = [(len(g), sum(t.solved for t in g)) for g in groups.values()]
            passing = statistics.fmean(metrics.pass_at_k(n, s, k) for n, s in tries) if k else 0.0
            costs = [metrics.per_solution(trials, value) for value in spent]
            scored, fast = (list(self.values.values())[i : i + 2] for i in (0, 2))
            scores = [_interval(metrics.score(groups, value)) for value in scored]
            shares = [f"{_mean(groups, value):.2f}" for value in fast]
            if not any(trial.cells for every in self.trials.values() for trial in every):
                ranks, scores[1], shares = (ranks[0], "–"), "–", ["–", "–"]  # nothing was timed
            rows.append([
                author, *map(str, ranks), *scores, *shares,
                f"{passing:.2f} of {k}" if k > 1 else "–",
                *("–" if c is None else f"{c:.2f}" if c < 100 else f"{c:,.0f}" for c in costs),
                str(len(trials)), str(sum(bool(self.stale(trial)) for trial in trials)),
            ])  # fmt: skip
        return rows

    @cached_property
    def matrix(self) -> Rows:
        """Specs by authors."""
        rows: Rows = [("spec", *self.authors)]
        for spec in self.specs:
            found = (self.cells.get((spec, author)) for author in self.authors)
            rows.append([spec, *(cell.text if cell else "–" for cell in found)])
        return rows

    def record(self) -> dict[str, Any]:
        """As plain JSON data."""
        tables = {"ranking": self.ranking, "matrix": self.matrix, "audits": self.audits}
        return {"suite": self.title, "first": self.first} | {
            key: [dict(zip(rows[0], row, strict=True)) for row in rows[1:]]
            for key, rows in tables.items()
        }

    @cached_property
    def audits(self) -> Rows:
        """What was found in trials, the gravest first; what is clean, once a cell."""
        found: dict[tuple[str, ...], str] = {}
        for (spec, author), cell in self.cells.items():
            for t in cell.trials:
                a = t.audit
                if a.finding != "unaudited":
                    which = "" if a.finding == "clean" else str(t.trial)
                    key = a.finding, spec, author, which, a.evidence
                    found[key] = max(found.get(key, ""), a.date or "")
        rows = sorted(found.items(), key=lambda row: -_GRAVITY.index(row[0][0]))
        head = ("finding", "spec", "author", "trial", "evidence", "date")
        return [head, *((*key, date) for key, date in rows)]

    @cached_property
    def pictures(self) -> list[Markup]:
        """Score at budget, for each resource that somebody spent."""
        found: list[Markup] = []
        for resource, across in _BUDGETS:
            curves = {a: metrics.curve(g, resource, "solved") for a, g in self.groups.items() if g}
            if any(budget > 0 for points in curves.values() for budget, _ in points):
                title = f"Solved within a budget of {across}"
                ordered = {a: curves[a] for a in self.authors if a in curves}
                found.append(html.curves(title, ordered, across, "solved"))
        return found


def boards(records: Iterable[TrialRecord], stale: Stale) -> list[Board]:
    """The boards, by suite; those of a suite's latest definition first."""
    found: dict[tuple[str, str, str, str], dict[str, list[TrialRecord]]] = {}
    last: dict[tuple[str, str, str, str], Any] = {}
    for record in records:
        key = record.suite.name, record.suite.digest, record.machine.device, record.goal
        author = f"{record.author}{''.join(f' without {part}' for part in record.without)}"
        found.setdefault(key, {}).setdefault(author, []).append(record)
        last[key] = max(last.get(key, record.finished), record.finished)
    ordered = sorted(sorted(found, key=last.__getitem__, reverse=True), key=lambda key: key[0])
    return [
        Board(f"{key[0]} ({key[1][7:15]}, {key[2]}, goal: {key[3]})", found[key], stale)
        for key in ordered
    ]


def write_markdown(path: Path, found: Sequence[Board], problems: Sequence[Problem]) -> Path:
    """The same tables as Markdown."""
    parts = ["# Leaderboard"]
    for board in found:
        parts += [
            f"## Suite {_escaped(board.title)}",
            _escaped(board.first),
            _table(board.ranking),
            _table(board.matrix),
        ]
        if len(board.audits) > 1:
            parts += ["Audits:", _table(board.audits)]
    if problems:
        parts += ["## Files not counted", _table([("file", "kind", "why"), *map(_named, problems)])]
    parts += ["## How to read this", _ABOUT]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n\n".join(parts) + "\n", "utf-8", "replace")
    return path


def write_page(
    path: Path, found: Sequence[Board], problems: Sequence[Problem], *, root: Path, records: Path
) -> Path:
    """The page, and beside it, in programs/, the program of each cell.

    Args:
        path: The page.
        found: From `boards`.
        problems: Of `read_records`.
        root: The workspace, whose logs are linked where they are kept.
        records: The folder that was read.
    """
    folder = path.parent / "programs"
    folder.mkdir(parents=True, exist_ok=True)

    def links(cell: Cell) -> dict[str, str]:
        """Program, verdict and log of the trial that is shown; without what is not kept."""
        trial, hrefs = cell.shown, dict[str, str]()
        if trial.program is not None and trial.verdict:
            name = f"{trial.verdict.digests['candidate'].removeprefix('sha256:')[:16]}.py"
            (folder / name).write_text(trial.program, "utf-8", "replace")
            hrefs["program"] = f"programs/{name}"
        name = file_name(trial.key)
        files = {"verdict": (records / name, records / trial.suite.name / name),
                 "log": (root / trial.run.log,)}  # fmt: skip
        for what, candidates in files.items():
            if place := next((f for f in candidates if f.is_file()), None):
                hrefs[what] = Path(os.path.relpath(place, path.parent)).as_posix()
        return hrefs

    return html.write(
        path, "leaderboard", boards=found, problems=[_named(p) for p in problems], links=links,
        about=_ABOUT,
    )  # fmt: skip


_ABOUT = (
    "Every score is the judge's verdict; nothing an author writes moves one. Intervals are 95 % "
    "bootstraps over specs and trials. A rank is one more than the number of authors that are "
    "ahead by more than chance explains: authors of one rank are tied. Costs are per solved trial, "
    "failures included. A cell holds solved of counted trials, then the speed of the solved trial "
    "of median speed beside the bare GEMM and beside torch.compile, as geometric means."
)


def _once(value: metrics.Value) -> metrics.Value:
    known: dict[int, float] = {}

    def get(record: TrialRecord) -> float:
        if (key := id(record)) not in known:
            known[key] = value(record)
        return known[key]

    return get


def _mean(groups: metrics.Groups, value: metrics.Value) -> float:
    """The value of `metrics.score`, without its interval."""
    means = [statistics.fmean(map(value, records)) for records in groups.values()]
    return statistics.fmean(means) if means else 0.0


def _interval(found: metrics.Interval | None) -> str:
    return f"{found.value:.2f} ({found.low:.2f}–{found.high:.2f})" if found else "–"


def _named(problem: Problem) -> tuple[str, str, str]:
    return problem.path.name, problem.kind, problem.message


def _table(rows: Rows) -> str:
    return table([[_escaped(cell) for cell in row] for row in rows])


def _escaped(text: str) -> str:
    """Text that Markdown shows as it is: authors, auditors and files may hold anything."""
    for mark in "\\`*_[]|<>#":
        text = text.replace(mark, f"\\{mark}" if mark not in "<>" else f"&#{ord(mark)};")
    return " ".join(text.split())
