"""Wall time of a call in an eager loop, where the host's work counts as much as the GPU's."""

from __future__ import annotations

import random
import time
from collections.abc import Callable, Mapping

from coda_agent.agent.judge.samples import Samples

CALLS, ROUNDS = 200, 5
_LONGEST_US, _FEWEST = 20e3, 5


def time_loops(
    calls: Mapping[str, Callable[[int], object]], gpu_us: Mapping[str, float], device: str
) -> dict[str, Samples]:
    """Time loops of up to `CALLS` calls that nothing waits in, in `ROUNDS` random orders; the last
    wait for the device counts.

    Args:
        calls: By name; each called with its number in the loop.
        gpu_us: About how long the device takes for a call. A loop is shorter where 200 of them take
            more than 20 ms, since the host then no longer decides.
        device: "cuda", or "cpu" for tests.

    Returns:
        By name: microseconds a call, one a loop.
    """
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
    numbers = {n: min(CALLS, max(_FEWEST, int(_LONGEST_US / gpu_us[n]))) for n in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for i in range(_FEWEST):
            call(i)
    for _ in range(ROUNDS):
        for name in random.sample(list(calls), len(calls)):
            call = calls[name]
            wait()
            started = time.perf_counter_ns()
            for i in range(numbers[name]):
                call(i)
            wait()
            times[name].append((time.perf_counter_ns() - started) / 1e3 / numbers[name])
    return {name: Samples(tuple(found)) for name, found in times.items()}
