"""What records amount to: scores, costs, intervals, who is ahead of whom. Pure functions.

- A score is a mean over specs of a statistic over each spec's trials: a spec counts once, however
  often it was tried.
- Trials that failed by a fault of ours are left out. Each other one counts, and what the judge did
  not pass scores 0, however fast it was said to be.
- Intervals are bootstrapped in two stages, specs and then trials within a spec, because the
  question is what an author does on other specs like these.
"""

import itertools
import math
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Literal, NamedTuple

import numpy

from coda_agent.evals.records import TrialRecord, geometric_mean

Groups = dict[str, list[TrialRecord]]
Value = Callable[[TrialRecord], float]
Statistic = Callable[[Sequence[float]], float]
Baseline = Literal["compile", "gemm"]
Resource = Literal["usd", "tokens", "wall_s", "gpu_s", "attempt"]

RESAMPLES = 400
_STRIDE = 37
MIN_SPECS = 6
"""Common specs below which nobody is ranked apart: of 5 that all point one way, a sign test says
p = 0.06; and a bootstrap of so few, or of figures that are all alike, knows nothing of chance."""


class Interval(NamedTuple):
    """An estimate and its 95 % bootstrap interval."""

    value: float
    low: float
    high: float


class Difference(NamedTuple):
    """How much more one has than another, on the specs both tried."""

    interval: Interval
    specs: int

    @property
    def apart(self) -> bool:
        """Whether the difference is more than chance explains."""
        away = self.interval.low > 0 or self.interval.high < 0
        return away and self.specs >= MIN_SPECS


def by_spec(records: Iterable[TrialRecord]) -> Groups:
    """The trials that count, by spec."""
    groups: Groups = {}
    for record in records:
        if record.counts:
            groups.setdefault(record.spec.name, []).append(record)
    return groups


def solved(record: TrialRecord) -> float:
    """1 where the judge showed what the suite asks for, else 0."""
    return float(record.solved)


def speed(record: TrialRecord, over: Baseline) -> float | None:
    """Times as fast as torch.compile or a bare GEMM, geometric mean over the cells; None where
    nothing that counts was timed."""
    ratios = (cell.over_compile if over == "compile" else cell.of_gemm for cell in record.cells)
    return geometric_mean(ratio.ratio for ratio in ratios)


def fast(p: float, over: Baseline) -> Value:
    """fast_p: 1 where it is solved and more than `p` times as fast as the baseline."""
    return lambda record: float((speed(record, over) or 0.0) > p)


def ceiling(record: TrialRecord) -> float | None:
    """Share of the ceiling (roofline floor over time), geometric mean over the cells."""
    return geometric_mean(cell.roofline for cell in record.cells)


def roofline(record: TrialRecord) -> float:
    """The roofline score: the share of the ceiling, 0 where nothing was solved and timed."""
    return ceiling(record) or 0.0


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """The chance that `k` of the trials, drawn without replacement, hold a success: unbiased for
    that of `k` fresh trials (Chen et al., 2021).

    Raises:
        ValueError: fewer than `k` trials, or no possible counts.
    """
    if not 1 <= k <= trials or not 0 <= successes <= trials:
        raise ValueError(f"pass@{k} of {successes} successes in {trials} trials")
    return 1 - math.comb(trials - successes, k) / math.comb(trials, k)


def score(groups: Mapping[str, Sequence[TrialRecord]], value: Value) -> Interval | None:
    """Mean over specs of the mean over trials; None of no trials."""
    return _interval([[value(r) for r in records] for records in groups.values()], _mean)


def passing(groups: Mapping[str, Sequence[TrialRecord]], k: int) -> Interval | None:
    """pass@k, mean over specs; None where a spec has fewer than `k` trials."""
    values = [[solved(r) for r in records] for records in groups.values()]
    if any(len(trials) < k for trials in values):
        return None
    return _interval(values, lambda trials: pass_at_k(len(trials), round(sum(trials)), k))


def where_known(
    groups: Mapping[str, Sequence[TrialRecord]], value: Callable[[TrialRecord], float | None]
) -> Interval | None:
    """As `score`, over the trials that have a value and the specs that have such trials: for the
    share of the ceiling and the speed of what was solved."""
    known = ([v for r in records if (v := value(r)) is not None] for records in groups.values())
    return _interval([values for values in known if values], _mean)


def together(groups: Mapping[str, Sequence[TrialRecord]], specs: Iterable[str]) -> float | None:
    """The chance that one trial each solves all of `specs`; None where one was not tried."""
    rates = [[solved(r) for r in groups.get(spec, ())] for spec in specs]
    return math.prod(map(_mean, rates)) if rates and all(rates) else None


def difference(
    first: Mapping[str, Sequence[TrialRecord]],
    second: Mapping[str, Sequence[TrialRecord]],
    value: Value,
) -> Difference | None:
    """Paired by spec, how much more `first` has than `second`; None without a common spec."""
    return _difference(_resampled(first, value), _resampled(second, value))


