"""Times of a contender, and what they say beside another's.

A result is a median; a comparison is the median of the rounds' ratios. Intervals are order
statistics: exact whatever the noise, since the order within a round is random.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache

from coda_agent.agent.judge.records import Clock, Ratio, Timing
from coda_agent.primitives.errors import MachineError

# A kernel compared with itself is called different with probability MISS at most. That is 0.4 of
# 200 comparisons on average, and more than two of them with a probability of 0.8 %. A difference
# below MIN_EFFECT is never called one.
MISS, MIN_EFFECT = 0.002, 0.005


@dataclass(frozen=True)
class Samples:
    """Times of one contender.

    Attributes:
        times_us: Microseconds, one a round that counts; none where the clocks disagree.
        clock: How they were measured, and what each clock said.
        fault: Why there are no times.
        rounds: The rounds that count; by default the first ones.
    """

    times_us: tuple[float, ...]
    clock: Clock | None = None
    fault: str = ""
    rounds: tuple[int, ...] = ()

    def by_round(self) -> dict[int, float]:
        """List the times by round.

        Raises:
            MachineError: there are none.
        """
        return dict(zip(self.rounds or range(len(self.times_us)), self.trusted_us, strict=True))

    @property
    def trusted_us(self) -> tuple[float, ...]:
        """The times.

        Raises:
            MachineError: there are none.
        """
        if self.fault:
            raise MachineError(self.fault)
        return self.times_us

    @property
    def median_us(self) -> float:
        return statistics.median(self.trusted_us)

    def interval_us(self) -> tuple[float, float]:
        """Give the 95 % interval of the median."""
        return interval(self.trusted_us, 0.05)

    def timing(self) -> Timing:
        """Give the times as they are kept.

        Raises:
            MachineError: there are none.
        """
        low, high = self.interval_us()
        return Timing(
            median_us=round(self.median_us, 3),
            interval_us=(round(low, 3), round(high, 3)),
            times_us=tuple(round(t, 2) for t in self.times_us),
            clock=self.clock,
        )


def speedup(ours: Samples, other: Samples) -> Ratio:
    """Give how many times faster `ours` is: median ratio and interval.

    Raises:
        MachineError: one of them has no times, or they have no round in common.
    """
    own, theirs = ours.by_round(), other.by_round()
    ratios = [theirs[i] / own[i] for i in own.keys() & theirs.keys()]
    if not ratios:
        raise MachineError("the clocks disagree: no round of both counts")
    low, high = interval(ratios, MISS)
    return Ratio(ratio=round(statistics.median(ratios), 4), low=round(low, 4), high=round(high, 4))


def different(ratio: Ratio) -> bool:
    """Whether a `speedup` shows that one of the two is faster."""
    return ratio.low > 1 + MIN_EFFECT or ratio.high < 1 - MIN_EFFECT


def interval(values: Sequence[float], miss: float) -> tuple[float, float]:
    """Bound a median by order statistics, missed with probability `miss` at most.

    They are the extremes where there are too few values for that: for `MISS`, below 10.
    """
    ordered, k = sorted(values), _rank(len(values), miss)
    return ordered[k - 1], ordered[-k]


@lru_cache(maxsize=64)
def _rank(n: int, miss: float) -> int:
    """Find largest k with 2 P(X < k) ≤ miss, X binomial."""
    below, k = 0, 0
    while k < n // 2 and 2 * (below + math.comb(n, k)) <= miss * 2**n:
        below += math.comb(n, k)
        k += 1
    return max(k, 1)  # the extremes, where values are too few: for `MISS`, below 10
