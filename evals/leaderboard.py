"""The leaderboard: what trial records amount to, as rows for a terminal and pages.

- There is one board for each suite, as it was when it was run, and device. No figure mixes two of
  either.
- Scores, intervals and ranks are those of metrics.py, made from the judge's verdicts alone.
- An entry is one author at one spec. Of several solved trials the one of median speed is shown.
"""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any

from markupsafe import Markup

from coda_agent.agent.authors.replay import AUTHOR as REPLAY
from coda_agent.evals import metrics, pages, svg
from coda_agent.evals.records import Device, Level, TrialRecord
from coda_agent.evals.staleness import Stale

_GRAVITY = ("unaudited", "clean", "harness fault", "leak", "exploit")
_BUDGETS: dict[metrics.Resource, str] = {"usd": "US dollars", "wall_s": "seconds"}


@dataclass(frozen=True)
class Entry:
    """One author's trials at one spec; for each, what is stale of it."""

    trials: Sequence[TrialRecord]
    marks: Sequence[Sequence[str]]

    @cached_property
    def stale(self) -> list[str]:
        return sorted({why for mark in self.marks for why in mark})

    @cached_property
    def shown(self) -> TrialRecord:
        """The solved trial of median speed, else the last one."""
        solved = sorted(
            (t for t in self.trials if t.solved), key=lambda t: metrics.roofline(t) or 0.0
        )
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
        gemm, compiled = self.shown.mean("of_gemm"), self.shown.mean("over_compile")
        return f"{gemm:.3f}× GEMM, {compiled:.3f}× compile" if gemm and compiled else ""

    @cached_property
    def audit(self) -> str:
        """The gravest finding, and its date."""
        worst = max((t.audit for t in self.trials), key=lambda a: _GRAVITY.index(a.finding))
        return f"{worst.finding} {worst.date or ''}".rstrip()

    @property
    def grave(self) -> bool:
        return not self.audit.startswith(("unaudited", "clean"))

    @property
    def text(self) -> str:
        """All of it, on one line."""
        stale = f"stale: {', '.join(self.stale)}" if self.stale else ""
        said = (f"{self.solved}/{self.counted}", self.speed, stale, self.audit * self.grave)
        return " ".join(filter(None, said))


