"""What records amount to: scores, costs, intervals, who is ahead of whom. Pure functions.

- A metric is one registered function of a trial, `@metric`. Boards, `eval run`, `eval ablate` and
  their JSON show what is registered.
- A score is a mean over specs of a statistic over each spec's trials: a spec counts once, however
  often it was tried.
- Trials that failed by a fault of ours are left out. Each other one counts, and what the judge did
  not pass scores 0, however fast it was said to be.
- Intervals are bootstrapped in two stages, specs and then trials within a spec, because the
  question is what an author does on other specs like these.
"""

import itertools
import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal, NamedTuple

import numpy

from coda_agent.agent.judgement import Figure
from coda_agent.evals.records import TrialRecord

Groups = Mapping[str, Sequence[TrialRecord]]
"""Trials by spec."""
Value = Callable[[TrialRecord], float | None]
Statistic = Callable[[numpy.ndarray], numpy.ndarray]
"""Of rows of a spec's trials, (R, trials), to (R,)."""
Resource = Literal["usd", "tokens", "wall_s", "gpu_s"]

RESAMPLES = 400
_STRIDE = 37
MIN_SPECS = 6
"""With fewer common specs nobody is ranked apart. Of 5 that all point one way, a sign test still
says p = 0.06. A bootstrap of so few, or of figures that are all alike, knows nothing of chance."""


class Interval(NamedTuple):
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:.2f} ({self.low:.2f}–{self.high:.2f})"


class Difference(NamedTuple):
    """How much more one has than another, on the specs both tried."""

    interval: Interval
    specs: int

    @property
    def apart(self) -> bool:
        """Whether the difference is more than chance explains."""
        away = self.interval.low > 0 or self.interval.high < 0
        return away and self.specs >= MIN_SPECS


class Resample(NamedTuple):
    """A spec's statistic, and that of `RESAMPLES` resamples of its trials."""

    value: float
    drawn: numpy.ndarray


Resampled = Mapping[str, Resample]
"""By spec."""


@dataclass(frozen=True)
class Metric:
    """A figure of a trial and how it is shown; calling it gives the value.

    Attributes:
        name: In comparisons and in JSON, there with the unit after it.
        value: Of a trial; None where it has none.
        kind: More is better of a "score" and a "share", less of a "cost". A score is 0 where
            nothing was solved, and `eval run --json` gives its interval. A board shows a cost as
            all that was spent over how many solved.
        unit: Of the value; empty where it has none or the name is one.
        column: Its head on boards instead of name and unit; None leaves it out there.
        interval: Whether boards show the interval.
        timed: Whether it says nothing where nothing was timed.
        compared: Whether `eval ablate` compares it, and `eval run --json` gives its mean.
    """

    name: str
    value: Value
    kind: Literal["score", "share", "cost"]
    unit: str = ""
    column: str | None = ""
    interval: bool = False
    timed: bool = False
    compared: bool = True

    def __call__(self, record: TrialRecord) -> float | None:
        return self.value(record)

    @property
    def key(self) -> str:
        return f"{self.name} {self.unit}".rstrip()

    @property
    def head(self) -> str:
        return self.column or ", ".join(filter(None, (self.name, self.unit)))


METRICS: dict[str, Metric] = {}
"""What is registered, by key, in the order in which it is shown."""


def metric(
    name: str, kind: Literal["score", "share", "cost"], **shown: Any
) -> Callable[[Value], Metric]:
    """Registers the function of a trial that is decorated as a metric; `shown` is how, as the
    attributes of `Metric`."""

    def register(value: Value) -> Metric:
        made = Metric(name, value, kind, **shown)
        METRICS[made.key] = made
        return made

    return register


def on_boards(*, cost: bool) -> list[Metric]:
    """The metrics that a board shows: costs, or all others."""
    return [m for m in METRICS.values() if m.column is not None and (m.kind == "cost") == cost]


def compared() -> dict[str, Metric]:
    """What two authors, or one with and without a part of its help, are compared by, by key."""
    return {key: m for key, m in METRICS.items() if m.compared}


