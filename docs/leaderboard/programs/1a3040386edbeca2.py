from coda_agent.primitives import ColVector, Tile, epilogue, interleave, pairs


@epilogue(D=Tile, O=Tile)
def gemm_rmsnorm_rope(acc, r: ColVector, cs: Tile):
    """D = r · A Bᵀ; O = D with each pair turned by the angle whose cosine and sine are in cs."""
    d = acc * r
    x, y = pairs(d)
    c, s = pairs(cs)
    return {"D": d, "O": interleave(x * c + y * s, y * c - x * s)}
