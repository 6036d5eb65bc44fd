"""Faults, and the wrong output that each predicts."""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.wrong_output import WrongOutput
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    Rows = torch.Tensor | slice

_WIDEST = 2**14
_ROWS = 128  # rows the reference is run on: the worst ones
_PARTS = (16, 32, 64, 128)  # K extents of one mainloop step
_ALL = slice(None)


class Suspect(NamedTuple):
    """A fault and the output that it predicts, of some rows."""

    fault: str
    text: str
    predicted: torch.Tensor
    rows: Rows = _ALL


def structural(about: WrongOutput) -> Iterator[Suspect]:
    """Suspect what shows in the output and the truth alone."""
    out, truth, wrong = about.out, about.truth, about.wrong
    factor = float((out * truth)[wrong].sum() / truth[wrong].square().sum().clamp_min(1e-300))
    if abs(factor - 1) > 2e-3:
        which = "it" if bool(wrong.all()) else about.region(wrong)
        fault, text = "constant_factor", f"{which} is the expected value times {factor:.4g}"
        if about.flat and about.single and not 0.1 < abs(factor) < 10:
            fault, text = "wrong_statistics", f"{text}: check the divisor of the reduction"
        yield Suspect(fault, text, torch.where(wrong, factor * truth, truth))
    if truth.shape[1] % 2 == 0:
        yield Suspect("swapped_pair", "even and odd columns are swapped", _swapped(truth))
    what, axis = ("elements", 0) if about.flat else ("columns", 1)
    for by in (1, -1, 2, -2):
        if truth.shape[axis] > 4:
            text = f"{what} are shifted by {by}" + " (one pair)" * (abs(by) == 2)
            yield Suspect("shifted_pair", text, truth.roll(by, axis))
    yield _neighbours(about)


def _neighbours(about: WrongOutput) -> Suspect:
    """Suspect that each tile holds a neighbour's content, or its own."""
    (rows, columns), (height, width) = about.truth.shape, about.tile
    best, least = about.truth, None
    steps = ((0, 0), (1, 0), (-1, 0), (0, 1), (0, -1), (1, 1), (-1, -1), (1, -1), (-1, 1))
    for i, j in steps:
        moved = about.truth.roll((i * height, j * width), (0, 1))
        left = about.by_tile(torch.where(about.wrong, about.out - moved, 0.0).square())
        spread = left.repeat_interleave(height, 0).repeat_interleave(width, 1)[:rows, :columns]
        best = best if least is None else torch.where(spread < least, moved, best)
        least = spread if least is None else torch.minimum(spread, least)
    text = "tiles hold what belongs into a tile beside them: check the tile's coordinates"
    return Suspect("shifted_tile", text, best)


def counterfactual(about: WrongOutput) -> Iterator[Suspect]:
    """Suspect what the reference gives on changed inputs."""
    rows = _worst_rows(about)
    for fault, text, changed in _changes(about, rows):
        predicted = _predict(about, changed, rows)
        if predicted is not None:
            yield Suspect(fault, text, predicted, rows)


def _worst_rows(about: WrongOutput) -> Rows:
    """Choose the rows to run the reference on, or all."""
    m, n = (about.inputs[x].shape[0] for x in about.gemm)
    sizes = {v.shape[0] for x, v in about.inputs.items() if x not in about.gemm and _is_array(v)}
    if m == n or not sizes <= {m, n} or len(about.truth) != m or m <= _ROWS:
        return _ALL
    return (about.difference * about.wrong).square().sum(1).topk(_ROWS).indices.sort().values


def _predict(about: WrongOutput, changed: Inputs, rows: Rows) -> torch.Tensor | None:
    m = about.inputs[about.gemm[0]].shape[0]
    values = {
        x: v[rows] if x != about.gemm[1] and _is_array(v) and len(v) == m else v
        for x, v in {**about.inputs, **changed}.items()
    }
    try:
        found = about.reference(values)
    except CodaError:  # the reference takes no such shape: not this fault
        return None
    shape = about.truth[rows].shape
    return found.reshape(shape) if found.numel() == shape.numel() else None


