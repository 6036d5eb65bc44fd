"""Tests of evals/clocks.py: times by the host's clock, here a clock that calls alone turn."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace

import pytest

from coda_agent.agent.judge.samples import speedup
from coda_agent.evals import clocks
from coda_agent.evals.clocks import BURST, LEAST_CALLS, LOOPS, MOST_CALLS, host, loop

Counting = Callable[[int, list[int]], Callable[[int], None]]


@pytest.fixture
def counting(monkeypatch: pytest.MonkeyPatch) -> Counting:
    """Make a call that takes so many microseconds and notes what it was called with."""
    now = [0]
    monkeypatch.setattr(clocks, "time", SimpleNamespace(perf_counter_ns=lambda: now[0]))

    def make(us: int, seen: list[int]) -> Callable[[int], None]:
        def call(i: int) -> None:
            seen.append(i)
            now[0] += us * 1000

        return call

    return make


def test_loops_are_shorter_where_calls_take_long(counting: Counting) -> None:
    slow, fast, between = list[int](), list[int](), list[int]()
    calls = {"slow": (10_000, slow), "between": (1_000, between), "fast": (5, fast)}
    found = loop({name: counting(*what) for name, what in calls.items()}, 0, "cpu")
    assert {name: times.times_us for name, times in found.items()} == {
        name: (us,) * LOOPS for name, (us, _) in calls.items()
    }
    assert len(slow) == LEAST_CALLS + LOOPS * LEAST_CALLS
    assert len(between) == LEAST_CALLS + LOOPS * 20  # 20 ms at 1 ms a call
    assert len(fast) == LEAST_CALLS + LOOPS * MOST_CALLS
    assert speedup(found["fast"], found["slow"]).ratio == 2000


def test_calls_are_timed_until_they_return(counting: Counting) -> None:
    seen = list[int]()
    found = host({"one": counting(3, seen)}, 4, "cpu")["one"]
    assert found.times_us == (3,) * 4
    assert len(seen) == (4 + 2) * BURST  # two bursts warm up
