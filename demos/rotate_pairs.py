"""Rotate each adjacent column pair by an angle of its own.

O[m, 2j]     = X[m, 2j] cos θⱼ - X[m, 2j + 1] sin θⱼ
O[m, 2j + 1] = X[m, 2j] sin θⱼ + X[m, 2j + 1] cos θⱼ,   X = A Bᵀ

A (M, K) and B (N, K) bfloat16, N even, t (N,) float32 with t[2j] = cos θⱼ and t[2j + 1] = sin θⱼ;
O (M, N) bfloat16. Training keeps X too: `rotate_and_keep` writes both at full width.
"""

from coda_agent.primitives import RowVector, Tile, epilogue, interleave, pairs


@epilogue(O=Tile)
def rotate_pairs(acc, t: RowVector):
    """O = each pair of columns of A Bᵀ, rotated."""
    x, y = pairs(acc)
    cos, sin = pairs(t)
    return {"O": interleave(x * cos - y * sin, x * sin + y * cos)}


@epilogue(X=Tile, R=Tile)
def rotate_and_keep(acc, t: RowVector):
    """X = A Bᵀ; R = its pairs of columns, rotated."""
    x, y = pairs(acc)
    cos, sin = pairs(t)
    return {"X": acc, "R": interleave(x * cos - y * sin, x * sin + y * cos)}


# --- end of program ---

WHY = """
- `pairs` takes any full-width value apart, a row vector too: one table of N numbers carries both
  the cosines and the sines, in the order in which the columns want them.
- `interleave` puts two half-width values back side by side, in the same registers: the output is
  full width and no data moves.
- A rotation by position has an angle for each row and pair: see rope.
- A second full-width output costs its M·N elements written and nothing else.
- Worse: two tables of N/2. A `RowVector` has N entries, one for each column; each table would hold
  every number twice.
"""


def reference(A, B, t):
    import torch

    X = A @ B.T
    x, y, cos, sin = X[:, 0::2], X[:, 1::2], t[0::2], t[1::2]
    O = torch.stack([x * cos - y * sin, x * sin + y * cos], dim=-1).flatten(1)
    return {"O": O, "X": X, "R": O}


def inputs(generator, m, n):
    import torch

    angle = torch.randn(n // 2, generator=generator, device=generator.device)
    return {"t": torch.stack([angle.cos(), angle.sin()], dim=-1).flatten()}
