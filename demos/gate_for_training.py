"""RMSNorm and SwiGLU with the pre-activation kept for the backward pass.

D = (A Bᵀ) ⊙ r,   O[m, j] = silu(D[m, 2j]) · D[m, 2j + 1]

A (M, K) and B (N, K) bfloat16, N even, r (M,) float32; D (M, N) and O (M, N/2) bfloat16.
"""

from coda_agent.primitives import ColVector, HalfTile, Tile, epilogue, pairs, swiglu


@epilogue(D=Tile, O=HalfTile)
def gate_for_training(acc, r: ColVector):
    """D = (A Bᵀ) ⊙ r; O = silu(gate) ⊙ up on adjacent column pairs of D."""
    d = acc * r
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up)}


# --- end of program ---

WHY = """
- One kernel has as many outputs as it declares, of either width. Storing D costs M·N elements more
  than inference needs, and saves the backward pass a GEMM.
- O is computed from d in fp32, not from the stored D. A reference that rounds D first differs by
  the rounding of bfloat16, which is noise and no error: state in the spec which one is meant.
- Further outputs of either width cost their elements written and nothing else.
- Worse: scaling gate and up apart after `pairs`. It is the same arithmetic, but D would then have
  to be put together again with `interleave`.
"""


def reference(A, B, r):
    from torch.nn.functional import silu

    d = (A @ B.T) * r[:, None]
    return {"D": d, "O": silu(d[:, 0::2]) * d[:, 1::2]}
