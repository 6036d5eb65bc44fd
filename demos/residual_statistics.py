"""Residual sum and the mean squares of its rows, for the RMSNorm that follows.

D = A Bᵀ + C,   O = D ⊙ γ,   s[m] = (1/N) Σₙ D[m, n]²

A (M, K), B (N, K) and C (M, N) bfloat16, γ (N,) float32; D and O (M, N) bfloat16, s (M,) float32.
The next GEMM multiplies its rows by 1 / √(s + ε), which completes the norm.
"""

from coda_agent.primitives import RowMean, RowVector, Tile, epilogue


@epilogue(D=Tile, O=Tile, s=RowMean)
def residual_statistics(acc, C: Tile, gamma: RowVector):
    """D = A Bᵀ + C; O = D ⊙ γ; s = mean of D² over each row."""
    d = acc + C
    return {"D": d, "O": d * gamma, "s": d * d}


# --- end of program ---

INPUTS = {"gamma": {"mean": 1.0, "scale": 0.1}}

WHY = """
- A norm needs its whole row, and a tile holds 128 to 256 columns of it. So the kernel writes a
  partial for each tile, (M, ⌈N / block⌉) float32, and a small second launch folds them to (M,). The
  part of the norm that is left commutes with the next GEMM (see `scale_rows`).
- A raw partial of a mean is the block's sum over the block width, in a ragged last block too.
- The squares are of d in fp32, not of the stored D: the statistic carries no rounding of bfloat16,
  and D is not read back. Returning the product itself lets the sum fold it as fused multiply-adds.
- Two stores cost what two stores cost. Where γ is folded into the next weight, O is not needed.
"""


def reference(A, B, C, gamma):
    d = A @ B.T + C
    return {"D": d, "O": d * gamma, "s": (d * d).mean(-1)}
