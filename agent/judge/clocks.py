"""A GPU's clocks, and what keeps it busy."""

from __future__ import annotations

import contextlib
import ctypes
import math
import time
from collections.abc import Callable, Sequence
from typing import NamedTuple

from coda_agent.primitives.deferred import torch

# Several times the 60 MB of an H200's L2.
_FLUSH_BYTES = 256 << 20
_FLUSHES = 2
_PRODUCT = 4096
SPIN = "spin_kernel"
"""What `DeviceClock.spin` launches: marks calls in a trace."""
# What Kineto lists beside kernels, copies and fills, as if the device ran it.
_WAITS = {"Context Sync", "Device Sync", "Stream Sync", "Event Sync", "Stream Wait Event"}


class Span(NamedTuple):
    """Something the device ran, of any stream."""

    name: str
    start_us: float
    end_us: float


class DeviceClock:
    """The current CUDA device, as far as timing needs it."""

    def __init__(self) -> None:
        self._scratch = torch.empty(_FLUSH_BYTES // 4, dtype=torch.float32, device="cuda")
        shape = (3, _PRODUCT, _PRODUCT)
        self._a, self._b, self._c = torch.randn(shape, device="cuda").to(torch.bfloat16)
        self._driver, self.persisting_l2 = None, "not released: no libcuda.so.1"
        with contextlib.suppress(OSError):
            self._driver = ctypes.CDLL("libcuda.so.1")
            limit = 6  # CU_LIMIT_PERSISTING_L2_CACHE_SIZE
            refused = self._driver.cuCtxSetLimit(limit, ctypes.c_size_t(0))
            self.persisting_l2 = f"not released: CUDA error {refused}" if refused else "released"
        self.traces: bool | None = None
        """Whether CUPTI answers; None until asked."""

    def now_us(self) -> float:
        return time.perf_counter_ns() / 1e3

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream."""
        event = torch.cuda.Event(enable_timing=True)
        event.record()
        return event

    def elapsed_us(self, start: torch.cuda.Event, stop: torch.cuda.Event) -> float:
        return 1000 * start.elapsed_time(stop)

    def synchronize(self) -> None:
        """Wait for every stream."""
        torch.cuda.synchronize()

    def wait(self, seconds: float) -> None:
        time.sleep(seconds)

    def settle(self) -> None:
        """Wait until nothing runs, with nothing pinned in the cache."""
        if self._driver is not None:
            self._driver.cuCtxResetPersistingL2Cache()
        torch.cuda.synchronize()

    def work(self, times: int) -> None:
        """Multiply matrices, then overwrite the cache."""
        for _ in range(times):
            torch.mm(self._a, self._b, out=self._c)
        for _ in range(_FLUSHES):
            self._scratch.zero_()

    def spin(self, time_us: float = 100.0) -> None:
        """Launch a kernel known by its name, of about so long."""
        torch.cuda._sleep(int(2000 * time_us))  # an H200's clock is 1.98 GHz at most

    def trace(self, body: Callable[[], None]) -> list[Span]:
        """List what ran on the device in `body`, if CUPTI says."""
        from torch.profiler import DeviceType, ProfilerActivity, profile, supported_activities

        if ProfilerActivity.CUDA not in supported_activities():
            return []
        with profile(activities=[ProfilerActivity.CUDA]) as seen:
            body()
            torch.cuda.synchronize()
        events = [
            e for e in seen.events() or () if e.device_type == DeviceType.CUDA
            and not e.is_user_annotation and e.name not in _WAITS
        ]  # fmt: skip
        return [Span(e.name, e.time_range.start, e.time_range.end) for e in events]


def busy_us(spans: Sequence[Span]) -> float:
    """Measure how long any of the spans ran."""
    total, until = 0.0, -math.inf
    for span in sorted(spans, key=lambda s: s.start_us):
        total += max(0.0, span.end_us - max(span.start_us, until))
        until = max(until, span.end_us)
    return total
