"""gemm_fp8_rmsnorm_rope: FP8 query, key and value projection behind a delayed RMSNorm, with rotary
position embedding.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColVector, Scalar, Tile, epilogue, interleave, pairs


@epilogue(D=Tile, O=Tile)
def gemm_fp8_rmsnorm_rope(acc, scale_a: Scalar, scale_b: Scalar, r: ColVector, cs: Tile):
    """D = scale_a · scale_b · (A Bᵀ) · r
    O = interleave(even · cs_even + odd · cs_odd, odd · cs_even - even · cs_odd); even, odd =
      even and odd columns of D; cs_even, cs_odd = even and odd columns of cs
    """
    d = scale_a * scale_b * acc * r
    even, odd = pairs(d)
    cs_even, cs_odd = pairs(cs)
    o = interleave(even * cs_even + odd * cs_odd, odd * cs_even - even * cs_odd)
    return {"D": d, "O": o}
