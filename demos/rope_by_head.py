"""Rotary position embedding by one table for every head and sequence; values stay as they are.

O[m, 2j]     = X[m, 2j] cos θ + X[m, 2j + 1] sin θ
O[m, 2j + 1] = X[m, 2j + 1] cos θ - X[m, 2j] sin θ,   X = A Bᵀ,   θ = q[2j] · θ[m mod S, 2j mod W]

A (M, K) and B (N, K) bfloat16: the rows of B are those of queries, keys and values, heads of W = 32
columns each. cs (S, W) bfloat16 with cos θ in the even and sin θ in the odd columns; q (N,)
float32, 1 in the columns of queries and keys, 0 in those of values. O (M, N) bfloat16. Rows are
sequences of S = 128 tokens, or one shorter sequence.
"""

from coda_agent.primitives import (
    HeadTable,
    RowVector,
    Tile,
    epilogue,
    interleave,
    pairs,
    rotate,
)


@epilogue(O=Tile)
def rope_by_head(acc, cs: HeadTable, q: RowVector):
    """O = queries and keys rotated, values as they are."""
    x, y = pairs(acc)
    cosine, sine = pairs(cs)
    rotated, _ = pairs(q)
    u, v = rotate(x, y, rotated * (cosine - 1.0) + 1.0, rotated * sine)
    return {"O": interleave(u, v)}


# --- end of program ---

N_MULTIPLE = 32

WHY = """
- A `HeadTable` repeats by itself: S·W numbers in memory, where a `Tile` of angles has M·N.
- One product takes queries, keys and values. A program cannot branch on a column; q blends the
  rotation out: where it is 0 the angle's cosine counts as 1 and its sine as 0, so X passes exactly.
- With zeros at the end of each head, the same q rotates a part of it only.
- `rotary` needs no table and any order of positions; a table serves any angles, such as scaled or
  learned ones, and costs no sines.
- Worse: blending afterwards, `acc + q * (turned - acc)`: it rounds what is rotated once more.
"""


def reference(A, B, cs, q):
    import torch

    X = A @ B.T
    (m, n), (s, w) = X.shape, cs.shape
    table = cs.repeat(-(-m // s), n // w)[:m]
    x, y, cos, sin = X[:, 0::2], X[:, 1::2], table[:, 0::2], table[:, 1::2]
    turned = torch.stack([x * cos + y * sin, y * cos - x * sin], dim=-1).flatten(1)
    return {"O": torch.where(q > 0, turned, X)}


def inputs(generator, m, n):
    import torch

    f = 10000.0 ** (-torch.arange(0, 32, 2, device=generator.device) / 32)
    angle = torch.arange(min(m, 128), device=generator.device)[:, None] * f
    cs = torch.stack([angle.cos(), angle.sin()], dim=-1).flatten(1).to(torch.bfloat16)
    q = (torch.arange(n, device=generator.device) < n * 2 // 3 // 32 * 32).float()
    return {"cs": cs, "q": q}