def ranks(
    authors: Mapping[str, Mapping[str, Sequence[TrialRecord]]], value: Value
) -> dict[str, int]:
    """Each author's rank: one more than the authors that are ahead of it by more than chance."""
    resampled = {name: _resampled(groups, value) for name, groups in authors.items()}
    rank = dict.fromkeys(authors, 1)
    for one, other in itertools.combinations(authors, 2):
        found = _difference(resampled[one], resampled[other])
        if found and found.apart:
            rank[other if found.interval.value > 0 else one] += 1
    return rank


def curve(
    groups: Mapping[str, Sequence[TrialRecord]],
    resource: Resource,
    shown: Literal["solved", "roofline"],
) -> list[tuple[float, float]]:
    """Score at budget: (budget, score reached within it) at each budget where the score rises,
    from 0 on. A trial's score is that of its best verdict so far; `solved` takes a full trial.
    """
    rises: list[tuple[float, float]] = []
    for records in groups.values():
        for record in records:
            weight, best = 1 / len(groups) / len(records), 0.0
            for step in record.steps if record.valid else ():
                reached = step.roofline or 0.0
                if shown == "solved":
                    reached = float(step.submitted and record.solved)
                if reached > best:
                    rises.append((float(getattr(step, resource)), weight * (reached - best)))
                    best = reached
    points = [(0.0, 0.0)]
    total = 0.0
    for budget, rise in sorted(rises):
        total += rise
        if budget == points[-1][0]:
            points.pop()
        points.append((budget, total))
    return points


def cost(resource: Literal["usd", "tokens", "wall_s", "gpu_s"]) -> Value:
    """What a trial spent."""
    return lambda record: float(getattr(record.spent, resource))


def attempts(record: TrialRecord) -> float:
    """How often a candidate was judged."""
    return float(record.attempts)


COMPARED: dict[str, Value] = {
    "solved@1": solved,
    "roofline score": roofline,
    "attempts": attempts,
    "tokens": cost("tokens"),
    "dollars": cost("usd"),
    "wall s": cost("wall_s"),
    "GPU s": cost("gpu_s"),
}
"""What two authors, or one with and without a part of its help, are compared by."""


def per_solution(records: Iterable[TrialRecord], value: Value) -> float | None:
    """What was spent on all trials, over how many solved; None where none did."""
    counted = [record for record in records if record.counts]
    good = sum(record.solved for record in counted)
    return math.fsum(map(value, counted)) / good if good else None


class _Spec(NamedTuple):
    """A spec's statistic, and that of `RESAMPLES` resamples of its trials."""

    value: float
    drawn: numpy.ndarray


def _resample(values: Sequence[float], statistic: Statistic, seed: str) -> _Spec:
    if min(values) == max(values):
        return _Spec(statistic(values), numpy.full(RESAMPLES, statistic(values)))
    rng = numpy.random.default_rng(zlib.crc32(seed.encode()))
    picks = rng.choice(numpy.asarray(values), (RESAMPLES, len(values)))
    if statistic is _mean:
        return _Spec(_mean(values), picks.mean(axis=1))
    return _Spec(statistic(values), numpy.array([statistic(row) for row in picks.tolist()]))


def _resampled(groups: Mapping[str, Sequence[TrialRecord]], value: Value) -> dict[str, _Spec]:
    # Seeded by author and spec: the same each time, and independent between authors.
    return {
        spec: _resample([value(r) for r in records], _mean, f"{records[0].author} {spec}")
        for spec, records in groups.items()
    }


def _interval(values: Sequence[Sequence[float]], statistic: Statistic) -> Interval | None:
    specs = [_resample(trials, statistic, str(i)) for i, trials in enumerate(values)]
    return _over_specs([spec.value for spec in specs], [spec.drawn for spec in specs])


def _difference(first: Mapping[str, _Spec], second: Mapping[str, _Spec]) -> Difference | None:
    pairs = [(first[spec], second[spec]) for spec in first if spec in second]
    values = [a.value - b.value for a, b in pairs]
    interval = _over_specs(values, [a.drawn - b.drawn for a, b in pairs])
    return interval and Difference(interval, len(pairs))


def _over_specs(values: Sequence[float], drawn: Sequence[numpy.ndarray]) -> Interval | None:
    """The mean over specs, with the interval of resampled specs, each with a resample of its own
    trials; None of no specs."""
    if not values:
        return None
    n = len(values)
    picked = numpy.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    # A spec that is drawn twice takes two different resamples: each position has its own.
    places = (numpy.arange(RESAMPLES)[:, None] + _STRIDE * numpy.arange(n)) % RESAMPLES
    found = numpy.sort(numpy.asarray(drawn)[picked, places].mean(axis=1))
    cut = RESAMPLES // 40
    return Interval(_mean(values), float(found[cut]), float(found[-1 - cut]))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values)
