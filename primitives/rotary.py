"""Rotary position embedding (RoPE): rotations of adjacent column pairs."""

from __future__ import annotations

import math

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.graph import Value
from coda_agent.primitives.operation import Argument
from coda_agent.primitives.ops import cos, fma, rint, sin
from coda_agent.primitives.pairwise import interleave, pairs


def rotate(x: Argument, y: Argument, cosine: Argument, sine: Argument) -> tuple[Argument, Argument]:
    """The pair (x, y) turned back by an angle: (x·cos + y·sin, y·cos - x·sin) (paper, kernel 1).

    Takes the two half-width values `pairs` gives, of the result and of a table. Costs four
    multiply-adds a pair. The other direction is that of the negated sine.

        @epilogue(O=Tile)
        def rope(acc, cs: Tile):
            x, y = pairs(acc)
            cosine, sine = pairs(cs)
            u, v = rotate(x, y, cosine, sine)
            return {"O": interleave(u, v)}
    """
    return x * cosine + y * sine, y * cosine - x * sine


def rotary(x: Value, position: Value, turns: Value) -> Value:
    """`rotate` each column pair of `x` by position · frequency: RoPE without a table.

    `x` is (M, N), `position` a float32 `ColVector`, exact up to 2²⁴, and `turns` a float32
    `RowVector` made by `rotary_turns` of `coda_agent.primitives.rotary`: frequencies in turns, each
    as the sum of two floats. A pair of frequency 0 (values, the tail of a partly rotated head)
    stays as it is. Negate the positions for the other direction: that of the gradient, and of
    models that rotate to (x·cos - y·sin, y·cos + x·sin).

    Costs two MUFU and ten multiply-adds a pair, and 4·(M + N) bytes where a table as a
    `Tile` has M·N elements. Use it for queries and keys.

        @epilogue(O=Tile)
        def projection(acc, position: ColVector, turns: RowVector):
            return {"O": rotary(acc, position, turns)}
    """
    high, low = pairs(turns)
    # Whole turns come off inside the fma, whose product is exact: a rounded product of 10⁵ turns
    # would be off by 2⁻⁸ of a turn.
    whole = rint(position * high)
    radians = fma(position, low, fma(position, high, -whole)) * (2.0 * math.pi)
    return interleave(*rotate(*pairs(x), cos(radians), sin(radians)))


def rotary_turns(
    inverse_frequencies: torch.Tensor, n: int, *, head_dim: int, heads: int
) -> torch.Tensor:
    """Make the `turns` of `rotary`: frequencies over 2π, in two floats.

    Args:
        inverse_frequencies: (rotated / 2,) radians a position, e.g. 10000^(-2j / head_dim); float64
            keeps what float32 would round away.
        n: Columns of the projection; those past heads · head_dim are not rotated.
        head_dim: Columns a head; those past `rotated` are not rotated.
        heads: How many heads are rotated, of queries and keys together; they come first.

    Returns:
        (n,) float32: the high part in the even and the low part in the odd column of each pair.

    Raises:
        LaunchError: the heads do not fit.
    """
    rotated = 2 * inverse_frequencies.numel()
    if inverse_frequencies.ndim != 1 or rotated > head_dim or head_dim % 2:
        raise LaunchError(
            f"rotary_turns: head_dim = {head_dim} and {tuple(inverse_frequencies.shape)} "
            "frequencies, expected head_dim even and a vector of at most half its length"
        )
    if heads * head_dim > n or n % 2:
        raise LaunchError(
            f"rotary_turns: n = {n} for {heads} heads of {head_dim} columns, "
            "expected n even and at least their product"
        )
    exact = inverse_frequencies.double() / (2.0 * math.pi)
    high = exact.float()
    head = torch.stack([high, (exact - high.double()).float()], dim=-1).flatten()
    turns = head.new_zeros(n)
    turns[: heads * head_dim].view(heads, head_dim)[:, :rotated] = head
    return turns