def _changes(about: WrongOutput, rows: Rows) -> Iterator[tuple[str, str, Inputs]]:
    """List faults, in words, and the inputs that they come to."""
    a_name, b_name = about.gemm
    a, b = about.inputs[a_name].double(), about.inputs[b_name].double()
    (m, k), n = a.shape, b.shape[0]
    others = {
        x: v.double() if isinstance(v, torch.Tensor) else v
        for x, v in about.inputs.items()
        if x not in about.gemm and (not isinstance(v, torch.Tensor) or v.is_floating_point())
    }
    for x, v in others.items():
        yield "missing_operand", f"{x} is left out", {x: v * 0}
        yield "missing_operand", f"{x} is left out", {x: v * 0 + 1}
        yield "doubled_operand", f"{x} enters twice", {x: v * 2}
        yield "doubled_operand", f"{x} is multiplied in twice", {x: v * v}
        yield from _factor_changes(about, x, v, rows)
    yield from _factor_changes(about, a_name, a, rows)
    tails = [(first, k) for u in _PARTS if (first := (k - 1) // u * u)]
    for first, last in dict.fromkeys([*tails, (k // 2, k), (0, k // 2), (0, min(k, 64))]):
        cut = a.clone()
        cut[:, first:last] = 0
        text = f"columns {first} to {last - 1} of {a_name} and {b_name} are skipped"
        yield "k_tail", text, {a_name: cut}
    for (x, v), (y, w) in itertools.combinations(others.items(), 2):
        if getattr(v, "shape", None) == getattr(w, "shape", None):
            yield "swapped_operands", f"{x} and {y} change places", {x: w, y: v}
    if n > _WIDEST:  # what follows multiplies by a matrix of N x N: 20 GB of 50,000 columns
        return
    acc, eye = a.new_zeros(m, n), torch.eye(n, dtype=a.dtype, device=a.device)
    acc[rows] = a[rows] @ b.mT
    for x, v in others.items():
        if _is_array(v) and v.ndim == 1 and len(v) in (m, n):
            by_row = len(v) == m
            own = v[:, None] if by_row else v[None]
            read = v[torch.arange(n if by_row else m, device=v.device) % len(v)]
            other = read[None] if by_row else read[:, None]
            text = f"{x} is read along the {('rows', 'columns')[by_row]}"
            yield "wrong_broadcast", text, {x: other}
            yield "wrong_broadcast", text, {a_name: acc / own * other, b_name: eye}
            for by in (1, -1):
                yield "shifted_pair", f"elements of {x} are shifted by {by}", {x: v.roll(by, 0)}
    wide = {x: v for x, v in others.items() if getattr(v, "ndim", 0) == 2 and v.shape[1] % 2 == 0}
    for x, v in {a_name: acc, **wide}.items():
        what, product = (x, {}) if x in wide else ("the product", {b_name: eye})
        text = f"even and odd columns of {what} are swapped"
        yield "swapped_pair", text, {x: _swapped(v), **product}
        for by in (1, -1, 2, -2):
            text = f"columns of {what} are shifted by {by}"
            yield "shifted_pair", text, {x: v.roll(by, 1), **product}
    swapped = {x: _swapped(v) for x, v in others.items() if _is_array(v) and v.shape[-1] == n}
    text = "the even and odd columns enter in each other's place, such as gate and up"
    yield "swapped_pair", text, {a_name: _swapped(acc), b_name: eye, **swapped}
    text = "the product was rounded to 16 bits before the epilogue"
    fault = "rounded_statistics" if about.flat else "early_rounding"
    for dtype in () if about.exact else (torch.bfloat16, torch.float16):
        yield fault, text, {a_name: acc.to(dtype).double(), b_name: eye}


def _factor_changes(
    about: WrongOutput, x: str, value: Any, rows: Rows
) -> Iterator[tuple[str, str, Inputs]]:
    """Fit a factor on an input, by least squares."""
    doubled = _predict(about, {x: value * 2}, rows)
    if doubled is None:
        return
    wrong, difference, truth = (t[rows] for t in (about.wrong, about.difference, about.truth))
    step = (doubled - truth)[wrong]
    factor = 1 + float((difference[wrong] * step).sum() / step.square().sum().clamp_min(1e-300))
    for c in sorted({-1.0, round(factor, 3)} - {1.0}) if abs(factor) < 1e3 else ():
        fault = "constant_factor" if c else "missing_operand"
        yield fault, f"{x} enters times {c:g}", {x: value * c}


def _swapped(x: torch.Tensor) -> torch.Tensor:
    return x.unflatten(-1, (-1, 2)).flip(-1).flatten(-2)


def _is_array(x: object) -> bool:
    return getattr(x, "ndim", 0) > 0
