"""What trials amount to: scores, costs, intervals and ranks. Pure functions.

- A score is a mean over specs of the mean over each spec's trials: a spec counts once, however
  often it was tried. What the judge did not pass scores 0.
- Trials that failed by a fault of ours are left out.
- Intervals are bootstrapped in two stages, specs and then trials within a spec, because the
  question is what an author does on other specs like these.
"""

import itertools
import math
import statistics
import zlib
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import NamedTuple, TypeVar

import numpy

from coda_agent.agent.judgement import geometric_mean
from coda_agent.evals.trials import Trial

Groups = Mapping[str, Sequence[Trial]]
"""Trials by spec."""
Value = Callable[[Trial], float | None]
Name = TypeVar("Name")

RESAMPLES, _STRIDE = 400, 37
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


SCORES: Mapping[str, Value] = {
    "solved@1": lambda trial: float(trial.solved),
    "roofline score": lambda trial: trial.solved * (trial.roofline or 0.0),
    "faster than compile": lambda trial: float(trial.solved and (trial.over_compile or 0.0) > 1),
}
"""Of a trial, 0 where nothing was solved; all but the first only where something was timed."""
COSTS: Mapping[str, Value] = {
    "attempts": lambda trial: float(trial.attempts),
    "USD": lambda trial: trial.spent.usd,
    "tokens": lambda trial: trial.spent.tokens,
    "wall, s": lambda trial: trial.spent.wall_s,
    "GPU, s": lambda trial: trial.spent.gpu_s,
}
"""Of a trial; None where nobody knows."""


def by_spec(trials: Iterable[Trial]) -> Groups:
    """Group the trials that count by spec."""
    groups: dict[str, list[Trial]] = {}
    for trial in trials:
        if trial.counts:
            groups.setdefault(trial.spec, []).append(trial)
    return groups


def pass_at_k(trials: int, successes: int, k: int) -> float:
    """Give the chance that `k` trials, drawn without replacement, hold a success.

    It is unbiased for that of `k` fresh trials (Chen et al., 2021).

    Raises:
        ValueError: fewer than `k` trials, or no possible counts.
    """
    if not 1 <= k <= trials or not 0 <= successes <= trials:
        raise ValueError(f"pass@{k} of {successes} successes in {trials} trials")
    return 1 - math.comb(trials - successes, k) / math.comb(trials, k)


def passing(groups: Groups, k: int) -> float | None:
    """Average pass@k over specs; None where one has fewer trials."""
    if not groups or any(len(trials) < k for trials in groups.values()):
        return None
    solved = ((len(trials), sum(t.solved for t in trials)) for trials in groups.values())
    return statistics.fmean(pass_at_k(count, successes, k) for count, successes in solved)


def per_solution(trials: Iterable[Trial], value: Value) -> float | None:
    """Divide all spending by how many solved; None if unknown or none."""
    counted = [trial for trial in trials if trial.counts]
    spent, good = [value(trial) for trial in counted], sum(trial.solved for trial in counted)
    known = [v for v in spent if v is not None]
    return math.fsum(known) / good if good and len(known) == len(spent) else None


def of_solved(trials: Iterable[Trial], value: Value) -> float | None:
    """Give the geometric mean over the trials that solved and were timed."""
    return geometric_mean(v for trial in trials if trial.solved and (v := value(trial)))


def resampled(groups: Groups, value: Value) -> dict[str, numpy.ndarray]:
    """Draw each spec's mean: its own, then `RESAMPLES` others."""
    found: dict[str, numpy.ndarray] = {}
    for spec, trials in groups.items():
        if values := [v for trial in trials if (v := value(trial)) is not None]:
            # Seeded by author and spec: the same each time, and independent between authors.
            rng = numpy.random.default_rng(zlib.crc32(f"{trials[0].author} {spec}".encode()))
            drawn = rng.choice(values, (RESAMPLES, len(values))).mean(axis=1)
            found[spec] = numpy.array([statistics.fmean(values), *drawn])
    return found


def interval(specs: Mapping[str, numpy.ndarray]) -> Interval | None:
    """Average specs, with their resampled interval; None of no specs."""
    if not (n := len(specs)):
        return None
    rows = numpy.array([*specs.values()])
    picked = numpy.random.default_rng(0).integers(n, size=(RESAMPLES, n))
    # A spec that is drawn twice takes two different resamples: each position has its own.
    places = (numpy.arange(RESAMPLES)[:, None] + _STRIDE * numpy.arange(n)) % RESAMPLES
    means = numpy.sort(rows[picked, 1 + places].mean(axis=1))
    cut = RESAMPLES // 40
    return Interval(float(rows[:, 0].mean()), float(means[cut]), float(means[-1 - cut]))


def score(groups: Groups, value: Value) -> Interval | None:
    """Score an author's trials; None where none counts."""
    return interval(resampled(groups, value))


def ranks(authors: Mapping[Name, Groups], value: Value) -> dict[Name, int]:
    """Rank authors below those ahead of them by more than chance."""
    drawn = {author: resampled(groups, value) for author, groups in authors.items()}
    rank = dict.fromkeys(authors, 1)
    for one, other in itertools.combinations(authors, 2):
        both = {s: drawn[one][s] - drawn[other][s] for s in drawn[one] if s in drawn[other]}
        found = interval(both)
        if found and len(both) >= MIN_SPECS and (found.low > 0 or found.high < 0):
            rank[other if found.value > 0 else one] += 1
    return rank