@dataclass(frozen=True)
class Board:
    """The trials of one suite on one kind of device.

    Attributes:
        suite: Its name.
        digest: Of its definition.
        trials: By author, those of an ablation under a name that says so.
        stale: Of each record.
    """

    suite: str
    digest: str
    device: Device
    goal: Level
    trials: Mapping[str, Sequence[TrialRecord]]
    stale: Stale

    @property
    def title(self) -> str:
        """All that tells it from other boards."""
        return f"{self.suite} ({self.digest[7:15]}, {self.device}, goal: {self.goal})"

    @cached_property
    def groups(self) -> dict[str, metrics.Groups]:
        return {author: metrics.by_spec(trials) for author, trials in self.trials.items()}

    @cached_property
    def resampled(self) -> dict[str, dict[str, metrics.Resampled]]:
        """By a score's key, then by author."""
        return {
            score.key: {a: metrics.resampled(g, score) for a, g in self.groups.items()}
            for score in metrics.on_boards(cost=False)
        }

    def score(self, metric: metrics.Metric, author: str) -> metrics.Interval | None:
        """Of an author; None without a trial that counts."""
        return metrics.interval(self.resampled[metric.key][author])

    @cached_property
    def ranks(self) -> dict[str, tuple[int, int]]:
        """By solved@1 and by roofline score; best first."""
        both = metrics.solved, metrics.roofline
        solved, speed = (metrics.ranks(self.resampled[metric.key]) for metric in both)

        def order(author: str) -> tuple[float, ...]:
            found = (self.score(metric, author) for metric in both)
            ahead, faster = (score.value if score else 0.0 for score in found)
            return solved[author], speed[author], -faster, -ahead

        return {a: (solved[a], speed[a]) for a in sorted(self.trials, key=order)}

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
    def machines(self) -> list[str]:
        """Where the judge worked; trials that gave it nothing name no machine."""
        found = (t.machine for trials in self.trials.values() for t in trials)
        return sorted({
            pages.machine({"gpu": {"name": m.gpu}, "device": m.device, "packages": m.packages})
            for m in found if m.gpu or m.packages
        })  # fmt: skip

    @cached_property
    def specs(self) -> list[str]:
        return sorted({t.spec.name for trials in self.trials.values() for t in trials})

    @cached_property
    def entries(self) -> dict[tuple[str, str], Entry]:
        """By spec and author."""
        found: dict[tuple[str, str], list[TrialRecord]] = {}
        for author, trials in self.trials.items():
            for trial in sorted(trials, key=lambda t: t.trial):
                found.setdefault((trial.spec.name, author), []).append(trial)
        return {key: Entry(trials, [*map(self.stale, trials)]) for key, trials in found.items()}

    @cached_property
    def timed(self) -> bool:
        return any(trial.cells for trials in self.trials.values() for trial in trials)

    @cached_property
    def ranking(self) -> pages.Rows:
        """Authors, best first."""
        stale = Counter(author for (_, author), entry in self.entries.items()
                        for mark in entry.marks if mark)  # fmt: skip

        def passing(author: str) -> str:
            k = min(map(len, self.groups[author].values()), default=0)
            found = metrics.passing(self.groups[author], k) if k > 1 else None
            return f"{found.value:.2f} of {k}" if found else "–"

        return pages.tabulate(self.ranks, {
            "author": str,
            "rank": lambda author: str(self.ranks[author][0]),
            "by speed": lambda author: str(self.ranks[author][1]) if self.timed else "–",
            **{m.head: partial(self._scored, m) for m in metrics.on_boards(cost=False)},
            "pass@k": passing,
            **{m.head: partial(self._spent, m) for m in metrics.on_boards(cost=True)},
            "trials": lambda author: str(len(self.trials[author])),
            "stale": lambda author: str(stale[author]),
        })  # fmt: skip

    def _scored(self, metric: metrics.Metric, author: str) -> str:
        found = self.score(metric, author)
        if not found or (metric.timed and not self.timed):
            return "–"
        return str(found) if metric.interval else f"{found.value:.2f}"

    def _spent(self, metric: metrics.Metric, author: str) -> str:
        found = metrics.per_solution(self.trials[author], metric)
        if found is None or math.isnan(found):
            return "–" if found is None else "unknown"
        return f"{found:.2f}" if found < 100 else f"{found:,.0f}"

    @cached_property
    def matrix(self) -> pages.Rows:
        """Specs by authors."""
        rows: pages.Rows = [("spec", *self.authors)]
        for spec in self.specs:
            found = (self.entries.get((spec, author)) for author in self.authors)
            rows.append([spec, *(entry.text if entry else "–" for entry in found)])
        return rows

    def record(self) -> dict[str, Any]:
        """As plain JSON data."""
        tables = {"ranking": self.ranking, "matrix": self.matrix, "audits": self.audits}
        named = {title: pages.named(rows) for title, rows in tables.items()}
        return {"suite": self.title, "first": self.first, "machines": self.machines, **named}

    @cached_property
    def audits(self) -> pages.Rows:
        """What was found in trials, the gravest first; what is clean, once an entry."""
        found: dict[tuple[str, ...], str] = {}
        for (spec, author), entry in self.entries.items():
            for t in entry.trials:
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
        for resource, unit in _BUDGETS.items():
            groups = {a: self.groups[a] for a in self.authors if self.groups[a]}
            curves = {a: metrics.curve(g, resource, "solved") for a, g in groups.items()}
            if any(budget > 0 for points in curves.values() for budget, _ in points):
                across = f"{unit} a trial"
                title = f"Solved within a budget of {across}"
                found.append(svg.curves(title, curves, across, "solved"))
        return found


def boards(records: Iterable[TrialRecord], stale: Stale) -> list[Board]:
    """The boards, by suite; those of a suite's latest definition first."""
    found: dict[tuple[str, str, Device, Level], dict[str, list[TrialRecord]]] = {}
    for record in records:
        key = record.suite.name, record.suite.digest, record.machine.device, record.goal
        # Each recorded run is of one spec; together they are one author.
        author = REPLAY.name if record.author.startswith(f"{REPLAY.name}:") else record.author
        author += "".join(f" without {part}" for part in record.without)
        found.setdefault(key, {}).setdefault(author, []).append(record)

    def age(key: tuple[str, str, Device, Level]) -> float:
        return -max(t.finished.timestamp() for trials in found[key].values() for t in trials)

    return [Board(*key, found[key], stale) for key in sorted(found, key=lambda k: (k[0], age(k)))]
