"""Ways to run a graph on a GPU, and the fastest one."""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.specs.recording import alone

if TYPE_CHECKING:
    from coda_agent.agent.judge.samples import Samples

_ALONE = {"joint_custom_post_pass": None, "triton.cudagraphs": False, "cpp_wrapper": False}
"""What is compiled to be timed has no pass that asks for it, nor graphs of CUDA of its own, and is
called from Python, where what asks becomes a package, too."""
_ROUNDS, _CALLS = 11, 4
"""How often ways to run a plan are timed beside each other in loops, and calls of a loop."""
_GPU_ROUNDS = 29
"""How often the GPU's own time is taken. With 11 rounds 5 % were no difference."""
_ALIKE = 1.01
"""Times of a GPU that are no difference. A rotation that took 18.4 us beside 17.8, within their
intervals, had a launch less and was taken for its loop: ModernBERT lost 3 us a layer (H200)."""


class Inductor:
    """A function of tensors, compiled by Inductor for its first call.

    ATen's calls are handed to it, as torch.compile hands them after Dynamo, whose guards were asked
    before the graph was reached.
    """

    def __init__(self, function: Callable[..., object]) -> None:
        self._function = function
        self._compiled: Any = None

    def __call__(self, *tensors: torch.Tensor) -> list[torch.Tensor]:
        compiled = self._compiled or self.compile(tensors)
        return [*compiled(*tensors)]

    def compile(self, tensors: Sequence[torch.Tensor]) -> Any:
        """Compile for such tensors."""
        from torch._guards import tracing
        from torch._inductor import config
        from torch._inductor.compile_fx import compile_fx
        from torch._inductor.virtualized import V
        from torch.fx.experimental.proxy_tensor import make_fx

        # Nothing of a graph that is being compiled around this, nor the pass that asks for it.
        with (
            alone(), torch.no_grad(), tracing(None),
            V.set_aot_compilation(False), config.patch(_ALONE),
        ):  # fmt: skip
            given: list[torch.Tensor] = [t.detach() for t in tensors]
            trace = make_fx(self._function, tracing_mode="fake", _allow_non_fake_inputs=True)
            traced = trace(*given)  # what was packed before is no input
            self._compiled = compile_fx(traced, given)
        return self._compiled


def fastest(runs: Mapping[str, Callable[[], object]]) -> tuple[str, dict[str, float]]:
    """Name the fastest, and give the GPU times of all in us.

    What the GPU takes decides, in the judge's warm regime: so it is inside a CUDA graph and behind
    other work. Where it takes alike, a loop as Python runs it does: there the host's time counts.
    What is not faster by its whole interval does not take the first one's place, nor does what
    seems slower by more than `_ALIKE`.
    """
    from coda_agent.agent.judge.samples import different, speedup
    from coda_agent.agent.judge.timing import interleave

    loops = dict(zip(runs, times_of([*runs.values()]), strict=True))
    times = interleave({name: lambda _, run=run: run() for name, run in runs.items()}, _GPU_ROUNDS)
    if any(found.fault for found in times.values()):
        times = loops
    best = next(iter(runs))
    for name in runs:
        by = speedup(times[name], times[best])
        if not different(by):
            if times[name].median_us > _ALIKE * times[best].median_us:
                continue
            by = speedup(loops[name], loops[best])
        best = name if different(by) and by.ratio > 1 else best
    return best, {name: found.median_us for name, found in times.items()}


def times_of(runs: Sequence[Callable[[], object]]) -> list[Samples]:
    """Time calls in loops, by the host's time where it is longer."""
    from coda_agent.agent.judge.samples import Samples

    times: list[list[float]] = [[] for _ in runs]
    for i in range(-2, _ROUNDS):
        for which in random.sample(range(len(runs)), len(runs)):
            start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
            torch.cuda.synchronize()
            start.record()
            for _ in range(_CALLS):
                runs[which]()
            end.record()
            torch.cuda.synchronize()
            if i >= 0:
                times[which].append(1e3 * start.elapsed_time(end) / _CALLS)
    return [Samples(tuple(found)) for found in times]
