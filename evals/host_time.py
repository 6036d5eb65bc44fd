"""What a call of a kernel costs the host, until the launch is enqueued, and whose part is what.

- At the smallest check shape the device is done before the next call, so that it is the host that
  is timed. The host waits for it every few calls, and that wait is not timed.
- All that is timed takes turns: a busy machine then slows all of it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from dataclasses import dataclass
from statistics import median
from typing import TYPE_CHECKING, Any

from coda_agent.specs import draw_inputs

if TYPE_CHECKING:
    from coda_agent.generated.kernel import Kernel

ROUNDS, CALLS = 40, 8

HEADER = (
    "kernel", "outputs", "call us", "limit us", "torch.mm us", "of it", "compiled us",
    "compiled mm us", "lookup", "allocation", "launch", "folds", "rest",
)  # fmt: skip


@dataclass(frozen=True)
class HostTime:
    """Host time of one kernel, medians in microseconds.

    Attributes:
        kernel: Its name.
        outputs: How many it returns.
        call: Its public function, called eagerly for final values.
        mm: `torch.mm(out=…)` of operands as large, in 16 bits.
        compiled: The function under torch.compile(fullgraph=True); None where that was left out.
        compiled_mm: A product of such operands under torch.compile.
        lookup: Of the eager call, reading what its plan depends on.
        allocation: Making its buffers.
        launch: The launch itself.
        folds: Folding partials, and what else follows the launch.
    """

    kernel: str
    outputs: int
    call: float
    mm: float
    compiled: float | None
    compiled_mm: float | None
    lookup: float
    allocation: float
    launch: float
    folds: float

    @property
    def limit(self) -> float:
        """What a call may cost: 30 us, and 5 for each further output."""
        return 25.0 + 5.0 * self.outputs

    @property
    def rest(self) -> float:
        """What no part accounts for: binding arguments, checks of the mode, the way there."""
        return self.call - self.lookup - self.allocation - self.launch - self.folds

    def row(self) -> tuple[str, ...]:
        """As `HEADER` says."""

        def shown(x: float | None) -> str:
            return "–" if x is None else f"{x:.1f}"

        numbers = self.lookup, self.allocation, self.launch, self.folds, self.rest
        return (
            self.kernel, str(self.outputs), shown(self.call), f"{self.limit:.0f}", shown(self.mm),
            f"{self.call / self.mm:.2f}", shown(self.compiled), shown(self.compiled_mm),
            *map(shown, numbers),
        )  # fmt: skip


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
    import torch

    from coda_agent.primitives.launch import signature

    spec = kernel.spec
    sizes = min(spec.check_shapes, key=lambda sizes: math.prod(sizes.values()))
    values: list[Any] = list(
        draw_inputs(spec, sizes, spec.default_types(), seed=0, device=device).values()
    )
    variant = next(iter(kernel.variants.values()))
    m, n, k = (sizes[dim] for dim in spec.gemm_dims)
    left, right = (torch.zeros(r, k, dtype=torch.bfloat16, device=device) for r in (m, n))
    product = torch.empty(m, n, dtype=torch.bfloat16, device=device)
    right = right.t()

    with torch.no_grad():
        kernel(*values)
        plan = list(variant.function.plans.values())[-1]
        a, b = (values[i] for i in variant.gemm)
        operands = variant.named(values)
        buffers = plan.buffers(operands)

        def folds() -> None:
            for o, fold in plan.folds:
                fold(buffers[o])

        calls: dict[str, Callable[[], Any]] = {
            "call": lambda: kernel(*values),
            "mm": lambda: torch.mm(left, right, out=product),
            "lookup": lambda: signature(values),
            "allocation": lambda: plan.buffers(operands),
            "launch": lambda: plan.bound(a, b, operands, buffers),
            "folds": folds,
        }
        if compiled:
            torch._dynamo.reset()  # another kernel's guards would be tried first
            calls["compiled"] = _compiled(kernel, values)
            calls["compiled_mm"] = _compiled(torch.mm, [left, right])
        found = _timed(calls, device, rounds)
    return HostTime(
        spec.name,
        len(spec.outputs),
        **{"compiled": None, "compiled_mm": None} | found,  # pyright: ignore[reportArgumentType]
    )


def _compiled(call: Callable[..., Any], values: list[Any]) -> Callable[[], Any]:
    import torch

    traced = torch.compile(lambda *given: call(*given), fullgraph=True)
    return lambda: traced(*values)


def _timed(calls: dict[str, Callable[[], Any]], device: str, rounds: int) -> dict[str, float]:
    """By name, the median time of a call."""
    import torch

    wait = torch.cuda.synchronize if device == "cuda" else lambda: None
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
