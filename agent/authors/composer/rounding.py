"""Casts of a reference that mean rounding, as the operations that round."""

from __future__ import annotations

from collections.abc import Mapping
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
    rewritten: Rewritten, types: Mapping[str, torch.dtype], reduced: Mapping[str, torch.dtype]
) -> Rewritten:
    """Take what is reduced of each row, and gathered, of values as stored.

    Probabilities that are computed from stored logits of 16 bits and an unrounded sum do not add up
    to 1: at a logit of 16 they are off by up to 6 %, and the loss's gradient with them. Beside an
    unrounded largest, logits of 2e4 gave a softmax of NaN. A length, a sum of squares, is as near
    either way, and so is what is stored in 16 bits itself. What is float32 shows the rounding.

    Of each output `types` has the element type, and `reduced` that of what it is a reduction of.
    """
    stored: dict[Expr, str] = {}
    for name, kind in rewritten.outputs.items():
        element = str(types[name]).removeprefix("torch.")
        if kind == "Tile" and types[name].itemsize == 2 and element in ROUNDINGS:
            stored[rewritten.values[name]] = ROUNDINGS[element]
    values: dict[Expr, Expr] = {}
    for expr in walk([*rewritten.values.values()]):
        args = tuple(values[a] for a in expr.args)
        values[expr] = expr if args == expr.args else replace(expr, args=args)
        if expr in stored:
            values[expr] = Expr(stored[expr], (values[expr],), expr.dims, key=expr.key)
    taken: dict[str, Expr] = {}
    summed = "RowLogSumExp" in rewritten.outputs.values()
    for name, expr in rewritten.values.items():
        kind = rewritten.outputs[name]
        if values[expr] == expr or expr in stored:
            continue
        if not expr.reduction and kind != "RowGather":
            if types[name] == torch.float32:
                taken[name] = values[expr]
            continue
        if not kind.startswith("Row"):
            continue
        of, *others = values[expr].args
        if of.op == "mul" and of.args[0] == of.args[1]:
            continue
        taken[name] = values[expr]
        element = str(reduced[name]).removeprefix("torch.")
        if summed and kind in _SUMS and element in ROUNDINGS and expr.args[0] not in stored:
            of = Expr(ROUNDINGS[element], (of,), of.dims, key=of.key)
            taken[name] = replace(values[expr], args=(of, *others))
    return replace(rewritten, values={**rewritten.values, **taken})


_SUMS = ("RowLogSumExp", "RowGather")


def before_store(value: Expr, dtype: str) -> Expr:
    """Leave out the rounding that an output's store does anyway."""
    return value.args[0] if value.op == ROUNDINGS.get(dtype) else value
