"""Times of right configurations over shapes, for a dispatch model.

- Configurations are checked at two shapes: a ragged one, and one with K long enough for every part.
- Timing is the tuner's warm regime with less of it: calls are queued without a pause, two products
  and the flush before each, and events alone time them. The difference between configurations is
  what counts here, and a search confirms a winner's time.
- After two rounds only configurations within a third of the fastest are timed on, and after six
  those within a tenth: on an H200 the median of six rounds repeated to 1.6 % (2026-11-22).
- Where the fastest takes half a millisecond or more, those near it are timed in streams as well: a
  training step is one, at the GPU's power limit. There the order is another. For logits of
  8192 x 128256 x 2048 on an H200, 128x160 and 128x176 were at 1.06 and 1.07 of cuBLAS warm, and
  at 0.97 and 1.00 in streams (2026-11-24). Both orders count alike.
"""

from __future__ import annotations

import math
import random
import statistics
from collections.abc import Mapping, Sequence

from coda_agent.agent.judge.clocks import DeviceClock
from coda_agent.agent.judge.machine import require_idle
from coda_agent.agent.judge.records import Progress, Survey, SurveyedShape, Tiles
from coda_agent.agent.judge.timing import steady
from coda_agent.agent.judge.tuner import Launched, Problem
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import TileConfig, offered
from coda_agent.specs import Spec, draw_inputs

# Rounds, after which those within so much of the fastest are timed on.
_STAGES = (2, 1.33), (4, 1.1), (10, 1.0)
_PRODUCTS = 2
_LONG_US = 500.0
_CHECKED = ((77, 288, 320), (48, 512, 4096))


def survey(
    spec: Spec, programs: Mapping[str, Program], admitted: Tiles, *, progress: Progress
) -> Survey:
    """Time the default program in one type at the bench shapes.

    Raises:
        MachineError: the GPU is in use.
    """
    require_idle()
    binding = spec.bindings()[0]
    name = spec.variant(binding)
    program, element = programs[name], next(e for p, e in admitted if p == name)
    types = dict.fromkeys(spec.types, element)
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    right = _right(spec, program, binding, element, admitted[name, element])
    clock, found = DeviceClock(), list[SurveyedShape]()
    for done, sizes in enumerate(spec.bench_shapes):
        m, n, k = (sizes[dim] for dim in spec.gemm_dims)
        progress(done, len(spec.bench_shapes), f"{m}x{n}x{k}")
        inputs = draw_inputs(spec, sizes, types, seed=done, device="cuda", binding=binding)
        configs = [c for c in offered(program, [(m, n, k)]) if c in right]
        runs = {c: Launched(spec, program, (inputs,), dtypes, c) for c in configs}
        for run in runs.values():
            run.restore(0)
        times = _timed(clock, runs)
        found.append(SurveyedShape(m=m, n=n, k=k, us={c.label: t for c, t in times.items()}))
        del inputs, runs
    return Survey(
        sms=torch.cuda.get_device_properties(0).multi_processor_count,
        dtype=spec.dtype_of(spec.gemm[0], types),
        configs={c.label: c for c in right},
        shapes=tuple(found),
    )


def _right(
    spec: Spec,
    program: Program,
    binding: Mapping[str, str],
    element: str,
    configs: Sequence[TileConfig],
) -> list[TileConfig]:
    """Choose the configurations that are right at every one of `_CHECKED`."""
    for shape in _CHECKED:
        sizes = dict(zip(spec.gemm_dims, shape, strict=True))
        problem = Problem(spec, program, binding, sizes, element)
        configs = [c for c in configs if problem.is_right(c)]
    return list(configs)


def _timed(clock: DeviceClock, runs: Mapping[TileConfig, Launched]) -> dict[TileConfig, float]:
    """Time each in random order each round: median microseconds.

    It is the least time of one that is far from the fastest. Those near the fastest of a long
    product are as far from it as they are on average of both regimes.
    """
    times: dict[TileConfig, list[float]] = {config: [] for config in runs}
    for run in runs.values():
        run(0)
    left = list(runs)
    for rounds, near in _STAGES:
        for _ in range(rounds):
            _round(clock, {config: runs[config] for config in left}, times)
        least = {config: min(times[config]) for config in left}
        limit = near * min(least.values(), default=0.0)
        left = [config for config in left if least[config] <= limit]
    # A busy host makes a call late now and then, and none early.
    us = {
        c: min(seen) if len(seen) == _STAGES[0][0] else statistics.median(seen)
        for c, seen in times.items()
    }
    fastest = min(us.values(), default=0.0)
    if fastest >= _LONG_US:
        close = {c.label: c for c, time in us.items() if time <= _STAGES[1][1] * fastest}
        streams = steady({label: runs[c] for label, c in close.items()}, gpu=clock)
        found = {close[n]: s.median_us for n, s in streams.items() if not s.fault}
        least_us = min(found.values(), default=0.0)
        us |= {c: math.sqrt(us[c] * time * fastest / least_us) for c, time in found.items()}
    return {c: round(time, 2) for c, time in us.items()}


def _round(
    clock: DeviceClock,
    runs: Mapping[TileConfig, Launched],
    times: Mapping[TileConfig, list[float]],
) -> None:
    """Add a time of each to its `times`."""
    clock.settle()
    clock.spin(1000.0)
    marks = {}
    for config in random.sample(list(runs), len(runs)):
        clock.work(_PRODUCTS)
        start = clock.mark()
        runs[config](0)
        marks[config] = start, clock.mark()
    clock.synchronize()
    for config, (start, stop) in marks.items():
        times[config].append(clock.elapsed_us(start, stop))
