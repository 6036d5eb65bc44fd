"""A program in float32: digits that it loses there, and the reference does not.

Both readings of `meaning.py` run in float64, where 1 - σ(x) is as good as σ(-x). So the program is
replayed once more, each result rounded to float32, and compared with its own float64. What an
output's type does not show is allowed, and what the reference may err in float32 for the same
inputs. Inputs near float32's range are left to `ranges.py`.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping
from functools import partial
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.compare import SAFETY, largest_change, least_of, unit_of
from coda_agent.agent.judge.digits import tops
from coda_agent.agent.judge.disturbance import Way, disturbed
from coda_agent.agent.judge.draws import NEARLY, around, draw_doubles, held
from coda_agent.agent.judge.records import Finding, Inputs
from coda_agent.agent.judge.replaying import Replay, found_lost
from coda_agent.agent.judge.runners import replayed
from coda_agent.agent.judge.structures import base_shape
from coda_agent.agent.judge.ties import SUMS, called, floating
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch
from coda_agent.specs.reference import storage

if TYPE_CHECKING:
    Outputs = Mapping[str, torch.Tensor]

_UNIT = 2.0**-24
# Where a row's largest is taken off first, e^x is to overflow without that.
_LARGE = 2.0**12
# Of inputs, and of an output: squares and products of two inputs stay in range. Smaller inputs are
# left to `ranges.py`, too: out * magnitude / norm vanishes where all three are 2^-110.
_INPUT, _OUTPUT = 2.0**40, 2.0**100
# Inputs so near may be told apart no better by the reference: its errors there count, too.
_NEAR = 2.0**-22
# An element beside a jump is on its other side in half of the runs, and may seem to stand still in
# a few.
_RUNS = 2, 8, 64
# torch's own lose the digits of their tails in float32. By chance an element has them.
_SUMMED = "gelu", "gelu_backward"


def cancelling_draws(variant: Variant, seed: int) -> Iterator[tuple[str, dict[str, Any]]]:
    """Draw inputs; one nearly cancels what the reference adds it to, or the largest of its row.

    What it adds to each column cancels in all rows where these are alike.
    """
    spec, a = variant.spec, variant.spec.gemm[0]
    inputs = draw_doubles(spec, variant.binding, base_shape(spec), seed)
    generator = torch.Generator().manual_seed(seed)
    for alike in (False, True):
        rows = inputs[a][:1].expand(inputs[a].shape) if alike else inputs[a]
        given = held(spec, inputs | {a: _LARGE * rows})
        for x, value in _cancelling(variant, given).items():
            if alike and value.numel() != given[spec.gemm[1]].shape[0]:
                continue
            low, high = spec.inputs[x].domain or (-math.inf, math.inf)
            within = min(1.0, high / float(value.max().clamp_min(1e-300)))  # what A is scaled by
            near = around({x: within * value}, generator, NEARLY)[x].float().double()
            label = f"{x} nearly cancels what it is added to{' in equal rows' * alike}"
            yield label, held(spec, given | {a: within * given[a], x: near.clamp(low, high)})


def _cancelling(variant: Variant, inputs: Inputs) -> dict[str, torch.Tensor]:
    """Find what inputs would cancel, of those that the reference adds to something."""
    from torch.func import debug_unwrap

    spec, seen = variant.spec, dict[str, torch.Tensor]()
    free = {x for x, t in spec.inputs.items() if t.draw.kind != "integers"} - {*spec.gemm}
    places = {storage(v): x for x, v in inputs.items() if x in free and floating(v)}

    def touch(function: Any, args: tuple[Any, ...], result: Any) -> Any:
        if called(function) in SUMS and all(map(floating, args[:2])):
            for one, other in itertools.permutations(args[:2]):
                x = places.get(storage(one))
                if x and x not in seen and one.numel() == inputs[x].numel():
                    value = debug_unwrap(other).detach().expand(result.shape)
                    shape = (1,) * (result.ndim - one.ndim) + tuple(one.shape)
                    folded = [d for d, n in enumerate(shape) if n < result.shape[d]]
                    value = -value if called(function).endswith("add") else value
                    value = value.amax(folded) if folded else value
                    seen[x] = value.reshape(inputs[x].shape).clone()
        return result

    variant.reference(inputs, touch=touch)
    return seen


def digits_fault(
    variant: Variant, inputs: Inputs, truth: Outputs, results: Outputs, seed: int
) -> Finding | None:
    """Find an output whose digits are lost in float32, unlike the reference's.

    Args:
        variant: What is judged.
        inputs: In float64.
        truth: The exact outputs.
        results: The program's in float64, which are right.
        seed: What the disturbances follow from.
    """
    spec = variant.spec
    sizes = (float(abs(torch.as_tensor(v)).max()) for v in inputs.values())
    if any(size > _INPUT or 0 < size < 1 / _OUTPUT for size in sizes):
        return None
    rounded = replayed(spec, variant.program, inputs, _single)
    for o, right in results.items():
        dtype = getattr(torch, spec.dtype_of(o, spec.default_types()))
        if not dtype.is_floating_point:
            continue
        top, _ = tops(spec, o)
        out, right, due = (x.clamp(-top, top) for x in (rounded[o], right, truth[o]))
        size = right.abs()
        sound = due.isfinite() & (size < _OUTPUT) & ((size > 1 / _OUTPUT) | (size == 0))
        allowed = unit_of(dtype) * size + least_of(dtype)
        wrong = sound & ~((out - right).abs() <= allowed)
        for runs in _RUNS:
            if wrong.any():
                noise = SAFETY * _noise(variant, o, inputs, truth[o], seed, runs)
                wrong &= noise.isfinite() & ~((out - right).abs() <= allowed + noise)
                # The reference may be 0 too early, in float64 as well.
                wrong &= ~((out - due).abs() <= allowed + noise)
        if wrong.any():
            return _finding(variant, o, inputs, out, right, wrong)
    return None


def _single(value: Any) -> Any:
    return value.float().double() if floating(value) else value


def _noise(
    variant: Variant, o: str, inputs: Inputs, truth: torch.Tensor, seed: int, runs: int
) -> torch.Tensor:
    """Find what the reference errs in float32 at these inputs, and around them."""
    spec, binding = variant.spec, variant.binding
    generator = torch.Generator().manual_seed(seed)
    # What a GPU's approximations err of their range is left out: here the program's are exact, too.
    moved = [disturbed(spec, inputs, binding, seed + i, Way(sign=0.0))[o] for i in range(runs)]
    noise = largest_change(truth, moved)
    for _ in range(runs):
        near = {x: _single(v) for x, v in around(inputs, generator, _NEAR).items()}
        single = variant.reference(near, wide=torch.float32)[o].double()
        noise = noise.maximum(largest_change(variant.reference(near)[o], [single]))
        noise = noise.where(single.isfinite(), math.inf)
    off = [variant.reference(inputs, touch=partial(_summed, unit))[o] for unit in (_UNIT, -_UNIT)]
    return noise.maximum(largest_change(truth, off))


def _summed(unit: float, function: Any, args: tuple[Any, ...], result: Any) -> Any:
    """Move what torch computes as a share, 1 + erf(x) or 1 + tanh(x), of its argument."""
    return result + unit * args[0].abs() if called(function) in _SUMMED else result


def _finding(
    variant: Variant, o: str, inputs: Inputs, out: torch.Tensor, right: torch.Tensor,
    wrong: torch.Tensor,
) -> Finding:  # fmt: skip
    """Say what is lost, and by which operation."""
    replay = Replay(variant, o, inputs, right)
    replay.out, replay.wrong = out, wrong
    replay.difference = ((out - right) / right).abs()
    lost = found_lost(replay, _UNIT)
    at = variant.first_wrong(o, wrong, out, right)
    what, fault = "loses its digits in float32", "cancellation"
    if not math.isfinite(at["got"]):
        what, fault = "leaves float32's range", "overflow"
    message = (
        f"{o} {what}: it is {at['got']:g} where {at['expected']:.9g} is due, which the reference "
        "gives"
    ) + (f"; {lost.text}" if lost else "")
    return Finding(message=message, where={"fault": lost.fault if lost else fault, **at})
