from coda_agent.primitives import ColVector, HalfTile, Tile, epilogue, pairs, swiglu


@epilogue(D=Tile, O=HalfTile)
def gemm_rmsnorm_swiglu(acc, r: ColVector):
    """D = (A Bᵀ) ⊙ r, rows scaled; O = silu(gate) · up, gates the even columns of D, ups the odd."""
    d = acc * r
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up)}
