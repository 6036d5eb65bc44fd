"""Scale each row of a GEMM.

D[m, n] = r[m] · Σₖ A[m, k] B[n, k]

A (M, K) and B (N, K) bfloat16, r (M,) float32; D (M, N) bfloat16. This is the second half of an
RMSNorm in front of a linear layer: r[m] = 1 / rms(x[m]), with the norm's weight folded into B.
"""

from coda_agent.primitives import ColVector, Tile, epilogue


@epilogue(D=Tile)
def scale_rows(acc, r: ColVector):
    """D = (A Bᵀ) ⊙ r."""
    return {"D": acc * r}


# --- end of program ---

WHY = """
- A number that depends on the row alone commutes with the sum over K, so the norm need not run
  before the GEMM: (x · r) Bᵀ = (x Bᵀ) · r. The scale then costs one multiplication an element and
  4·M bytes for each column of tiles, and no pass over x.
- The product stays in fp32 and is rounded once, at the store. Scaling A first would round twice:
  the scaled A to bfloat16, then D.
- Worse: taking r as a `Tile`. Its M·N elements would cost as much traffic as writing D.
"""


def reference(A, B, r):
    return {"D": (A @ B.T) * r[:, None]}
