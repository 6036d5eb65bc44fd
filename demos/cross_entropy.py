"""Logits, and the two numbers of each row that its cross-entropy needs.

Z = A Bᵀ,   lse[m] = log Σₙ exp(Z[m, n]),   target[m] = Z[m, y[m]], or 0 where y[m] is not a column

A (M, K) and B (N, K) bfloat16, y (M,) int64; Z (M, N) bfloat16, lse and target (M,) float32.
The loss of row m is lse[m] - target[m]; rows with y[m] = -100 are padding and have none.
"""

from coda_agent.primitives import ColIndex, RowGather, RowLogSumExp, Tile, epilogue, gather


@epilogue(Z=Tile, lse=RowLogSumExp, target=RowGather)
def cross_entropy(acc, y: ColIndex):
    """Z = A Bᵀ; lse = log-sum-exp of each row; target = the column y of each row."""
    return {"Z": acc, "lse": acc, "target": gather(acc, y)}


# --- end of program ---

INPUTS = {"A": {"scale": 2.0}}

WHY = """
- A tile holds part of a row: it writes the log-sum-exp of its own columns, and a small second
  launch folds the partials. A running maximum keeps them finite whatever the logits.
- The target's column lies in one tile of its row, and that tile alone writes `target`: nothing to
  fold. An index outside [0, N), such as -100 for padding, matches no tile; the first one writes 0.
- Both numbers are of Z in fp32. Taken from stored bfloat16 logits, each would carry a rounding of
  Z, and a small loss is the difference of two nearly equal numbers.
- The subtraction and the mean over rows are left to the caller: neither can be computed with inside
  a tile, and both are of length M.
- Where the backward pass runs the GEMM again, Z is not needed: without it the kernel writes two
  vectors and some partials instead of M·N logits.
"""


def reference(A, B, y):
    Z = A @ B.T
    inside = (y >= 0) & (y < Z.shape[1])
    target = Z.gather(1, y.clamp(0, Z.shape[1] - 1)[:, None])[:, 0]
    return {"Z": Z, "lse": Z.logsumexp(-1), "target": target * inside}
