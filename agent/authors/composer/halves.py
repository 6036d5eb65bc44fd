"""Halves of groups of adjacent columns, as rotary embedding exchanges them in each head.

What a reference computes of halves is computed here of whole tiles: where a first half meets a
second one, of the tile with its halves exchanged ("exchanged", whose value is the width). Joined
again, the two are one expression, in which only `rotate_half` exchanges.
"""

from __future__ import annotations

from collections.abc import Callable

from coda_agent.agent.authors.composer.expression import Expr, make, walk

_ELEMENTWISE = ("add", "mul", "neg", "div")


def exchanged(x: Expr, width: int, alike: Callable[[Expr], bool]) -> Expr:
    """x with the halves of its groups exchanged; `alike` are leaves and statistics that are the
    same in both."""
    if x.op == "exchanged":
        return x.args[0]
    if _invariant(x, alike):
        return x
    if x.op == "neg" or (x.args and any(_invariant(a, alike) or _exchanges(a) for a in x.args)):
        args = (exchanged(a, width, alike) for a in x.args)
        return make(x.op, *args, dims=x.dims, value=x.value)
    return make("exchanged", x, dims=x.dims, value=width)


def joined(first: Expr, second: Expr) -> Expr | None:
    """What is `first` in the first halves of groups and `second` in the others; None where no
    program has that."""
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
        found = [joined(x, y) for x, y in zip(first.args, args, strict=True)]
        whole = [x for x in found if x is not None]
        if len(whole) == len(found):
            return make(first.op, *whole, dims=first.dims, value=first.value)
    return None


def _signed(x: Expr) -> Expr | None:
    """x in second halves and -x in first ones, where that is `rotate_half` of something."""
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


def _invariant(x: Expr, alike: Callable[[Expr], bool]) -> bool:
    if "N" not in x.dims or alike(x):
        return True
    return bool(x.args) and x.op != "exchanged" and all(_invariant(a, alike) for a in x.args)
