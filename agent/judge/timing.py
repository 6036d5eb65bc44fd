"""How long things take on a GPU, measured side by side.

- All contenders run in one process, call by call, in a random order each round. So drift of
  clocks and temperature hits all alike.
- Before each call the GPU spins if it must, and multiplies matrices, long enough to hide the
  slowest contender's host time. So launch overhead stays out, and the clock is that of a GPU at
  work, where it depends on the power that a kernel draws. Then whatever is pinned in the L2 cache
  is released, and the cache is overwritten.
- Three clocks time a call. CUDA events stand around it. The host times a window that ends when the
  whole device is idle. Where a result is final, CUPTI says what kernels ran on any stream.
- A call about which events and host disagree does not count. A busy host is late now and then, so
  more rounds are run until enough calls count.
- A contender has no times if CUPTI disagrees with the other clocks about it, or if too few of its
  calls count. An empty call is the measure: at most half as many as of that are too few.
- This regime is called warm. In the idle one nothing is multiplied before a call: the GPU spins
  until the host is ahead. `steady` times a third: one call back to back, until its own power draw
  has set the clock.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import lru_cache, partial
from typing import Any, NamedTuple

from coda_agent.agent.judge.clocks import SPIN, DeviceClock, Span, busy_us
from coda_agent.agent.judge.records import Clock
from coda_agent.agent.judge.samples import Samples

Call = Callable[[int], object]
"""A contender, called with the number of a round."""


class Contender(NamedTuple):
    """A call, and what is called around it, equally numbered.

    Attributes:
        call: What is timed.
        before: Puts back what the call changes in place.
        after: Verifies the output.
    """

    call: Call
    before: Call = lambda _: None
    after: Call = lambda _: None


Contenders = Mapping[str, Call | Contender]
"""By name."""
Device = Any
"""A `DeviceClock`, or what stands for it in a test."""
# One product takes 0.18 ms on an H200. After eight of them, ratios of kernels to cuBLAS were within
# 0.02 of those in a stream of calls without a pause. After none they were up to 0.08 lower. A host
# that needs longer than the most of them, as a training step's does, is waited for by a spin first.
_LEAST_PRODUCTS, _MOST_PRODUCTS = 8, 40
# The clocks may differ by so many microseconds, or by this share of the time. A wait for the device
# ends a few microseconds sooner or later, and work hidden below this changes no verdict.
TOLERANCE_US, TOLERANCE = 10.0, 0.05
_GAP_US = 5.0  # the device may idle this long before each launch of a contender
_LATE, _WAITED = "the clocks disagree: the host saw", "the clocks disagree: the device waited;"
# Where a busy host spoils rounds, up to so many times as many are run. With fewer, a search of 18
# tiles had to be repeated after a pause every time; the host of that H200 was late in half of the
# calls.
_STRETCH = 4
_PAUSES_S = (0.0, 2.0, 10.0)  # before each try to measure; the later ones follow a failed try
_NOTHING = ""  # the name of the empty call
_TRACED = 3  # rounds under the profiler
_FINAL_ROUNDS = 30  # from here on a measurement is no search, and is traced
_STEADY_US = 100e3  # how long a stream lasts, its second half timed; three contenders take 1 s
_LEAST_CALLS = 8
# A stream holds some 1000 launches. When it is full the host waits, and a host that is slower than
# the device is never ahead again.
_QUEUED_CALLS = 250
_MARK_US = 100.0  # a spin that marks a call in a trace
_LEAD_US = 2000.0  # how far the host is ahead of the device when a stream begins


@lru_cache(maxsize=1)
def _gpu() -> DeviceClock:
    """Make the process's one clock, which has to go on answering."""
    return DeviceClock()


class _Reading(NamedTuple):
    """One call in microseconds."""

    event_us: float  # between its events
    unseen_us: float  # what the host saw beyond the events of the whole window
    host_us: float  # the host's part of the call
    product_us: float  # one product before it


def _whole(contenders: Contenders) -> dict[str, Contender]:
    return {n: c if isinstance(c, Contender) else Contender(c) for n, c in contenders.items()}


