"""A program in float32's range: what overflows or vanishes there, and not in float64.

Both readings run in float64 with each result held to a range: too large becomes an infinity,
too small 0. Nothing is rounded, so no other error of float32 enters. The program has
float32's own range. The reference has a narrower one, of 2^-100 to 2^100, which leaves room for its
operations in another order.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.records import Finding
from coda_agent.agent.judge.replaying import expression
from coda_agent.agent.judge.runners import replayed
from coda_agent.primitives.program import Program
from coda_agent.specs import Spec, run_reference

if TYPE_CHECKING:
    import torch


_FLOAT32 = 2.0**-149, 2.0**128
_REFERENCE = 2.0**-100, 2.0**100
# Shares of the truth: what is right, what float32 leaves of it, and what is wrong.
_RIGHT, _SINGLE, _WRONG = 2.0**-20, 2.0**-4, 2.0**-6


def hold(value: Any, least: float, most: float) -> Any:
    """Put a tensor's elements into a range: 0 below `least`, an infinity from `most` on."""
    import torch

    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    size = value.abs()
    value = value.where((size >= least) | value.isnan(), 0.0 * value.nan_to_num())
    return value.where(~(size >= most), math.inf * value.sign())


def range_fault(
    spec: Spec, program: Program, binding: Mapping[str, str], inputs: Mapping[str, Any],
    truth: Mapping[str, torch.Tensor], results: Mapping[str, torch.Tensor],
) -> Finding | None:  # fmt: skip
    """Find an output that leaves float32's range where the reference stays in it.

    Args:
        spec, program, binding: What is judged.
        inputs: In float64.
        truth: The exact outputs.
        results: The program's in float64, which are right.
    """

    narrow = functools.partial(hold, least=_FLOAT32[0], most=_FLOAT32[1])
    values = {o: narrow(value) for o, value in replayed(spec, program, inputs, narrow).items()}
    suspects = {
        o: _near(results[o], due, _RIGHT) & ~_near(values[o], due, _WRONG)
        for o, due in truth.items()
    }
    if not any(bool(mask.any()) for mask in suspects.values()):
        return None

    def touch(function: object, args: Sequence[Any], result: Any) -> Any:
        return hold(result, *_REFERENCE)

    held = run_reference(spec, inputs, binding=binding, exact=True, touch=touch)
    stays = _stays(spec, binding, inputs)
    for o, due in truth.items():
        sound = _near(hold(held[o], *_REFERENCE), due, _RIGHT)
        sound &= stays[o]
        places = (suspects[o] & sound).nonzero()
        if not len(places):
            continue
        at = tuple(int(i) for i in places[0])
        got, expected = (float(x[at]) for x in (values[o], due))
        text = _culprit(spec, program, inputs)
        message = (
            f"{o} leaves float32's range: it is {got:g} where {expected:.9g} is due and the "
            f"reference stays in range{text}"
        )
        where = {
            "fault": "overflow",
            "got": got,
            "expected": expected,
            "index": list(at),
            "output": o,
        }
        return Finding(message=message, where={**where, "program": program.name})
    return None


def _stays(
    spec: Spec, binding: Mapping[str, str], inputs: Mapping[str, Any]
) -> dict[str, torch.Tensor]:
    """Find where the reference is right in float32, and with inputs somewhat larger or smaller.

    PyTorch's own functions overflow inside, too: near that edge another form may do so earlier.
    """
    import torch

    stays: dict[str, torch.Tensor] = {}
    for factor in (1.0, 4.0, 0.25):
        near = {x: v * factor if _scales(spec, x) else v for x, v in inputs.items()}
        exact = run_reference(spec, near, binding=binding, exact=True)
        single = run_reference(spec, near, binding=binding, exact=True, wide=torch.float32)
        for o, due in exact.items():
            right = _near(single[o].double(), due, _SINGLE)
            stays[o] = stays[o] & right if o in stays else right
    return stays


def _scales(spec: Spec, x: str) -> bool:
    tensor = spec.inputs[x]
    return tensor.draw.kind != "integers" and tensor.domain in (None, (0.0, math.inf))


def _near(value: torch.Tensor, due: torch.Tensor, share: float) -> torch.Tensor:
    return due.isfinite() & (due != 0) & ((value - due).abs() <= share * due.abs())


def _culprit(spec: Spec, program: Program, inputs: Mapping[str, Any]) -> str:
    """Name the first value of the graph that leaves the range by itself."""
    import torch

    seen: list[tuple[Any, Any]] = []

    def touch(value: Any) -> Any:
        seen.append((value, hold(value, *_FLOAT32)))
        return seen[-1][1]

    replayed(spec, program, inputs, touch)
    nodes = [i for i, n in enumerate(program.graph.nodes) if n.args]
    # The accumulator comes first.
    for i, (value, held) in zip(nodes, seen[1:], strict=False):
        if isinstance(value, torch.Tensor):
            left = value.isfinite() & (held != value)
            if bool(left.any()):
                lost = "overflows" if bool(held[left].isinf().any()) else "vanishes"
                return f"; `{expression(program.graph, i)}` {lost}"
    return ""
