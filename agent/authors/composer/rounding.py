"""Casts of a reference that mean rounding, as the operations that round."""

from __future__ import annotations

from collections.abc import Mapping, Set
from dataclasses import replace

import torch

from coda_agent.agent.authors.composer.expression import Expr, walk
from coda_agent.agent.authors.composer.problem import Rewritten
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.rounding import ROUNDINGS


def rounding(dtype: torch.dtype) -> str:
    """Name the operation that rounds as a cast to `dtype`.

    Raises:
        ProgramError: no operation rounds to that type.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ROUNDINGS:
        hint = f"a program rounds to {', '.join(ROUNDINGS)}"
        raise ProgramError(f"rounds to {name}", hint=hint)
    return ROUNDINGS[name]


def of_stored(
    rewritten: Rewritten,
    types: Mapping[str, torch.dtype],
    reduced: Mapping[str, torch.dtype],
    copies: Set[str],
) -> Rewritten:
    """Take what is reduced, and gathered, of values as stored.

    Probabilities that are computed from stored logits of 16 bits and an unrounded sum do not add up
    to 1: at a logit of 16 they are off by up to 6 %, and the loss's gradient with them. Beside an
    unrounded largest, logits of 2e4 gave a softmax of NaN. What is float32 shows the rounding, too;
    lengths alone, sums of squares, are as near either way.

    Args:
        types: The element type of each output.
        reduced: Of each output, the type of what it is a reduction of.
        copies: Outputs that are rounded copies of what the others are computed of.
    """
    stored: dict[Expr, str] = {}
    for name, kind in rewritten.outputs.items():
        element, value = str(types[name]).removeprefix("torch."), rewritten.values[name]
        if kind in _PICKED:  # such a one shows how its row was rounded
            value = value.args[0]
        elif kind not in ("Tile", "HalfTile") or name in copies:
            continue
        if types[name].itemsize == 2 and element in ROUNDINGS:
            stored[value] = ROUNDINGS[element]
    values: dict[Expr, Expr] = {}
    for expr in walk([*rewritten.values.values()]):
        args = tuple(values[a] for a in expr.args)
        values[expr] = expr if args == expr.args else replace(expr, args=args)
        if expr in stored:
            values[expr] = Expr(stored[expr], (values[expr],), expr.dims, key=expr.key)
    changed = {x: e for x, e in rewritten.values.items() if values[e] != e and e not in stored}
    rows = [e for x, e in changed.items() if rewritten.outputs[x] in _ROWS]
    lengths = all(map(_is_length, rows))
    summed = "RowLogSumExp" in rewritten.outputs.values()
    taken: dict[str, Expr] = {}
    for name, expr in changed.items():
        kind = rewritten.outputs[name]
        if kind in _ROWS:
            if lengths:
                continue
        elif expr.reduction:
            if not _is_multiple(expr.args[0], stored):
                continue
        elif types[name] != torch.float32:
            continue
        taken[name] = values[expr]
        of, *others = values[expr].args
        element = str(reduced[name]).removeprefix("torch.")
        if summed and kind in _SUMS and element in ROUNDINGS and expr.args[0] not in stored:
            of = Expr(ROUNDINGS[element], (of,), of.dims, key=of.key)
            taken[name] = replace(values[expr], args=(of, *others))
    return replace(rewritten, values={**rewritten.values, **taken})


_SUMS, _PICKED = ("RowLogSumExp", "RowGather"), ("RowMax", "RowMin", "RowGather")
_ROWS = (*_SUMS, "RowMax", "RowMin", "RowSum", "RowMean")


def _is_multiple(of: Expr, stored: Mapping[Expr, str]) -> bool:
    """Whether a stored value, or a number times it, is summed."""
    factors = [x for x in of.args if x.op != "const"] if of.op == "mul" else [of]
    return len(factors) == 1 and factors[0] in stored


def _is_length(reduction: Expr) -> bool:
    """Whether squares are summed."""
    of = reduction.args[0]
    return of.op == "mul" and of.args[0] == of.args[1]


def before_store(value: Expr, dtype: str) -> Expr:
    """Leave out the rounding that an output's store does anyway."""
    return value.args[0] if value.op == ROUNDINGS.get(dtype) else value
