"""The arithmetic of timing; the clock itself needs a GPU (tests/gpu)."""

from __future__ import annotations

import random

from coda_agent.agent.judge.timing import Samples, speedup


def test_median_and_interval() -> None:
    samples = Samples(tuple(float(t) for t in range(1, 100)))
    assert samples.median_us == 50.0
    low, high = samples.interval_us()
    assert 38 < low < 50 < high < 62


def test_speedup_is_other_over_ours() -> None:
    ours, other = Samples((10.0, 10.0, 10.0)), Samples((12.0, 12.0, 12.0))
    assert speedup(ours, other) == {"ratio": 1.2, "low": 1.2, "high": 1.2}


def test_the_interval_covers_the_true_ratio_about_as_often_as_it_says() -> None:
    rng = random.Random(3)
    covered = 0
    for _ in range(100):
        ours = Samples(tuple(rng.gauss(100, 5) for _ in range(40)))
        other = Samples(tuple(rng.gauss(110, 5) for _ in range(40)))
        r = speedup(ours, other)
        covered += r["low"] <= 1.1 <= r["high"]
    assert 85 <= covered <= 100
