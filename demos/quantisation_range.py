"""Linear layer, and the least and the largest value of each row for an asymmetric quantisation.

D = A Bᵀ,   low[m] = minₙ D[m, n],   high[m] = maxₙ D[m, n]

A (M, K) and B (N, K) bfloat16; D (M, N) bfloat16, low and high (M,) float32.
"""

from coda_agent.primitives import RowMax, RowMin, Tile, epilogue


@epilogue(D=Tile, low=RowMin, high=RowMax)
def quantisation_range(acc):
    """D = A Bᵀ; low and high = min D and max D over each row."""
    return {"D": acc, "low": acc, "high": acc}


# --- end of program ---

WHY = """
- An unsigned 8-bit code is (D - low) / scale with scale = (high - low) / 255: the whole range is
  used where activations lie on one side of 0, as after a SiLU.
- Both statistics are of the fp32 value and exact in any order, whatever the tile's width.
- Each costs one instruction an element and one float32 a tile and row.
"""


def reference(A, B):
    d = A @ B.T
    return {"D": d, "low": d.amin(-1), "high": d.amax(-1)}
