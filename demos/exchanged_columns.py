"""Columns that read one another: a Hadamard transform, the two largest of four, scales of four.

H = X S / 4,   S the Sylvester matrix of 16 in each 16 columns of X = A Bᵀ;
P = X where |X| is at least the second largest of its 4 columns, else 0;
s[m, g] = max of |X| over 4 columns,   e[m, n] = √(X² + Y²), Y the other column of the pair,
v[m, g] = Σ X² over 8 columns

A (M, K), B (N, K) bfloat16, N a multiple of 16; H, P, e (M, N) bfloat16, s (M, N/4) and v (M, N/8)
float32.
"""

from coda_agent.primitives import (
    GroupTile4,
    GroupTile8,
    Tile,
    absolute,
    epilogue,
    equal,
    exchange,
    greater_equal,
    group_max,
    group_sum,
    maximum,
    minimum,
    rotate_half,
    sqrt,
    where,
)


@epilogue(H=Tile)
def hadamard(acc):
    """H = A Bᵀ in a Hadamard basis of 16 columns, as before a quantisation."""
    x = exchange(acc + rotate_half(acc, 2), 1)
    x = exchange(x + rotate_half(x, 4), 2)
    x = exchange(x + rotate_half(x, 8), 4)
    x = exchange(x + rotate_half(x, 16), 8)
    return {"H": 0.25 * x}


@epilogue(P=Tile, s=GroupTile4)
def two_of_four(acc):
    """P = what 2:4 sparsity keeps of A Bᵀ, and what ties with it; s = the largest of four."""
    x = absolute(acc)
    size = where(equal(x, x), x, 3.4028234663852886e38)
    y = exchange(size, 1)
    high = maximum(size, y)
    low = minimum(size, y)
    others = exchange(high, 2)
    second = maximum(minimum(high, others), maximum(low, exchange(low, 2)))
    return {"P": where(greater_equal(x, second), acc, 0.0), "s": group_max(x, 4)}


@epilogue(e=Tile, v=GroupTile8)
def lengths(acc):
    """e = the length of each pair of columns, in both; v = the square of that of eight."""
    square = acc * acc
    return {"e": sqrt(square + exchange(square, 1)), "v": group_sum(square, 8)}


# --- end of program ---

N_MULTIPLE = 16

WHY = """
- `exchange(x + rotate_half(x, 2 * d), d)` is one level of a Hadamard transform: the sum of two
  columns stands where their first was, the difference where the second was.
- One thread holds columns that are 1, or 8 and more, apart: only distances 2 and 4 ask another one.
- Which two of four columns stay is told by the second largest, so no order is needed. NaN counts as
  the largest there, as `sort` has it: else one column would take the others of its four along.
"""


def reference(A, B):
    import torch

    X = A @ B.T
    by = lambda x, width: x.unflatten(-1, (-1, width))
    S = torch.ones(1, 1, dtype=X.dtype, device=X.device)
    for _ in range(4):
        S = torch.cat([torch.cat([S, S], 1), torch.cat([S, -S], 1)])
    size = by(X.abs(), 4)
    second = size.sort(-1).values[..., 2:3]
    return {
        "H": (by(X, 16) @ S / 4).flatten(-2),
        "P": torch.where(size >= second, by(X, 4), 0).flatten(-2),
        "s": size.amax(-1),
        "e": by(X, 2).square().sum(-1).sqrt().repeat_interleave(2, -1),
        "v": by(X, 8).square().sum(-1),
    }
