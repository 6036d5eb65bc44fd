"""gemm_rope: Query, key and value projection with rotary position embedding on adjacent column
pairs.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import Tile, epilogue, interleave, pairs


@epilogue(D=Tile, O=Tile)
def gemm_rope(acc, cs: Tile):
    """D = A Bᵀ
    O = interleave(even · cs_even + odd · cs_odd, odd · cs_even - even · cs_odd); even, odd =
      even and odd columns of D; cs_even, cs_odd = even and odd columns of cs
    """
    even, odd = pairs(acc)
    cs_even, cs_odd = pairs(cs)
    o = interleave(even * cs_even + odd * cs_odd, odd * cs_even - even * cs_odd)
    return {"D": acc, "O": o}
