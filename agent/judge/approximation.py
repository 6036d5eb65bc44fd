"""Tell a function that was approximated from one that is wrong.

The difference of an approximation is small, has a value nearly everywhere, or in one of several
branches, and moves little where the inputs do. That of a rounding jumps, and that of a mistake is
large somewhere.
"""

from __future__ import annotations

import re
from collections.abc import Iterator

from coda_agent import primitives
from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.replaying import COMPARISONS, Mistake, is_small
from coda_agent.agent.judge.runners import replayed
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.program import Program
from coda_agent.primitives.ptx import MEANINGS
from coda_agent.specs import Spec

_EVERYWHERE = 0.5  # of the elements
_FEW = 4  # elements in a branch
# A step of the product, and the share of the difference that may go by it. 16-bit numbers are
# nearer, so what was rounded to them is off by something else after it.
_STEP, _SMOOTH = 2.0**-7, 0.4
_NEAR, _MOST = 0.25, 0.9  # so far from the truth is what is off at most, but for a tenth of it


def approximation(
    variant: Variant, o: str, inputs: Inputs, out: torch.Tensor, truth: torch.Tensor
) -> Mistake | None:
    """Say that an output in float64 approximates the truth, or None."""
    spec, program = variant.spec, variant.program
    difference = out - truth
    there = (difference != 0) & truth.isfinite()
    off = difference[there]
    branches = any(node.op in ("where", *COMPARISONS) for node in program.graph.nodes)
    least = _FEW if branches else _EVERYWHERE * out.numel()
    if off.numel() < least or not is_small(difference, truth):
        return None
    share = off.abs() / truth[there].abs().clamp_min(1e-300)
    most = share.sort().values[int(_MOST * (len(share) - 1))]
    if not bool(most < _NEAR):  # something else, or nothing, is in its place
        return None
    a, _ = spec.gemm
    near = {**inputs, a: inputs[a] * (1 + _STEP)}
    then = replayed(spec, program, near)[o] - variant.reference(near)[o]
    moved = (then - difference)[there].abs().median()
    if not bool(moved <= _SMOOTH * off.abs().median()):
        return None
    text = (
        "the difference is small and smooth: a function is approximated, or a small term left out"
    )
    use = ", ".join(_lacking(spec, program))
    text += f". The program lacks what the reference calls: {use}" if use else ""
    return Mistake("approximated", text)


def _lacking(spec: Spec, program: Program) -> Iterator[str]:
    """List what the reference calls and the program lacks, as written."""
    used = {word for node in program.graph.nodes for word in re.findall(r"\w+", node.op[:20])}
    called = re.findall(r"(?<!math\.)\b([a-z]\w{2,})\(", spec.reference_source)
    for word in dict.fromkeys(called):
        if word in used:
            continue
        if known := [n for n in primitives.__all__ if n == word or n.startswith(f"{word}_")]:
            yield f"`{' or '.join(known)}`"
        elif word in MEANINGS:
            yield f'`ptx("{word}", …)`, whose instructions may be off by 2^-9'
