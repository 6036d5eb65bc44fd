"""What numbers differ by in any case, and what a program's own roundings take of an output."""

from __future__ import annotations

import math

from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.replaying import followed
from coda_agent.agent.judge.runners import replayed
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Node
from coda_agent.specs import Spec

_RELATIVE = 1e-9
# An element below this is 0 in every type.
LEAST = 1e-290
# A constant that is right to float32's rounding makes the same kernel.
_CONSTANT = 2.0**-24
# What an operation of the program may round, and the share of an element that all of them may. A
# program may lose half of its digits: of float32's 24 it then keeps 12, and a 16-bit type has 11 at
# most. x + (1 - cos(2x)) / 2 loses that much near 10^-8, where log(1 + x) loses nearly all.
_ROUNDING = 2.0**-52
_HALF = 2.0**-26
# torch's softplus is x itself above 20, which is less than log(1 + e^x) by this share.
_CUT = 2.0**-33


def tops(spec: Spec, o: str) -> tuple[float, float]:
    """Give where a store saturates, and the largest number of its type."""
    dtype = getattr(torch, spec.dtype_of(o, spec.default_types()))
    most = torch.finfo(dtype).max
    return most if dtype.itemsize == 1 else math.inf, most


def known(truth: torch.Tensor) -> torch.Tensor:
    """Bound what each element may differ in any case."""
    return _RELATIVE * truth.abs() + LEAST


def differs(
    out: torch.Tensor, truth: torch.Tensor, allowed: torch.Tensor | None = None
) -> torch.Tensor:
    """Find where the truth is finite and `out` differs, or is NaN."""
    allowed = known(truth) if allowed is None else allowed
    return truth.isfinite() & ~((out - truth).abs() <= allowed)


class Roundings:
    """What roundings of constants and operations come to in an output.

    One replay tells it of one node. They are asked one by one, those nearest to the output first,
    and only while an element is wrong: all of 150 nodes took 45 s where two constants were enough.
    """

    def __init__(self, variant: Variant, inputs: Inputs, o: str, out: torch.Tensor) -> None:
        program = variant.program
        self._about, self._out = (variant.spec, program, inputs, o), out
        self._constants, self._operations = torch.zeros_like(out), torch.zeros_like(out)
        nodes = program.graph.nodes
        needed = {program.graph.outputs[o]}
        for i in reversed(range(len(nodes))):
            needed |= set(nodes[i].args) if i in needed else set()
        # Short and whole numbers are meant exactly, and what a value is to equal: beside it nothing
        # does. What softplus' cut is off by may be most of a remainder.
        met = {a for n in nodes for a in n.args if n.op == "equal"}
        exact = (
            n.op in ("acc", "operand")
            or (n.op == "const" and (i in met or n.value in (_short(n), _whole(n))))
            for i, n in enumerate(nodes)
        )
        asked = [i for i, short in enumerate(exact) if i in needed and not short]
        self._left = sorted(asked, key=lambda i: (self._share(nodes[i]), i))

    def wrong(self, expected: torch.Tensor, allowed: torch.Tensor) -> torch.Tensor:
        """Find the elements that are further off than all this allows."""
        while True:
            rounded = self._operations.minimum(_HALF * expected.abs())
            wrong = differs(self._out, expected, allowed + self._constants + rounded)
            if not self._left or not wrong.any():
                return wrong
            self._ask(self._left.pop())

    def _ask(self, i: int) -> None:
        spec, program, inputs, o = self._about
        (top, _), share = tops(spec, o), self._share(program.graph.nodes[i])
        moved = self._operations if share == _ROUNDING else self._constants
        other = replayed(spec, followed(program, {i: ("mul", 1 + share)}), inputs)[o]
        moved += (other.clamp(-top, top) - self._out).abs().nan_to_num(0.0, 0.0, 0.0)

    @staticmethod
    def _share(node: Node) -> float:
        return {"const": _CONSTANT, "softplus": _CUT}.get(node.op, _ROUNDING)


def _short(node: Node) -> float:
    """Give the number next to a constant, of those that bfloat16 has."""
    return float(torch.tensor(node.value).bfloat16())


def _whole(node: Node) -> float:
    """Give the whole number next to a constant, of those that float32 has."""
    return float(round(node.value)) if abs(node.value) < 2**24 else math.nan
