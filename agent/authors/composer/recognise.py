"""Activations that a reference spelled out, recognised by value, not by form."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from coda_agent.agent.authors.composer.expression import Expr
from coda_agent.primitives.graph import OPS

if TYPE_CHECKING:
    import torch

# Points an unnamed function of one value is compared at, and how far it may be off.
_POINTS = (-9.0, -3.3, -1.7, -0.6, -0.2, 0.3, 0.9, 2.1, 5.2)
_CLOSE = 1e-10


def known_product(x: Expr, f: Expr, *, inverse: bool) -> tuple[str, float] | None:
    """The activation g and factor c with x · f(x) = c · g(x), or None."""
    import torch
    import torch.nn.functional as F

    points = torch.tensor(_POINTS, dtype=torch.float64)
    values = _at(f, x, points)
    if values is None:
        return None
    product = points / values if inverse else points * values
    for name, g in (
        ("silu", F.silu(points)),
        ("gelu_tanh", F.gelu(points, approximate="tanh")),
        ("gelu_erf", F.gelu(points)),
        ("hard_swish", F.hardswish(points)),
    ):
        c = float(product[-1] / g[-1])
        c = round(c) if abs(c - round(c)) < _CLOSE else c
        if torch.isfinite(product).all() and c and (product - c * g).abs().max() < _CLOSE * abs(c):
            return name, c
    return None


def _at(f: Expr, x: Expr, points: torch.Tensor) -> torch.Tensor | None:
    """f at `points`, or None where it depends on more than x or not on it."""
    import torch

    values: dict[Expr, Any] = {x: points}
    inner: dict[Expr, bool] = {x: True}

    def visit(e: Expr) -> bool:
        if e not in inner:
            inner[e] = e.op == "const" or (bool(e.args) and all([visit(a) for a in e.args]))
        return inner[e]

    if not visit(f):
        return None

    def value(e: Expr) -> Any:
        if e in values:
            return values[e]
        args = [value(a) for a in e.args]
        match e.op:
            case "const":
                out = torch.tensor(e.value, dtype=torch.float64)
            case "mul" | "add":
                out = args[0]
                for a in args[1:]:
                    out = OPS[e.op].torch(out, a)
            case "relu":
                out = torch.relu(args[0])
            case "clamp":
                out = torch.clamp(*args)
            case op if op in OPS:
                out = OPS[op].torch(*args)
            case _:
                raise KeyError(e.op)
        values[e] = out
        return out

    try:
        out = value(f)
    except KeyError:
        return None
    return out if isinstance(out, torch.Tensor) and out.ndim else None
