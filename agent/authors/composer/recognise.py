"""Activations and derivatives that a reference spelled out, recognised by value."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import torch

from coda_agent.agent.authors.composer.expression import Expr
from coda_agent.primitives import activations
from coda_agent.primitives.operation import OPS

_FUNCTIONS = ("mish", "silu", "gelu_tanh", "gelu_erf", "hard_swish", "sigmoid", "tanh")
# Points an unnamed function of one value is compared at, and how far it may be off.
_POINTS = (-9.0, -3.3, -1.7, -0.6, -0.2, 0.3, 0.9, 2.1, 5.2)
_CLOSE = 1e-10
# The longest form met, a GELU's derivative spelled out, has nine operations in a row.
_DEPTH = 12


def known_product(*factors: tuple[Expr, bool]) -> tuple[str, Expr, float] | None:
    """Find g, x and c: the product is c · g(x).

    A factor is an expression and whether it divides. A derivative's name begins with "d_".
    """
    below = _near([f for f, _ in factors])
    if not any(_curved(e.op) for e in below):
        return None
    points = torch.tensor(_POINTS, dtype=torch.float64)
    for x in below:
        product = torch.ones_like(points)
        for f, inverse in factors:
            value = _at(f, x, points)
            if value is None:
                break
            product = product / value if inverse else product * value
        else:
            for name, g in _known().items() if product.isfinite().all() else ():
                c = float(product[-1] / g[-1])
                c = float(round(c)) if abs(c - round(c)) < _CLOSE else c
                if c and (product - c * g).abs().max() < _CLOSE * abs(c):
                    return name, x, c
    return None


@functools.lru_cache(maxsize=1)
def _known() -> dict[str, torch.Tensor]:
    """Each known function and derivative at the points."""
    points = torch.tensor(_POINTS, dtype=torch.float64)
    names = [name for f in _FUNCTIONS for name in (f, f"d_{f}")]
    return {name: _meaning(name)(points) for name in names}


def _meaning(op: str) -> Any:
    """An elementwise operation on tensors, by name; None for others."""
    if not op.startswith("d_"):
        return OPS[op].torch if op in OPS else getattr(activations, op, None)
    function: Callable[..., Any] = _meaning(op[2:])
    return lambda x: torch.func.jvp(function, (x,), (torch.ones_like(x),))[1]


def _curved(op: str) -> bool:
    """Whether known functions are made with it."""
    return op == "clamp" or (op in OPS and OPS[op].arity == 1 and OPS[op].error != "")


def _near(roots: list[Expr]) -> list[Expr]:
    """What lies within a few operations below `roots`, themselves included."""
    found = level = dict.fromkeys(roots)
    for _ in range(_DEPTH):
        level = dict.fromkeys(a for e in level for a in e.args if a not in found)
        found |= level
    return list(found)


def _at(f: Expr, x: Expr, points: torch.Tensor) -> torch.Tensor | None:
    """f at `points`; None where it is none of x alone."""
    values: dict[Expr, torch.Tensor | None] = {x: points}

    def value(e: Expr, depth: int) -> torch.Tensor | None:
        if e not in values:
            values[e] = None
            if e.op == "const":
                values[e] = torch.tensor(e.value, dtype=torch.float64)
            elif e.args and depth and (function := _meaning(e.op)):
                args = [value(a, depth - 1) for a in e.args]
                if not any(a is None for a in args):
                    many = e.op in ("add", "mul")
                    values[e] = functools.reduce(function, args) if many else function(*args)
        return values[e]

    found = value(f, _DEPTH)
    return found if found is not None and found.ndim else None
