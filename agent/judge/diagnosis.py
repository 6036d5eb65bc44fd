"""Name the most likely fault of a wrong output.

- A fault is a hypothesis that predicts the whole wrong output. Some predict it from the truth
  alone: a factor, a swap, a shift.
- Others run the exact reference on changed inputs: an operand left out or read along the other
  axis, a K tail of zeros, a rounded product. That covers any epilogue, since the reference carries
  its nonlinearities.
- The prediction that explains most of the difference wins. Among equals the simpler one wins, which
  is tried first.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

from coda_agent.agent.judge import repairs
from coda_agent.agent.judge.approximation import approximation
from coda_agent.agent.judge.records import Inputs, JsonObject
from coda_agent.agent.judge.replaying import Mistake, is_small, lost_digits
from coda_agent.agent.judge.runners import replayed
from coda_agent.agent.judge.suspects import Suspect, counterfactual, structural
from coda_agent.agent.judge.variant import Variant
from coda_agent.agent.judge.wrong_output import Origin, WrongOutput, is_paired
from coda_agent.primitives.deferred import torch
from coda_agent.specs import Spec

if TYPE_CHECKING:
    from coda_agent.agent.judge.oracle import Case
    from coda_agent.agent.judge.wrong_output import Reference
    from coda_agent.primitives.program import Program

FAULTS = {
    "race": "differs between two runs",
    "unwritten": "a region never written, or stale",
    "not_finite": "NaN or an infinity where a number is due, or NaN for an infinity",
    "constant_factor": "a constant factor, or sign, on the output or on one term",
    "swapped_pair": "even and odd columns swapped",
    "shifted_pair": "columns shifted by one, or by one pair",
    "shifted_tile": "a tile at its neighbour's place",
    "missing_operand": "an operand left out",
    "doubled_operand": "an operand applied twice",
    "swapped_operands": "two operands in each other's place",
    "wrong_broadcast": "a vector read along the other axis",
    "k_tail": "a part of K skipped",
    "early_rounding": "rounded to 16 bits where float32 was due",
    "rounded_statistics": "a statistic of rounded values",
    "wrong_statistics": "another statistic, axis, divisor or extent",
    "approximated": "a function computed nearly",
    "wrong_function": "none of these: another activation, term or order of operations",
    **repairs.FAULTS,
}
_CLAIM, _CLAIM_FACTOR = 0.85, 0.97  # least share that a fault, and a factor, must explain
_CLAIM_EXACT = 1 - 1e-9  # where nothing was rounded
_CERTAIN = 0.9995  # share that ends the search
_FEW = 4  # elements that any factor explains
# What digits that the program itself loses may be taken for.
_VAGUE = ("early_rounding", "rounded_statistics", "wrong_function", "wrong_statistics")


@dataclass(frozen=True)
class Diagnosis:
    """What is most likely wrong with an output.

    Attributes:
        fault: A key of `FAULTS`.
        text: One sentence.
        where: fault, row, column (or row alone), got, expected of the worst element; at_tile, its
            tile's coordinates; parity where only even or odd columns are wrong; there, the inputs
            of the worst element by name, `acc` and what its columns read; rows, a few neighbours
            as [row, got, expected].
    """

    fault: str
    text: str
    where: JsonObject


def diagnose_meaning(
    variant: Variant, o: str, inputs: Inputs, out: torch.Tensor, truth: torch.Tensor,
    others: Iterable[Inputs],
) -> Diagnosis:  # fmt: skip
    """Diagnose an output in float64: the program itself is wrong.

    Args:
        variant: The program, whose output is wrong by what it says.
        o: The output's name.
        inputs: What it was computed from.
        out: What was got.
        truth: What is due.
        others: Further inputs, on which a mistake found in the program is tried.
    """
    wrong = WrongOutput(out, truth, _origin(variant, inputs, o))
    sets = ((x, variant.reference(x)[o]) for x in others)
    found = repairs.mistake(variant, o, itertools.chain([(inputs, truth)], sets))
    if found:
        return _named(wrong, found)
    seen = diagnose(wrong, wrong.out)
    if seen.fault != "wrong_function":
        return seen
    if found := approximation(variant, o, inputs, out, truth):
        return _named(wrong, found)
    return replace(seen, text=repairs.sided(variant, o, inputs, truth) or seen.text)


def diagnose_stored(
    variant: Variant, case: Case, o: str, runs: tuple[torch.Tensor, torch.Tensor],
    tile: tuple[int, int],
) -> Diagnosis:  # fmt: skip
    """Diagnose a stored output of a program that means the right thing.

    Args:
        variant: The program, which may lose digits.
        case: What it ran on.
        o: The output's name.
        runs: The output, and that of a second run.
        tile: Rows and columns of a CTA tile of the product.
    """
    out, truth = runs[0], case.truth[o]
    origin = _origin(variant, case.inputs, o)
    wrong = WrongOutput(out, truth, origin, tile, case.allowed.get(o))
    seen = diagnose(wrong, runs[1])
    if seen.fault == "unwritten":
        own = replayed(variant.spec, variant.program, case.inputs)[o].reshape(wrong.out.shape)
        nan, empty = wrong.out.isnan(), wrong.wrong & (wrong.out == 0)
        if bool(nan.any()) and bool(own[nan].isnan().all()):  # so it was written
            return _answer(wrong, "not_finite", *wrong.beyond())
        if case.label and not bool(nan.any()) and bool((own[empty] == 0).all()):  # and so was this
            text = f"{wrong.region(empty)} is 0, which the program makes of such inputs"
            return _answer(wrong, "wrong_function", text, empty)
    if seen.fault in _VAGUE and (found := lost_digits(variant, o, case.inputs, out, truth)):
        return _named(wrong, found)
    return seen


def _origin(variant: Variant, inputs: Inputs, o: str) -> Origin:
    a, b = variant.spec.gemm
    reference: Reference = lambda changed: variant.reference({**changed})[o]
    return Origin(inputs, (a, b), reference, is_paired(variant.program))


def read_at(
    spec: Spec, program: Program, inputs: Inputs, out: torch.Tensor, place: tuple[int, ...]
) -> Iterable[tuple[str, float | list[float]]]:
    """Give what a program reads at an element, by name."""
    a, b = spec.gemm
    origin = Origin(inputs, (a, b), lambda _: out, is_paired(program))
    about = WrongOutput(out, out.double(), origin)
    return about.there(*place, *[0] * (2 - len(place))).items()


def _named(about: WrongOutput, found: Mistake) -> Diagnosis:
    lost = ~about.out.isfinite() & about.truth.isfinite()
    return _answer(about, found.fault, found.text, about.wrong | lost)


def diagnose(about: WrongOutput, again: torch.Tensor) -> Diagnosis:
    """Name the most likely fault, given what a second run gave."""
    out, truth, second = about.out, about.truth, again.double().reshape(about.out.shape)
    moved = (second != out) & ~(second.isnan() & out.isnan())
    if moved.any():
        text = f"{about.region(moved)} differs between two runs on the same inputs"
        return _answer(about, "race", text, moved)
    nan = out.isnan() & ~truth.isnan()
    if nan.any() and not about.exact:
        text = f"{about.region(nan)} is NaN or was never written"
        return _answer(about, "unwritten", text, nan)
    if bool((~out.isfinite() & truth.isfinite()).any()):
        return _answer(about, "not_finite", *about.beyond())
    lost = ~truth.isfinite() & ~((out == truth) | out.isnan())
    if lost.any():
        text = "NaN or an infinity of the inputs does not reach it"
        return _answer(about, "wrong_function", text, lost)
    empty = about.wrong & (out == 0)
    most = int(empty.sum()) > 0.95 * int(about.wrong.sum())
    if most and not about.subtle and not about.exact:
        text = f"{about.region(empty)} is zero: never written, or its partial was lost"
        return _answer(about, "unwritten", text, empty)
    best, share = None, 0.0
    suspects = itertools.chain(structural(about), counterfactual(about))
    for suspect in suspects if truth.numel() >= _FEW else ():
        explained = _explained(about, suspect)
        # Among equals the first wins: a later one must leave under a quarter of what is left.
        if 1 - explained < (1 - share) / 4 or (share < _CLAIM <= explained):
            best, share = suspect, explained
        if share > _CERTAIN:
            break
    # A factor must explain nearly all: any statistic is roughly another times something.
    claim = _CLAIM_FACTOR if best and best.fault == "constant_factor" else _CLAIM
    if best and share >= (_CLAIM_EXACT if about.exact else claim):
        return _answer(about, best.fault, best.text, about.wrong)
    return _answer(about, *_leftover(about), about.wrong)


def _explained(about: WrongOutput, suspect: Suspect) -> float:
    """Find the share of the squared difference that the suspect explains."""
    wrong, out, difference = (t[suspect.rows] for t in (about.wrong, about.out, about.difference))
    size = difference[wrong].abs()
    cap = 3 * size.median()  # so that no few elements decide
    # A program's mistake is one everywhere, so it predicts what is right; a kernel's has a place.
    told = wrong | (out.isfinite() & about.truth[suspect.rows].isfinite()) if about.exact else wrong
    off = (out - suspect.predicted).abs()
    # What is off by too little to be called wrong need not be predicted.
    off = torch.where(wrong, off, (off - difference.abs()).clamp_min(0.0))
    left = off[told].minimum(cap).square().sum()
    share = 1 - float(left / size.minimum(cap).square().sum().clamp_min(1e-300))
    return share if share == share else 0.0


def _leftover(about: WrongOutput) -> tuple[str, str]:
    """Say what it is when no suspect explains it."""
    small = about.single and is_small(about.difference, about.truth)
    if not about.exact and (about.subtle or small):
        truth, left = about.truth[about.wrong], about.difference[about.wrong]
        energy = truth.square().sum().clamp_min(1e-300)
        factor, noise = float((left * truth).sum() / energy), left.square().mean() / energy
        if abs(factor) > max(6 * float(noise.sqrt()), 2e-3):
            text = f"on average it is the expected value times {1 + factor:.3g}"
            return "constant_factor", text
        text = "it is off by roundings: something was rounded to 16 bits before its last use"
        return ("rounded_statistics" if about.flat else "early_rounding"), text
    counts, sizes = about.by_tile(about.wrong), about.by_tile(about.wrong | True)
    touched = counts > 0
    filled = float(counts.sum() / sizes[touched].sum().clamp_min(1))
    if not (about.flat or about.exact or bool(touched.all())) and filled > 0.9:
        return "unwritten", f"{about.region(about.wrong)} holds something else: stale, or lost"
    if about.flat and about.single:
        return "wrong_statistics", (
            "the statistic is another one: check what is reduced, the kind of reduction, its "
            "divisor, and that every block enters"
        )
    return "wrong_function", (
        "no simple fault explains it: check the activation, each term and the order of "
        "operations against the spec's mathematics"
    )


def _answer(about: WrongOutput, fault: str, text: str, mask: torch.Tensor) -> Diagnosis:
    return Diagnosis(fault, text, about.where(fault, mask))
