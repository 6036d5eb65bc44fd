"""Exponentials of scaled logits and their row sums: a softmax with a known bound, first half.

P[m, n] = exp(alpha · Σₖ A[m, k] B[n, k] - c[m]),   s[m] = Σₙ P[m, n]

A (M, K) and B (N, K) bfloat16, c (M,) float32, alpha a number; P (M, N) bfloat16, s (M,) float32.
c[m] is a bound of the row's scaled logits, for instance alpha · ‖A[m]‖ · max ‖B[n]‖.
"""

from coda_agent.primitives import ColVector, RowSum, Scalar, Tile, epilogue, exp


@epilogue(P=Tile, s=RowSum)
def softmax_exponentials(acc, c: ColVector, alpha: Scalar):
    """P = exp(alpha · A Bᵀ - c); s = Σ P over each row."""
    p = exp(alpha * acc - c)
    return {"P": p, "s": p}


# --- end of program ---

WHY = """
- A value may be stored and reduced: it is computed once, and the sum adds the fp32 value before the
  store rounds it. The sum of the stored P is a little different.
- The bound keeps exp in range without the row's maximum, which would take a pass of its own.
- Columns past N in a ragged last tile would add exp(0 - c) each; the lowering sees that this value
  is not 0 there and masks it. A sum of `acc * acc` needs no mask and gets none.
- Worse: dividing by s here. s is known only when every tile of the row is done; the consumer scales
  its rows by 1 / s instead (see `scale_rows`).
"""


def reference(A, B, c, alpha):
    p = (alpha * (A @ B.T) - c[:, None]).exp()
    return {"P": p, "s": p.sum(-1)}
