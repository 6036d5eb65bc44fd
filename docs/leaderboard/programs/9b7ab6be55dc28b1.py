from coda_agent.primitives import Tile, epilogue, interleave, pairs, rotate


@epilogue(D=Tile, O=Tile)
def gemm_rope(acc, cs: Tile):
    """D = A Bᵀ; O = D with each adjacent column pair rotated by the angle in cs, (cos, sin)."""
    x, y = pairs(acc)
    cosine, sine = pairs(cs)
    even, odd = rotate(x, y, cosine, sine)
    return {"D": acc, "O": interleave(even, odd)}
