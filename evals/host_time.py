"""Times by the host's clock: what a call of a kernel costs it, whose part is what, and eager loops.

- At the smallest check shape the device is done before the next call, so that it is the host that
  is timed. The host waits for it every few calls, and that wait is not timed.
- All that is timed takes turns: a busy machine then slows all of it.
"""

from __future__ import annotations

import math
import random
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch

from coda_agent.agent.judge.samples import Samples
from coda_agent.generated.kernel import Kernel
from coda_agent.primitives.errors import LaunchError
from coda_agent.specs import draw_inputs

ROUNDS, CALLS = 40, 8
LOOPS, LOOP = 5, 200
_LONGEST_US, _FEWEST = 20e3, 5

TIMED = {
    "call": "the public function, called eagerly for final values",
    "mm": "torch.mm(out=…) of operands as large, in 16 bits",
    "lookup": "of a call: finding its plan",
    "allocation": "of a call: making its buffers",
    "launch": "of a call: the launch itself",
    "folds": "of a call: folding partials, all in one launch",
    "compiled": "the function under torch.compile(fullgraph=True)",
    "compiled mm": "torch.mm under torch.compile",
}


@dataclass(frozen=True)
class HostTime:
    """Host times of one kernel.

    Attributes:
        kernel: Its name.
        outputs: How many it returns.
        median_us: Of what `TIMED` lists, as far as it was timed.
    """

    kernel: str
    outputs: int
    median_us: dict[str, float]

    @property
    def limit_us(self) -> float:
        """What a call may cost: 30 us, and 5 for each further output."""
        return 25.0 + 5.0 * self.outputs


def table(found: list[HostTime]) -> list[list[str]]:
    """A line for each kernel, below their header; microseconds."""
    lines = [["kernel", "outputs", "limit", *TIMED]]
    for x in found:
        times = [f"{x.median_us[t]:.1f}" if t in x.median_us else "–" for t in TIMED]
        lines.append([x.kernel, str(x.outputs), f"{x.limit_us:.0f}", *times])
    return lines


def measure(
    kernel: Kernel, *, device: str = "cuda", compiled: bool = True, rounds: int = ROUNDS
) -> HostTime:
    """Time the calls of `kernel`, its first variant, with what they are made of.

    Args:
        kernel: An accepted kernel.
        device: "cuda", or "cpu" for tests.
        compiled: Whether under torch.compile as well.
        rounds: Turns of `CALLS` calls each.
    """
    spec = kernel.spec
    sizes = min(spec.check_shapes, key=lambda sizes: math.prod(sizes.values()))
    drawn = draw_inputs(spec, sizes, spec.default_types(), seed=0, device=device)
    values: list[Any] = list(drawn.values())
    taken = kernel.given(values)
    variant = next(iter(kernel.variants.values()))
    m, n, k = (sizes[dim] for dim in spec.gemm_dims)
    left, right = (torch.zeros(r, k, dtype=torch.bfloat16, device=device) for r in (m, n))
    product, right = left.new_empty(m, n), right.t()
    with torch.no_grad():
        kernel(*taken)
        plan = variant.recent.find(values, None)
        if plan is None:
            raise LaunchError(f"{spec.name}: no plan was kept of its call")
        inputs = variant.inputs(values)
        buffers = plan.buffers(inputs, {})
        calls: dict[str, Callable[[], Any]] = {
            "call": lambda: kernel(*taken),
            "mm": lambda: torch.mm(left, right, out=product),
            "lookup": lambda: variant.recent.find(values, None),
            "allocation": lambda: plan.buffers(inputs, {}),
            "launch": lambda: plan.bound(inputs, buffers),
            "folds": lambda: plan.finish and plan.finish(list(buffers)),
        }
        if compiled:
            torch._dynamo.reset()  # another kernel's guards would be tried first
            ours = torch.compile(lambda *given: kernel(*given), fullgraph=True)
            bare = torch.compile(lambda x, y: torch.mm(x, y), fullgraph=True)
            calls |= {"compiled": lambda: ours(*taken), "compiled mm": lambda: bare(left, right)}
        return HostTime(spec.name, len(spec.outputs), _timed(calls, device, rounds))


def _timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """By name, the median time of a call."""
    wait = _wait(device)
    times: dict[str, list[int]] = {name: [] for name in calls}
    clock = time.perf_counter_ns
    for turn in range(rounds + 2):
        for name, call in calls.items():
            wait()
            for _ in range(CALLS):
                started = clock()
                call()
                took = clock() - started
                if turn > 1:  # the first two compile and warm up
                    times[name].append(took)
    wait()
    return {name: median(found) / 1e3 for name, found in times.items()}


def time_loops(
    calls: Mapping[str, Callable[[int], object]], gpu_us: Mapping[str, float], device: str
) -> dict[str, Samples]:
    """Time loops of up to `LOOP` calls that nothing waits in, in `LOOPS` random orders; the last
    wait for the device counts.

    Args:
        calls: By name; each called with its number in the loop.
        gpu_us: About how long the device takes for a call. A loop is shorter where 200 of them take
            more than 20 ms, since the host then no longer decides.
        device: "cuda", or "cpu" for tests.

    Returns:
        By name: microseconds a call, one a loop.
    """
    wait = _wait(device)
    numbers = {n: min(LOOP, max(_FEWEST, int(_LONGEST_US / gpu_us[n]))) for n in calls}
    times: dict[str, list[float]] = {name: [] for name in calls}
    for call in calls.values():
        for i in range(_FEWEST):
            call(i)
    for _ in range(LOOPS):
        for name in random.sample(list(calls), len(calls)):
            call = calls[name]
            wait()
            started = time.perf_counter_ns()
            for i in range(numbers[name]):
                call(i)
            wait()
            times[name].append((time.perf_counter_ns() - started) / 1e3 / numbers[name])
    return {name: Samples(tuple(found)) for name, found in times.items()}


def _wait(device: str) -> Callable[[], None]:
    """What waits for the device."""
    return torch.cuda.synchronize if device == "cuda" else lambda: None
