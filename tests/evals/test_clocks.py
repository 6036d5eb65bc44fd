"""Tests of evals/clocks.py: times by the host's clock, on a CPU."""

from __future__ import annotations

import time
from collections.abc import Callable

from coda_agent.agent.judge.samples import speedup
from coda_agent.evals.clocks import BURST, LEAST_CALLS, LOOPS, MOST_CALLS, host, loop


def counting(seconds: float, seen: list[int]) -> Callable[[int], None]:
    return lambda i: (seen.append(i), time.sleep(seconds))[1]


def test_loops_are_shorter_where_calls_take_long() -> None:
    slow, fast = list[int](), list[int]()
    found = loop({"slow": counting(2e-3, slow), "fast": counting(5e-6, fast)}, 0, "cpu")
    assert 2e3 <= found["slow"].median_us < 4e3 and 5 <= found["fast"].median_us < 2e3
    assert len(slow) <= LEAST_CALLS + LOOPS * 10  # 20 ms at 2 ms a call
    assert len(fast) == LEAST_CALLS + LOOPS * MOST_CALLS
    assert speedup(found["fast"], found["slow"]).low > 1


def test_calls_are_timed_until_they_return() -> None:
    seen = list[int]()
    found = host({"one": counting(1e-3, seen)}, 4, "cpu")["one"]
    assert len(found.times_us) == 4 and len(seen) == (4 + 2) * BURST
    assert 1e3 <= found.median_us < 5e3