def interleave(
    contenders: Contenders,
    rounds: int,
    *,
    warmup: int = 3,
    trace: bool | None = None,
    idle: bool = False,
    gpu: Device = None,
) -> dict[str, Samples]:
    """Time every contender once a round.

    Args:
        contenders: By name; called with the round number, so that a contender can rotate its
            inputs.
        rounds: Timed rounds; more where too few of them count.
        warmup: Rounds before, not timed.
        trace: Whether to run a few more rounds under the profiler; by default from 30 rounds on.
        idle: Whether the GPU spins before each call instead of multiplying.
        gpu: Another device than torch's current one, for tests.

    Returns:
        By name. Where the clocks disagree, samples without times that say why.
    """
    gpu, found = gpu or _gpu(), dict[str, Samples]()
    for pause in _PAUSES_S:
        gpu.wait(pause)
        found = _interleaved(gpu, _whole(contenders), rounds, warmup, trace, idle)
        if not any(s.fault.startswith((_LATE, _WAITED)) for s in found.values()):
            break
    return found


def _interleaved(
    gpu: Device, contenders: Mapping[str, Contender], rounds: int, warmup: int,
    trace: bool | None, idle: bool,
) -> dict[str, Samples]:  # fmt: skip
    calls = {**contenders, _NOTHING: Contender(lambda _: None)}
    readings: dict[str, list[_Reading]] = {name: [] for name in calls}
    products, spin_us = 0 if idle else _LEAST_PRODUCTS, _LEAD_US * idle
    for i in range(-warmup, _STRETCH * rounds):
        if i >= rounds and _enough(readings, rounds):
            break
        if i == 0 and warmup:
            host = max(min(r.host_us for r in found) for found in readings.values())
            once = statistics.median(r.product_us for found in readings.values() for r in found)
            if idle:
                spin_us = max(_LEAD_US, 1.5 * host)
            else:
                products = min(max(math.ceil(1.5 * host / once), _LEAST_PRODUCTS), _MOST_PRODUCTS)
                spin_us = max(0.0, 1.5 * host - products * once)
            readings = {name: [] for name in calls}
        turn = i % rounds if i < 0 else i
        for name in random.sample(list(calls), len(calls)):
            call, before, after = calls[name]
            before(i)
            readings[name].append(_window(gpu, partial(call, turn), products, spin_us))
            after(i)
    hidden = _hidden(readings)
    punctual = len(_kept(readings.pop(_NOTHING), hidden.pop(_NOTHING)))
    traced: dict[str, list[_Traced]] = {}
    lost = ""
    if rounds >= _FINAL_ROUNDS if trace is None else trace:
        traced, lost = _trace(gpu, contenders, products, spin_us or _MARK_US)
    found = {}
    for name, seen in readings.items():
        median = statistics.median(r.event_us for r in seen)
        kept = _kept(seen, hidden[name])
        typical = statistics.median(hidden[name])
        clock = Clock(
            regime="idle" if idle else "warm",
            method="events, host" + ", kernels" * bool(traced),
            hidden_us=round(typical, 2), products=products, left_out=len(seen) - len(kept),
            persisting_l2=gpu.persisting_l2,
        )  # fmt: skip
        fault = lost
        if not min(r.event_us for r in seen) > 0:
            fault = "a call took no time at all"
        elif 2 * len(kept) <= punctual or len(kept) < min(rounds, max(3, rounds // 5)):
            fault = f"{_LATE} {typical:.1f} us beside the {median:.1f} us between the events"
        elif traced:
            clock, disagreement = _compared(traced[name], clock)
            fault = fault or disagreement
        times = () if fault else tuple(seen[i].event_us for i in kept)
        found[name] = Samples(times, clock, fault, () if fault else kept)
    return found


def _hidden(readings: Mapping[str, Sequence[_Reading]]) -> dict[str, list[float]]:
    """Find what the host saw beyond the events and an empty call."""
    # The lower quartile stands for a punctual call: on a busy host a call is late now and then, but
    # never early. On one H200's host the median call of cuBLAS's product was 12 to 47 us later.
    empty = sorted(r.unseen_us for r in readings[_NOTHING])
    overhead = empty[len(empty) // 4]
    return {name: [r.unseen_us - overhead for r in seen] for name, seen in readings.items()}


def _kept(seen: Sequence[_Reading], hidden: Sequence[float]) -> tuple[int, ...]:
    """List the rounds about which events and host agree."""
    return tuple(i for i, us in enumerate(hidden) if abs(us) <= _tolerance(seen[i].event_us))


def _enough(readings: Mapping[str, Sequence[_Reading]], rounds: int) -> bool:
    """Whether enough rounds count, of every contender.

    Half as many as were asked for, and more than half as many as of the empty call.
    """
    hidden = _hidden(readings)
    kept = {name: len(_kept(seen, hidden[name])) for name, seen in readings.items()}
    return 2 * min(kept.values()) >= max(rounds, kept[_NOTHING] + 1)


def _tolerance(time_us: float) -> float:
    return max(TOLERANCE_US, TOLERANCE * time_us)


def _window(
    gpu: Device, call: Callable[[], object], products: int, spin_us: float = 0.0
) -> _Reading:
    gpu.settle()
    opened = gpu.now_us()
    first = gpu.mark()
    if spin_us:
        gpu.spin(spin_us)
    gpu.work(products)
    start = gpu.mark()
    called = gpu.now_us()
    call()
    host = gpu.now_us() - called
    stop = gpu.mark()
    gpu.synchronize()
    unseen = gpu.now_us() - opened - gpu.elapsed_us(first, stop)
    product = gpu.elapsed_us(first, start) / max(products, 1)
    return _Reading(gpu.elapsed_us(start, stop), unseen, host, product)


def steady(contenders: Contenders, *, rounds: int = 3, gpu: Device = None) -> dict[str, Samples]:
    """Time every contender's calls back to back, in random orders.

    Only the second half counts: on an H200 a product of 4096 was at its clock after some 40 calls.
    A spin holds the device until the host is far enough ahead, so host time stays out. A stream
    does not count where the device had to wait for the host, or where events and host disagree
    about it. Up to twice as many rounds are run until enough count.

    Args:
        contenders: As for `interleave`, called before; each call with its number in the stream.
            What precedes and follows is called around a stream, with 0 and with its last number.
        rounds: Streams of each.
        gpu: Another device than torch's current one, for tests.

    Returns:
        By name: microseconds a call, one a stream. Samples without times say why.
    """
    gpu, whole = gpu or _gpu(), _whole(contenders)
    plans = _plans(gpu, whole)
    times: dict[str, dict[int, float]] = {name: {} for name in whole}
    faults: dict[str, str] = {}
    for i in range(2 * rounds):
        if all(len(known) >= rounds for known in times.values()):
            break
        for name in random.sample(list(whole), len(whole)):
            (calls, lead_us), (call, before, after) = plans[name], whole[name]
            before(0)
            time_us, fault = _stream(gpu, call, calls, lead_us)
            after(calls - 1)
            if fault:
                faults[name] = fault
            else:
                times[name][i] = time_us
    found = {}
    for name, known in times.items():
        clock = Clock(regime="steady", method="events, host", calls=plans[name][0])
        if len(known) < rounds:
            found[name] = Samples((), clock, faults[name])
        else:
            found[name] = Samples(tuple(known.values()), clock, rounds=tuple(known))
    return found


def _plans(gpu: Device, contenders: Mapping[str, Contender]) -> dict[str, tuple[int, float]]:
    """Plan each stream: calls, and microseconds the host is ahead.

    All streams last equally long, since a longer one would be at the clock of a hotter GPU.
    """
    seen: dict[str, _Reading] = {}
    for i in range(2):  # the first call may be slow
        seen = {n: _window(gpu, partial(c.call, i), _LEAST_PRODUCTS) for n, c in contenders.items()}
    queued = [_QUEUED_CALLS * s.event_us for s in seen.values() if s.host_us > s.event_us]
    length_us = min([_STEADY_US, *queued])
    plans = {}
    for name, once in seen.items():
        calls = max(_LEAST_CALLS, round(length_us / max(once.event_us, 1.0)))
        behind_us = max(0.0, 1.5 * once.host_us - once.event_us)
        plans[name] = calls, _LEAD_US + behind_us * calls
    return plans


def _stream(gpu: Device, call: Call, calls: int, lead_us: float) -> tuple[float, str]:
    """Time a call in a stream's second half, or say why not."""
    gpu.settle()
    opened = gpu.now_us()
    first = gpu.mark()
    gpu.spin(lead_us)
    for i in range(calls // 2):
        call(i)
    middle = gpu.mark()
    for i in range(calls // 2, calls):
        call(i)
    queued = gpu.now_us() - opened
    stop = gpu.mark()
    gpu.synchronize()
    whole, half = gpu.elapsed_us(first, stop), gpu.elapsed_us(middle, stop)
    unseen = gpu.now_us() - opened - whole
    time_us = half / (calls - calls // 2)
    if abs(unseen) > _tolerance(half):
        return time_us, f"{_LATE} {unseen:.1f} us beside the {half:.1f} us between the events"
    if queued > whole - time_us:
        return (
            time_us,
            f"the device waited for the host, which queued {calls} calls in {queued:.0f} us",
        )
    return time_us, ""


class _Traced(NamedTuple):
    """One call: between its events, and what the device ran meanwhile."""

    event_us: float
    spans: list[Span]


def _trace(
    gpu: Device, contenders: Mapping[str, Contender], products: int, spin_us: float
) -> tuple[dict[str, list[_Traced]], str]:
    """Trace a few calls of each contender, or say why not.

    CUPTI may have answered before in this process and not answer now, or it may have lost kernels.
    """
    events: list[tuple[str, float]] = []

    def body() -> None:
        for i in range(_TRACED):
            for name, (call, before, after) in contenders.items():
                before(i)
                gpu.settle()
                gpu.work(products)
                gpu.spin(spin_us)
                start = gpu.mark()
                call(i)
                stop = gpu.mark()
                gpu.synchronize()
                gpu.spin()
                gpu.synchronize()
                after(i)
                events.append((name, gpu.elapsed_us(start, stop)))

    spans = gpu.trace(body)
    had, gpu.traces = gpu.traces, bool(spans)
    if not spans:
        return {}, "the clock changed: CUPTI saw kernels before, and sees none now" * bool(had)
    groups = list(_marked(spans))
    if len(groups) != len(events):
        return {}, f"the profiler saw {len(groups)} calls, expected {len(events)}"
    found: dict[str, list[_Traced]] = {name: [] for name in contenders}
    for (name, event_us), group in zip(events, groups, strict=True):
        found[name].append(_Traced(event_us, group))
    return found, ""


def _marked(spans: Sequence[Span]) -> Iterator[list[Span]]:
    """Group spans between odd marks and the even ones after them."""
    group: list[Span] | None = None
    for span in sorted(spans, key=lambda s: s.start_us):
        if SPIN not in span.name:
            if group is not None:
                group.append(span)
        elif group is None:
            group = []
        else:
            yield group
            group = None


def _compared(traced: Sequence[_Traced], clock: Clock) -> tuple[Clock, str]:
    """Add what CUPTI saw to a clock, and where they disagree.

    It saw more than the events of the same calls did, or the device idled between them.
    """
    busy = statistics.median(busy_us(t.spans) for t in traced)
    event = statistics.median(t.event_us for t in traced)
    launches = tuple(sorted({len(t.spans) for t in traced}))
    kernels = tuple(s.name[:80] for s in traced[-1].spans)
    more = {"busy_us": round(busy, 2), "traced_us": round(event, 2)}
    clock = clock.model_copy(update={**more, "launches": launches, "kernels": kernels})
    tolerance = _tolerance(event)
    said = f"kernels ran for {busy:.1f} us and {event:.1f} us passed between the events"
    if busy - event > tolerance:
        return clock, f"the clocks disagree: {said}"
    # So a busy host does, too: one of 19 kernels could not be judged for 0.4 ms of it on an H100.
    waited = event - busy > tolerance + _GAP_US * launches[-1]
    return clock, f"{_WAITED} {said}" * waited
