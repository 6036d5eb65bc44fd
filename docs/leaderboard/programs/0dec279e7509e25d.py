"""gemm_rmsnorm_rope: Query, key and value projection behind a delayed RMSNorm, with rotary
position embedding.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColVector, Tile, epilogue, interleave, pairs


@epilogue(D=Tile, O=Tile)
def gemm_rmsnorm_rope(acc, r: ColVector, cs: Tile):
    """D = (A Bᵀ) · r
    O = interleave(even · cs_even + odd · cs_odd, odd · cs_even - even · cs_odd); even, odd =
      even and odd columns of D; cs_even, cs_odd = even and odd columns of cs
    """
    d = acc * r
    even, odd = pairs(d)
    cs_even, cs_odd = pairs(cs)
    o = interleave(even * cs_even + odd * cs_odd, odd * cs_even - even * cs_odd)
    return {"D": d, "O": o}
