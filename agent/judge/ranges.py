"""A program in float32's range: what overflows or vanishes there alone.

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

from coda_agent.agent.judge.draws import may_scale
from coda_agent.agent.judge.records import Finding, Inputs
from coda_agent.agent.judge.replaying import expression
from coda_agent.agent.judge.runners import replayed
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch

if TYPE_CHECKING:
    Outputs = Mapping[str, torch.Tensor]


_FLOAT32 = 2.0**-149, 2.0**128
_REFERENCE = 2.0**-100, 2.0**100
# Shares of the truth: what is right, what float32 leaves of it, and what is wrong. A layer norm of
# 2^66 is its bias in float32, which may be near.
_RIGHT, _SINGLE, _WRONG = 2.0**-20, 2.0**-7, 2.0**-6


def hold(value: Any, least: float, most: float) -> Any:
    """Hold elements in a range: 0 below `least`, infinite from `most`."""
    if not isinstance(value, torch.Tensor) or not value.is_floating_point():
        return value
    size = value.abs()
    value = value.where((size >= least) | value.isnan(), 0.0 * value.nan_to_num())
    return value.where(~(size >= most), math.inf * value.sign())


def range_fault(
    variant: Variant, inputs: Inputs, truth: Outputs, results: Outputs
) -> Finding | None:
    """Find an output that leaves float32's range, unlike the reference.

    Args:
        variant: What is judged.
        inputs: In float64.
        truth: The exact outputs.
        results: The program's in float64, which are right.
    """
    narrow, held = functools.partial(hold, least=_FLOAT32[0], most=_FLOAT32[1]), list[Any]()

    def noted(value: Any) -> Any:
        held.append(narrow(value))
        return held[-1]

    seen = replayed(variant.spec, variant.program, inputs, noted)
    values = {o: narrow(value) for o, value in seen.items()}
    # Of 0 nothing is lost but by an infinity, and the product, the first of all, is not near one.
    known = bool((held[0].abs() <= _REFERENCE[1]).all())
    suspects = {
        o: _near(results[o], due, _RIGHT)
        & ~_near(values[o], due, _WRONG)
        & ((due != 0) | ~values[o].isfinite() & known)
        for o, due in truth.items()
    }
    if not any(bool(mask.any()) for mask in suspects.values()):
        return None

    def touch(function: object, args: Sequence[Any], result: Any) -> Any:
        return hold(result, *_REFERENCE)

    whole = variant.reference(inputs, touch=touch)
    stays = _stays(variant, inputs)
    for o, due in truth.items():
        sound = _near(hold(whole[o], *_REFERENCE), due, _RIGHT)
        wrong = suspects[o] & sound & stays[o]
        if not bool(wrong.any()):
            continue
        at = variant.first_wrong(o, wrong, values[o], due)
        message = (
            f"{o} leaves float32's range: it is {at['got']:g} where {at['expected']:.9g} is due "
            f"and the reference stays in range{_culprit(variant, inputs)}"
        )
        return Finding(message=message, where={"fault": "overflow", **at})
    return None


def _stays(variant: Variant, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Find where the reference stays right in float32, somewhat scaled too.

    PyTorch's own functions overflow inside, too: near that edge another form may do so earlier.
    """
    stays: dict[str, torch.Tensor] = {}
    for factor in (1.0, 4.0, 0.25):
        near = {x: v * factor if may_scale(variant.spec, x) else v for x, v in inputs.items()}
        exact = variant.reference(near)
        single = variant.reference(near, wide=torch.float32)
        for o, due in exact.items():
            right = _near(single[o].double(), due, _SINGLE)
            stays[o] = stays[o] & right if o in stays else right
    return stays


def _near(value: torch.Tensor, due: torch.Tensor, share: float) -> torch.Tensor:
    return due.isfinite() & ((value - due).abs() <= share * due.abs())


def _culprit(variant: Variant, inputs: Inputs) -> str:
    """Name the first value that leaves the range by itself."""
    seen, graph = list[tuple[Any, Any]](), variant.program.graph

    def touch(value: Any) -> Any:
        seen.append((value, hold(value, *_FLOAT32)))
        return seen[-1][1]

    replayed(variant.spec, variant.program, inputs, touch)
    nodes = [i for i, n in enumerate(graph.nodes) if n.args]
    # The accumulator comes first.
    for i, (value, held) in zip(nodes, seen[1:], strict=False):
        if isinstance(value, torch.Tensor):
            left = value.isfinite() & (held != value)
            if bool(left.any()):
                lost = "overflows" if bool(held[left].isinf().any()) else "vanishes"
                return f"; `{expression(graph, i)}` {lost}"
    return ""