def by_spec(records: Iterable[TrialRecord]) -> Groups:
    """The trials that count, by spec."""
    groups: dict[str, list[TrialRecord]] = {}
    for record in records:
        if record.counts:
            groups.setdefault(record.spec.name, []).append(record)
    return groups


@metric("solved@1", "score", interval=True)
def solved(record: TrialRecord) -> float:
    """1 where the judge showed what the suite asks for, else 0."""
    return float(record.solved)


@metric("roofline score", "score", interval=True, timed=True)
def roofline(record: TrialRecord) -> float:
    """The share of the ceiling, 0 where nothing was solved and timed."""
    return record.mean("roofline") or 0.0


def fast(p: float, figure: Figure) -> Value:
    """fast_p: 1 where it is solved and more than `p` times as fast as what `figure` is beside, in
    the geometric mean over the cells."""
    return lambda record: float((record.mean(figure) or 0.0) > p)


_BESIDE: dict[Figure, tuple[str, str]] = {
    "over_compile": ("compile", "faster than compile"), "of_gemm": ("gemm", "than GEMM"),
}  # fmt: skip
for _figure, (_name, _head) in _BESIDE.items():
    for _p, _column in ((1.0, _head), (1.1, None), (1.2, None)):
        _register = metric(
            f"fast_{_p} {_name}", "score", column=_column, timed=True, compared=False
        )
        _register(fast(_p, _figure))


@metric("share of the ceiling", "share", column=None)
def ceiling(record: TrialRecord) -> float | None:
    """Share of the ceiling (roofline floor over time), geometric mean over the cells."""
    return record.mean("roofline")


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """The chance that `k` of the trials, drawn without replacement, hold a success: unbiased for
    that of `k` fresh trials (Chen et al., 2021).

    Raises:
        ValueError: fewer than `k` trials, or no possible counts.
    """
    if not 1 <= k <= trials or not 0 <= successes <= trials:
        raise ValueError(f"pass@{k} of {successes} successes in {trials} trials")
    return 1 - math.comb(trials - successes, k) / math.comb(trials, k)


def score(groups: Groups, value: Value) -> Interval | None:
    """Mean over specs of the mean over the trials that have a value; None where none has."""
    return interval(resampled(groups, value))


def passing(groups: Groups, k: int) -> Interval | None:
    """pass@k, mean over specs; None where a spec has fewer than `k` trials."""
    if any(len(trials) < k for trials in groups.values()):
        return None

    def statistic(trials: numpy.ndarray) -> numpy.ndarray:
        n = trials.shape[1]
        chances = numpy.array([pass_at_k(n, successes, k) for successes in range(n + 1)])
        return chances[trials.sum(axis=1).astype(int)]

    return interval(resampled(groups, solved, statistic))


def together(groups: Groups, specs: Iterable[str]) -> float | None:
    """The chance that one trial each solves all of `specs`; None where one was not tried."""
    rates = [[float(r.solved) for r in groups.get(spec, ())] for spec in specs]
    return math.prod(map(statistics.fmean, rates)) if rates and all(rates) else None


def difference(first: Groups, second: Groups, value: Value) -> Difference | None:
    """Paired by spec, how much more `first` has than `second`; None without a common spec."""
    return _difference(resampled(first, value), resampled(second, value))


def ranks(authors: Mapping[str, Resampled]) -> dict[str, int]:
    """Each author's rank by what was resampled: one more than the authors that are ahead of it by
    more than chance."""
    rank = dict.fromkeys(authors, 1)
    for one, other in itertools.combinations(authors, 2):
        found = _difference(authors[one], authors[other])
        if found and found.apart:
            rank[other if found.interval.value > 0 else one] += 1
    return rank


