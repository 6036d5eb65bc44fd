"""Cases: what contenders compute, to be timed and checked against one truth.

- A `Case` is a name, contenders by name, and what sets it up on a device.
- A contender is called with the number of the round, so that it can rotate its inputs.
- Outputs are tensors by name, or functions that give one where looking at it takes time. What a
  contender leaves out is not checked.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from torch import Tensor

    from coda_agent.agent.judge.job import CompileJob

Outputs = Mapping[str, Any]
Call = Callable[[int], Any]
OURS, BASE = "ours", "eager"
"""Who is compared with the others, and whose errors ours are compared with where it takes part."""


class Absent(CodaError):
    """Why a contender, or a whole case, cannot take part here."""


@dataclass(frozen=True)
class Contender:
    """One who takes part.

    Attributes:
        call: What is timed.
        outputs: What is checked; by default what `call` returns.
        note: What it ran or leaves out, asked after it was called.
    """

    call: Call
    outputs: Callable[[], Outputs] | None = None
    note: Callable[[], str] = lambda: ""

    def checked(self) -> Outputs:
        """Compute what is compared with the truth."""
        return self.outputs() if self.outputs else self.call(0)


@dataclass
class Setup:
    """A case on a device.

    Attributes:
        makers: What builds a contender. What one raises is why the contender takes no part.
        truth: Outputs in float32 or wider, by name.
        limit: An output farther from the truth than this share of the truth's norm is wrong.
        rows: Of which rows the truth is, where not of all.
    """

    makers: Mapping[str, Callable[[], Contender]]
    truth: Outputs = field(default_factory=dict)
    limit: float = math.inf
    rows: slice | None = None

    def errors(self, outputs: Outputs) -> dict[str, float]:
        """Measure each output's distance from the truth over the truth's norm."""
        found: dict[str, float] = {}
        for name in [name for name in self.truth if name in outputs]:
            output, truth = outputs[name], self.truth[name]
            got: Any = output() if callable(output) else output
            got = (got if self.rows is None else got[self.rows]).reshape(truth.shape)
            distance = float((got.double() - truth).norm() / truth.norm())
            found[name] = distance if math.isfinite(distance) else math.inf
        return found


@dataclass(frozen=True)
class Case:
    """Something to measure.

    Attributes:
        contenders: Who takes part.
        make: Sets it up on a device; the second argument divides its sizes.
        regimes: How it can be timed; none where errors alone matter.
        ranks: How many processes, each with a GPU, it needs.
        job: What compiles its kernel; those of all cases are done side by side, before the first.
    """

    name: str
    contenders: Sequence[str]
    make: Callable[[str, int], Setup]
    regimes: Sequence[str] = ("warm", "idle", "steady", "loop")
    ranks: int = 1
    job: Callable[[], CompileJob] | None = None


@dataclass(frozen=True)
class Suite:
    """Cases that belong together.

    Attributes:
        about: Sentences for the page.
        regimes: Those that are timed unless others are asked for.
        rounds: Timed rounds of a case in the warm and idle regimes.
        group: Which cases have their geometric means taken together.
    """

    name: str
    about: str
    cases: Sequence[Case]
    regimes: Sequence[str] = ("warm",)
    rounds: int = 15
    group: Callable[[str], str] = lambda case: "all"


def operators_of(call: Callable[[], object]) -> dict[str, int]:
    """Count the operators that a call runs, by name."""
    from torch.profiler import ProfilerActivity, profile

    with profile(activities=[ProfilerActivity.CPU]) as seen:
        call()
    return {str(event.key): event.count for event in seen.key_averages()}


def differentiated(
    way: Callable[[Mapping[str, Tensor]], Sequence[Tensor]],
    values: Mapping[str, Tensor],
    phase: str,
) -> Callable[[int], Outputs]:
    """Make the call of a function's forward pass, backward pass, or both.

    Args:
        way: From values by name to outputs.
        values: Those that require gradients get them.
        phase: "forward", "backward" or "both". The gradients of outputs are drawn from a seed.

    Returns:
        What gives the outputs, as "out 0", …, and the gradients by the values' names.
    """

    def named(outs: Sequence[Tensor]) -> dict[str, Tensor]:
        return {f"out {i}": out.detach() for i, out in enumerate(outs)}

    if phase == "forward":
        return lambda _: named(way(values))
    outs = [*way(values)]
    seeded = torch.Generator(outs[0].device).manual_seed(1)
    draws = [torch.randn(o.shape, device=o.device, generator=seeded) for o in outs]
    grads = [draw.to(out.dtype) for draw, out in zip(draws, outs, strict=True)]
    inputs = {name: x for name, x in values.items() if x.requires_grad}

    def backward(outs: Sequence[Tensor], again: bool) -> dict[str, Tensor | None]:
        # As in a training step, each gradient comes to lie as its weight does.
        slopes = [(o, g) for o, g in zip(outs, grads, strict=True) if o.requires_grad]
        torch.autograd.backward(*map(list, zip(*slopes, strict=True)), retain_graph=again)
        found = {name: x.grad for name, x in inputs.items()}
        for x in inputs.values():
            x.grad = None
        return found

    if phase == "backward":
        return lambda _: backward(outs, True)

    def both(_: int) -> dict[str, Tensor | None]:
        outs = way(values)
        return {**named(outs), **backward(outs, False)}

    return both
