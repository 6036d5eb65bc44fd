"""Casts of a reference that mean rounding, as the operations that round."""

from __future__ import annotations

import torch

from coda_agent.agent.authors.composer.expression import Expr
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.rounding import ROUNDINGS


def rounding(dtype: torch.dtype) -> str:
    """The operation that a cast to `dtype` is, where it is meant to round.

    Raises:
        ProgramError: no operation rounds to that type.
    """
    name = str(dtype).removeprefix("torch.")
    if name not in ROUNDINGS:
        hint = f"a program rounds to {', '.join(ROUNDINGS)}"
        raise ProgramError(f"rounds to {name}", hint=hint)
    return ROUNDINGS[name]


def before_store(value: Expr, dtype: str) -> Expr:
    """An output of type `dtype` without the rounding that its store does anyway."""
    return value.args[0] if value.op == ROUNDINGS.get(dtype) else value
