"""Clocks: how a regime times contenders side by side.

- "warm", "idle" and "steady" are the judge's, of the device alone (`agent/judge/timing.py`).
- "loop" is the host's, of calls that nothing waits for, until the device is done with the last.
- "host" is the host's, of a call until it returns: what a call costs the host.
- "ranks" is the host's, of a call that all processes of a case make together.
"""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from coda_agent.agent.judge import timing
from coda_agent.agent.judge.samples import Samples
from coda_agent.evals.cases import Call
from coda_agent.primitives.deferred import torch

Calls = Mapping[str, Call]
Clock = Callable[[Calls, int, str], Mapping[str, Samples]]
"""Takes calls by name, how many rounds, and the device."""

LOOPS, MOST_CALLS, LEAST_CALLS, LONGEST_US = 5, 200, 5, 20e3
BURST = 8


def loop(calls: Calls, _: int, device: str) -> dict[str, Samples]:
    """Time loops of up to 200 calls, in `LOOPS` random orders.

    A loop is shorter where its calls take more than 20 ms: there the host no longer decides.
    """
    wait = _wait(device)

    def run(call: Call, count: int) -> float:
        wait()
        started = time.perf_counter_ns()
        for i in range(count):
            call(i)
        wait()
        return (time.perf_counter_ns() - started) / 1e3 / count

    once = {name: run(call, LEAST_CALLS) for name, call in calls.items()}
    counts = {n: min(MOST_CALLS, max(LEAST_CALLS, int(LONGEST_US / us))) for n, us in once.items()}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for _ in range(LOOPS):
        for name in random.sample([*calls], len(calls)):
            times[name].append(run(calls[name], counts[name]))
    return {name: Samples(tuple(found)) for name, found in times.items()}


def host(calls: Calls, rounds: int, device: str) -> dict[str, Samples]:
    """Time calls until they return, in bursts of `BURST`, without waits between."""
    wait, clock = _wait(device), time.perf_counter_ns
    times: dict[str, list[float]] = {name: [] for name in calls}
    for turn in range(-2, rounds):  # the first two compile and warm up
        for name, call in calls.items():
            wait()
            started = clock()
            for i in range(BURST):
                call(i)
            took = (clock() - started) / 1e3 / BURST
            times[name] += [took] * (turn >= 0)
    return {name: Samples(tuple(found)) for name, found in times.items()}


def ranks(calls: Calls, rounds: int, device: str) -> dict[str, Samples]:
    """Time calls of all ranks together, after one round more."""
    import torch.distributed as dist

    wait = _wait(device)

    def took(call: Call, i: int) -> float:
        wait()
        dist.barrier()
        wait()
        started = time.perf_counter()
        call(i)
        wait()
        longest = torch.tensor((time.perf_counter() - started) * 1e6, device=device)
        dist.all_reduce(longest, dist.ReduceOp.MAX)
        return longest.item()

    order = random.Random(0)  # the same on all ranks
    times: dict[str, list[float]] = {name: [] for name in calls}
    for i in range(-1, rounds):
        for name in order.sample([*calls], len(calls)):
            us = took(calls[name], i)
            times[name] += [us] * (i >= 0)
    return {name: Samples(tuple(found)) for name, found in times.items()}


CLOCKS: Mapping[str, Clock] = {
    "idle": lambda calls, rounds, _: timing.interleave(calls, rounds, idle=True),
    "warm": lambda calls, rounds, _: timing.interleave(calls, rounds),
    "steady": lambda calls, *_: timing.steady(calls),
    "loop": loop,
    "host": host,
    "ranks": ranks,
}
"""By regime, in the order of pages."""


def _wait(device: str) -> Callable[[], object]:
    """Give what waits for the device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None
