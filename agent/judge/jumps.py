"""A program in float32 at the jumps of a reference.

Elsewhere a difference at a jump is excused, since errors of arithmetic decide to which side a value
falls. Here inputs lie on the jumps and beside them (`ties.py`), and PyTorch in float32 says which
side is due. It is sure of one where its argument has no rounding in it, and the number that it is
compared with is one of the program's own.

A program is refused where it gives what the reference gives on the other side of a sure jump. What
it loses otherwise in float32 is judged elsewhere.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coda_agent.agent.judge.disturbance import errors
from coda_agent.agent.judge.records import Finding
from coda_agent.agent.judge.runners import interpreted, replayed
from coda_agent.agent.judge.ties import (
    MARK,
    bare,
    called,
    constants,
    floating,
    is_short,
    rounded_number,
)
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Graph
from coda_agent.primitives.program import Program
from coda_agent.specs import Spec, run_reference

if TYPE_CHECKING:
    Outputs = Mapping[str, torch.Tensor]
    Held = Callable[[int, Any], Any]

_COMPARISONS = (
    "gt", "ge", "lt", "le", "eq", "ne", "greater", "greater_equal", "less", "less_equal",
)  # fmt: skip
_STEPS = ("floor", "ceil", "round", "trunc", "fix", "sign", "sgn", "frexp")
# PyTorch gives these without error where that is a float32: powers of two and their exponents.
_POWERS = "exp2", "log2"
_INEXACT = ("divide", "mean", "var", "std", "norm", "hardswish", "hardsigmoid", "addcdiv")
_FAR = 300  # an exponent that no number has
_MOST = 8  # jumps of a reference that are looked at
# Shares: of an element, the least that a jump is; of a jump, the most that a program is off it.
_LARGE, _NEAR = 2.0**-6, 0.25


@dataclass(frozen=True)
class Jump:
    """A jump that the reference took in float32: arguments and result."""

    name: str
    args: tuple[Any, ...]
    result: Any

    def sure(self, exact: Sequence[Any], known: set[float]) -> torch.Tensor:
        """Find where arguments are exact; `known` are numbers that count too."""
        result = self.result[1] if self.name == "frexp" else self.result
        sure = torch.ones_like(result, dtype=torch.bool)
        for one, other in zip(self.args, exact, strict=True):
            if isinstance(one, torch.Tensor) and one.is_floating_point():
                sure &= one.double() == other
            elif isinstance(one, float) and not is_short(one):
                sure &= rounded_number(abs(one)) in known
        return sure

    def other_sides(self) -> list[Any]:
        """List what it may have given instead."""
        if self.name == "frexp":
            mantissa, exponent = self.result
            return [(mantissa * 2.0**-step, exponent + step) for step in (1, -1)]
        if self.result.dtype == torch.bool:
            return [~self.result]
        return [self.result + 1.0, self.result - 1.0]


def jump_fault(variant: Variant, inputs: Mapping[str, Any], alone: bool) -> Finding | None:
    """Find an output that takes another side than the reference in float32.

    Args:
        variant: What is judged.
        inputs: Numbers that float32 holds, in float64.
        alone: Whether float32 alone decides. Else the program is on the other side without
            rounding, too, with its constants as float32 has them.
    """
    spec, program = variant.spec, variant.program
    known = {rounded_number(c) for c in constants(program.graph)}
    found = sides(spec, variant.binding, inputs, known)
    if not found:
        return None
    single = {x: v.float() if floating(v) else v for x, v in inputs.items()}
    dtypes = dict.fromkeys(program.outputs, torch.float32)
    runs = [interpreted(spec, program, single, dtypes=dtypes)]
    if not alone:
        runs.append(replayed(spec, _in_float32(program), dict(inputs)))
    for o, due, other, sure in found:
        size = (other - due).abs()
        wrong = sure & (size > _LARGE * due.abs().maximum(other.abs()))
        for run in runs:
            wrong &= (run[o].double() - other).abs() <= _NEAR * size
        if bool(wrong.any()):
            at = variant.first_wrong(o, wrong, runs[0][o], due)
            message = (
                f"{o} takes the other side of a jump: in float32 it is {at['got']:.9g} where "
                f"{at['expected']:.9g} is due, and PyTorch is sure of its side; a threshold is "
                "met, a number rounded, or an exponent taken, otherwise"
            )
            return Finding(message=message, where=at)
    return None


def sides(
    spec: Spec, binding: Mapping[str, str], inputs: Mapping[str, Any], known: set[float]
) -> list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]:
    """List outputs as due, on a jump's other side, and where sure.

    Sure is where the reference in float32 is sure of that jump and of all others.
    """
    jumps = list[Jump]()

    def noted(function: Any, args: tuple[Any, ...], result: Any) -> Any:
        if _jumps(function, args):
            jumps.append(Jump(called(function), args, _apart(result)))
        return result

    about = {"binding": binding, "exact": True}
    single = run_reference(spec, inputs, **about, wide=torch.float32, touch=noted)
    if not 0 < len(jumps) <= _MOST:
        return []

    def run(held: Held) -> tuple[Outputs, list[tuple[Any, ...]]]:
        seen = list[tuple[Any, ...]]()

        def touch(function: Any, args: tuple[Any, ...], result: Any) -> Any:
            if _jumps(function, args) and len(seen) < len(jumps):
                seen.append(args)
                return held(len(seen) - 1, result)
            if floating(result) and _inexact(called(function)):
                result = result * (1.0 + MARK)
            return bare(function, args, result)

        return run_reference(spec, inputs, **about, touch=touch), seen

    due, seen = run(lambda i, result: _like(jumps[i].result, result))
    if len(seen) != len(jumps):
        return []
    sure = [jump.sure(args, known) for jump, args in zip(jumps, seen, strict=True)]
    turned, _ = run(lambda i, result: _unsure(_like(jumps[i].result, result), sure[i]))
    found = list[tuple[str, torch.Tensor, torch.Tensor, torch.Tensor]]()
    for i, jump in enumerate(jumps):
        for side in jump.other_sides() if bool(sure[i].any()) else ():
            other, _ = run(
                lambda j, result, i=i, side=side: _like(side if i == j else jumps[j].result, result)
            )
            for o, value in due.items():
                certain = (turned[o] == value) & (single[o].double() - value).abs().le(
                    _LARGE * _NEAR * value.abs()
                )
                found.append((o, value, other[o], certain))
    return found


def _unsure(known: Any, sure: torch.Tensor) -> Any:
    """Turn what is not sure, so that what hangs on it shows."""
    if isinstance(known, tuple):
        return type(known)([known[0].where(sure, math.nan), known[1].where(sure, _FAR)])
    return known ^ ~sure if known.dtype == torch.bool else known.where(sure, math.nan)


def _apart(result: Any) -> Any:
    """Copy what a jump gave, which a reference may write over."""
    if isinstance(result, tuple):
        return type(result)([_apart(x) for x in result])
    return result.detach().clone()


def _like(known: Any, result: Any) -> Any:
    """Give a jump's result the types that it has in this run."""
    if isinstance(result, tuple):
        return type(result)([x.to(y.dtype) for x, y in zip(known, result, strict=True)])
    return known.to(result.dtype)


def _in_float32(program: Program) -> Program:
    """Round a program's constants to float32."""
    nodes = [
        dataclasses.replace(n, value=rounded_number(n.value)) if n.op == "const" else n
        for n in program.graph.nodes
    ]
    return dataclasses.replace(program, graph=Graph(nodes, program.graph.outputs))


def _jumps(function: Any, args: tuple[Any, ...]) -> bool:
    """Whether a call is a jump of real numbers."""
    if any(isinstance(x, torch.Tensor) and x.is_complex() for x in args):
        return False
    name = called(function)
    # A rounding to decimals, of two arguments, multiplies by a power of ten inside.
    return name in _COMPARISONS or (name in _STEPS and len(args) == 1)


def _inexact(name: str) -> bool:
    known = errors()
    return name not in _POWERS and bool(
        name in _INEXACT or known.get(name) or known.get(f"__{name}__")
    )
