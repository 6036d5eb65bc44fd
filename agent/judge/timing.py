"""How long things take on a GPU, measured side by side.

- All contenders run in one process, call by call, in a random order each round: clocks and
  temperature drift hits all alike.
- Before each call the L2 cache is overwritten, which also gives the host time to queue the call:
  launch overhead stays out.
- A result is a median with a bootstrap interval; a comparison is the ratio of medians with its own
  interval.
"""

from __future__ import annotations

import random
import statistics
import subprocess
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

# Twice 256 MiB: several times the 60 MB of an H200's L2, and about 0.15 ms, longer than any
# contender's host time.
_FLUSH_BYTES = 256 << 20


@dataclass(frozen=True)
class Samples:
    """Times of one contender, microseconds, one a round."""

    times_us: tuple[float, ...]

    @property
    def median_us(self) -> float:
        return statistics.median(self.times_us)

    def interval_us(self) -> tuple[float, float]:
        """95 % bootstrap interval of the median."""
        return _bootstrap(
            lambda pick: statistics.median(self.times_us[i] for i in pick), len(self.times_us)
        )

    def to_dict(self) -> dict[str, Any]:
        low, high = self.interval_us()
        return {
            "median_us": round(self.median_us, 3),
            "interval_us": [round(low, 3), round(high, 3)],
            "times_us": [round(t, 2) for t in self.times_us],
        }


def speedup(ours: Samples, other: Samples) -> dict[str, float]:
    """How many times faster `ours` is: ratio of medians, 95 % bootstrap interval over rounds."""

    def ratio(pick: Sequence[int]) -> float:
        theirs = statistics.median(other.times_us[i] for i in pick)
        return theirs / statistics.median(ours.times_us[i] for i in pick)

    rounds = len(ours.times_us)
    low, high = _bootstrap(ratio, rounds)
    return {"ratio": round(ratio(range(rounds)), 4), "low": round(low, 4), "high": round(high, 4)}


def _bootstrap(statistic: Callable[[Sequence[int]], float], n: int) -> tuple[float, float]:
    rng = random.Random(0)  # resampling noise only; the same samples give the same interval
    values = sorted(statistic(rng.choices(range(n), k=n)) for _ in range(400))
    return values[10], values[389]


def interleave(
    contenders: Mapping[str, Callable[[int], Any]],
    rounds: int,
    *,
    warmup: int = 3,
    before: Callable[[str, int], None] | None = None,
    after: Callable[[str, int], None] | None = None,
) -> dict[str, Samples]:
    """Time every contender once a round.

    Args:
        contenders: By name; called with the round number, so that a contender can rotate its
            inputs.
        rounds: Timed rounds.
        warmup: Rounds before, not timed.
        before: Called with (name, round) before the cache is overwritten for a timed call: to put
            back what the call changes in place.
        after: Called with (name, round) after each timed call, on the same stream: to verify the
            output.
    """
    import torch

    scratch = torch.empty(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
    events: dict[str, list[tuple[Any, Any]]] = {name: [] for name in contenders}
    order = list(contenders)
    for i in range(-warmup, rounds):
        random.shuffle(order)
        for name in order:
            if before is not None:
                before(name, i)
            scratch.zero_()
            scratch.zero_()
            start, stop = torch.cuda.Event(enable_timing=True), torch.cuda.Event(enable_timing=True)
            start.record()
            contenders[name](i % max(rounds, 1))
            stop.record()
            if after is not None:
                after(name, i)
            if i >= 0:
                events[name].append((start, stop))
        # Bounds the queue: a thousand pending launches would block the host inside a timed region.
        torch.cuda.synchronize()
    return {
        name: Samples(tuple(1000 * s.elapsed_time(e) for s, e in pairs))
        for name, pairs in events.items()
    }


def gpu_state() -> dict[str, Any]:
    """Clocks, temperature, power, throttling and processes of GPU 0, as nvidia-smi reports them."""
    fields = (
        "name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw",
        "clocks_event_reasons.active", "utilization.gpu",
    )  # fmt: skip
    query = [
        "nvidia-smi",
        "-i",
        "0",
        f"--query-gpu={','.join(fields)}",
        "--format=csv,noheader,nounits",
    ]
    apps = ["nvidia-smi", "-i", "0", "--query-compute-apps=pid", "--format=csv,noheader"]
    try:
        row = subprocess.run(query, capture_output=True, text=True, timeout=20, check=True).stdout
        pids = subprocess.run(apps, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError) as error:
        return {"error": f"nvidia-smi: {error}"}
    state: dict[str, Any] = dict(zip(fields, (v.strip() for v in row.split(",")), strict=False))
    state["compute_processes"] = len(pids.split())
    return state
