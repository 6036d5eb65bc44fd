from coda_agent.primitives import RowMean, RowVector, Tile, epilogue


@epilogue(D=Tile, O=Tile, s=RowMean)
def gemm_residual_partial_rmsnorm(acc, C: Tile, gamma: RowVector):
    """D = A Bᵀ + C; O = D ⊙ gamma; s = row means of D², all of the unrounded sum."""
    d = acc + C
    return {"D": d, "O": d * gamma, "s": d * d}
