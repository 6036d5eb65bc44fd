"""Weighted sum of a GEMM and a residual tile.

O[m, n] = alpha · Σₖ A[m, k] B[n, k] + beta · C[m, n]

A (M, K), B (N, K) and C (M, N) bfloat16, alpha and beta numbers; O (M, N) bfloat16.
"""

from coda_agent.primitives import Scalar, Tile, epilogue


@epilogue(O=Tile)
def scaled_residual(acc, C: Tile, alpha: Scalar, beta: Scalar):
    """O = alpha · A Bᵀ + beta · C."""
    return {"O": alpha * acc + beta * C}


# --- end of program ---

INPUTS = {"beta": -1.5}

WHY = """
- `Scalar` operands are arguments of the kernel: a new alpha compiles nothing. A number written into
  the program, such as `0.5 * acc`, is a constant of the kernel: right for what never changes.
- C costs 2·M·N bytes, as much as writing O, so at small K it is what the kernel waits for. It
  arrives through TMA while the GEMM runs, and as fp32: the sum is rounded once, at the store.
- Worse: folding beta into C beforehand, which is one more pass over M·N elements and one more
  rounding.
"""


def reference(A, B, C, alpha, beta):
    return {"O": alpha * (A @ B.T) + beta * C}
