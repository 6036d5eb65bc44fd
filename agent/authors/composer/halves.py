"""Halves of groups of adjacent columns, as rotary embedding exchanges them.

What a reference computes of halves is computed here of whole tiles: where a first half meets a
second one, of the tile with its halves exchanged ("exchanged", whose value is the width). Joined
again, the two are one expression, in which only `rotate_half` exchanges.
"""

from __future__ import annotations

import torch

from coda_agent.agent.authors.composer.codes import Codes
from coda_agent.agent.authors.composer.expression import Expr, make, walk
from coda_agent.agent.authors.composer.parts import Parts
from coda_agent.primitives.groups import WIDTHS

_ELEMENTWISE = ("add", "mul", "neg", "div")


class Halves:
    """What stands in halves of groups of columns in one trace."""

    def __init__(self, codes: Codes, parts: Parts) -> None:
        self.codes, self.parts = codes, parts

    def half(self, codes: torch.Tensor, width: int) -> Expr | None:
        """Of which tile these (M, N/2) are first halves, or exchanged ones."""
        if (expr := self.codes.only(codes)) is None:
            return None
        if expr.dims <= {"M"}:
            return expr if torch.equal(codes, self.codes.grid(expr, ("M", "N/2"))) else None
        known = self.parts.whole(expr)
        if expr.op != "table" and expr.dims <= {"M", "N"}:
            known.append((expr, self.codes.grid(expr, ("M", "N"))))
        for whole, full in known:
            for side, part in enumerate(apart(full, width)):
                if torch.equal(codes, part):
                    return self._exchanged(whole, width) if side else whole
        return None

    def joined(self, codes: torch.Tensor) -> Expr | None:
        """What two halves of groups, computed apart, are together."""
        for width in WIDTHS:
            if self.codes.extents["N"] % width == 0:
                first, second = (self.half(part, width) for part in apart(codes, width))
                if first is not None and second is not None:
                    second = self._exchanged(second, width)
                    if (found := _joined(first, second)) is not None:
                        return found
        return None

    def _exchanged(self, x: Expr, width: int) -> Expr:
        """x with the halves of its groups exchanged."""
        if x.op == "exchanged":
            return x.args[0]
        if self._alike(x, width):
            return x
        if x.op == "neg" or any(self._alike(a, width) or _exchanges(a) for a in x.args):
            args = (self._exchanged(a, width) for a in x.args)
            return make(x.op, *args, dims=x.dims, value=x.value)
        return make("exchanged", x, dims=x.dims, value=width)

    def _alike(self, x: Expr, width: int) -> bool:
        """Whether it is the same in both halves of a group."""
        if "N" not in x.dims:
            return True
        if x.op.startswith("group_"):
            if int(x.value) % width == 0:
                return True
        elif any(torch.equal(*apart(at, width)) for at in self.parts.places_of(x)):
            return True
        args = x.args if x.op != "exchanged" else ()
        return bool(args) and all(self._alike(a, width) for a in args)


def apart(full: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Split groups of columns of (M, N) into two (M, N/2)."""
    halves = full.unflatten(-1, (-1, 2, width // 2))
    return halves[..., 0, :].flatten(-2), halves[..., 1, :].flatten(-2)


def _joined(first: Expr, second: Expr) -> Expr | None:
    """`first` in first halves and `second` in others; None of no program."""
    if first == second:
        return None if _exchanges(first) else first
    if first == -second:
        return _signed(second)
    if second == -first:
        return None if (found := _signed(first)) is None else -found
    if first.op != second.op or first.op not in _ELEMENTWISE or len(first.args) != len(second.args):
        return None
    orders = [second.args, second.args[::-1]] if first.op in ("add", "mul") else [second.args]
    for args in orders:
        found = [_joined(x, y) for x, y in zip(first.args, args, strict=True)]
        whole = [x for x in found if x is not None]
        if len(whole) == len(found):
            return make(first.op, *whole, dims=first.dims, value=first.value)
    return None


def _signed(x: Expr) -> Expr | None:
    """x in second halves and -x in first ones, by `rotate_half`."""
    if x.op == "exchanged":
        return make("rotate_half", x.args[0], dims=x.dims, value=x.value)
    if x.op in ("mul", "div", "neg"):
        found = [_signed(a) if _exchanges(a) else a for a in x.args]
        whole = [a for a in found if a is not None]
        if sum(map(_exchanges, x.args)) == 1 and len(whole) == len(found):
            return make(x.op, *whole, dims=x.dims, value=x.value)
    return None


def _exchanges(x: Expr) -> bool:
    return any(e.op == "exchanged" for e in walk([x]))
