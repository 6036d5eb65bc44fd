"""Linear layer with bias, and the largest magnitude of each row for a later quantisation.

D = A Bᵀ + b,   amax[m] = maxₙ |D[m, n]|

A (M, K) and B (N, K) bfloat16, b (N,) float32; D (M, N) bfloat16, amax (M,) float32.
"""

from coda_agent.primitives import RowMax, RowVector, Tile, absolute, epilogue


@epilogue(D=Tile, amax=RowMax)
def quantisation_amax(acc, b: RowVector):
    """D = A Bᵀ + b; amax = max |D| over each row."""
    d = acc + b
    return {"D": d, "amax": absolute(d)}


# --- end of program ---

WHY = """
- A dynamic 8-bit scale is amax / 448 (E4M3) or amax / 127. Taken here it costs one maximum an
  element and a partial a tile; a kernel of its own would read D's M·N elements again.
- A maximum is exact in any order: the tile width does not change it, as it may the last bits of a
  sum.
- amax is of the fp32 value. Rounding D to bfloat16 may lift an element above it by one part in 256,
  so the quantiser should saturate, as conversions to E4M3 do.
- NaN is not a magnitude, and a maximum may pass over it: where rows may hold NaN, look for it in D.
"""


def reference(A, B, b):
    d = A @ B.T + b
    return {"D": d, "amax": d.abs().amax(-1)}
