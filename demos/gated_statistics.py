"""A gate and the mean squares of the gated rows, for the norm between the two halves of an MLP.

O[m, j] = relu(X[m, 2j])² · X[m, 2j + 1],   s[m] = (2/N) Σⱼ O[m, j]²,   X = A Bᵀ

A (M, K) and B (N, K) bfloat16, N even; O (M, N/2) bfloat16, s (M,) float32.
"""

from coda_agent.primitives import HalfTile, RowMean, epilogue, pairs, relu_squared


@epilogue(O=HalfTile, s=RowMean)
def gated_statistics(acc):
    """O = relu(gate)² ⊙ up; s = mean of O² over each row."""
    gate, up = pairs(acc)
    o = relu_squared(gate) * up
    return {"O": o, "s": o * o}


# --- end of program ---

WHY = """
- A reduction takes a value of either width. Of a half-width one, a tile of 128 columns holds 64
  values, and the mean is over N/2: a raw partial is the block's sum over 64. The raw buffer keeps
  its shape, (M, ⌈N / block⌉).
- The tile that computes a gated value also reduces it, so the norm after the gate costs a partial a
  tile, and its scale commutes with the down projection (see `scale_rows`).
- Worse: interleaving o with itself for a full-width mean. It has the same value at twice the work.
"""


def reference(A, B):
    x = A @ B.T
    o = x[:, 0::2].relu().square() * x[:, 1::2]
    return {"O": o, "s": o.square().mean(-1)}