def curve(
    groups: Groups, resource: Resource, shown: Literal["solved", "roofline"]
) -> list[tuple[float, float]]:
    """Score at budget: (budget, score reached within it) at each budget where the score rises,
    from 0 on. A trial's score is that of its best verdict so far; `solved` takes a full trial.
    A verdict of which nobody knows what it took has no budget that reaches it.
    """
    rises: list[tuple[float, float]] = []
    for records in groups.values():
        for record in records:
            weight, best = 1 / len(groups) / len(records), 0.0
            for step in record.steps if record.valid else ():
                reached = step.roofline or 0.0
                if shown == "solved":
                    reached = float(step.submitted and record.solved)
                took = getattr(step, resource)
                if reached > best and took is not None:
                    rises.append((float(took), weight * (reached - best)))
                    best = reached
    points, total = {0.0: 0.0}, 0.0
    for budget, rise in sorted(rises):
        total += rise
        points[budget] = total
    return list(points.items())


@metric("attempts", "cost")
def attempts(record: TrialRecord) -> float:
    """How often a candidate was judged."""
    return float(record.attempts)


@metric("dollars", "cost", column="USD")
def dollars(record: TrialRecord) -> float | None:
    """What the model's calls cost."""
    return record.spent.usd


@metric("tokens", "cost")
def tokens(record: TrialRecord) -> float | None:
    """Of the model's calls, read and written."""
    return record.spent.tokens


@metric("characters received", "cost", column="characters received")
def received(record: TrialRecord) -> float | None:
    """That the author was sent: the prompt and the results of tools. Older records do not say."""
    return record.spent.received


@metric("wall", "cost", unit="s")
def wall_s(record: TrialRecord) -> float:
    """From the trial's start to its end."""
    return record.spent.wall_s


@metric("GPU", "cost", unit="s")
def gpu_s(record: TrialRecord) -> float:
    """Of gates and profiles that ran on a GPU."""
    return record.spent.gpu_s


def per_solution(records: Iterable[TrialRecord], value: Value) -> float | None:
    """What was spent on all trials, over how many solved. None where none did, NaN where it is
    unknown of a trial."""
    counted = [record for record in records if record.counts]
    good = sum(record.solved for record in counted)
    spent = [math.nan if (v := value(record)) is None else v for record in counted]
    return math.fsum(spent) / good if good else None


def _mean(trials: numpy.ndarray) -> numpy.ndarray:
    return trials.mean(axis=1)


def resampled(groups: Groups, value: Value, statistic: Statistic = _mean) -> Resampled:
    """Of the trials that have a value, for the specs that have such trials."""
    found: dict[str, Resample] = {}
    for spec, records in groups.items():
        if not (values := [v for record in records if (v := value(record)) is not None]):
            continue
        drawn = trials = numpy.array([values])
        if trials.min() < trials.max():
            # Seeded by author and spec: the same each time, and independent between authors.
            rng = numpy.random.default_rng(zlib.crc32(f"{records[0].author} {spec}".encode()))
            drawn = rng.choice(trials[0], (RESAMPLES, len(values)))
        found[spec] = Resample(float(statistic(trials)[0]),
                            numpy.broadcast_to(statistic(drawn), RESAMPLES))  # fmt: skip
    return found


def interval(specs: Resampled) -> Interval | None:
    """The mean over specs, with the interval of resampled specs, each with a resample of its own
    trials; None of no specs."""
    if not (n := len(specs)):
        return None
    picked = numpy.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    # A spec that is drawn twice takes two different resamples: each position has its own.
    places = (numpy.arange(RESAMPLES)[:, None] + _STRIDE * numpy.arange(n)) % RESAMPLES
    drawn = numpy.array([spec.drawn for spec in specs.values()])
    means = numpy.sort(drawn[picked, places].mean(axis=1))
    cut = RESAMPLES // 40
    value = statistics.fmean(spec.value for spec in specs.values())
    return Interval(value, float(means[cut]), float(means[-1 - cut]))


def _difference(first: Resampled, second: Resampled) -> Difference | None:
    both = {
        spec: Resample(a.value - b.value, a.drawn - b.drawn)
        for spec, a in first.items()
        if (b := second.get(spec))
    }
    found = interval(both)
    return found and Difference(found, len(both))
