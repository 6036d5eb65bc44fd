from coda_agent.primitives import RowMean, RowVector, Tile, epilogue


@epilogue(D=Tile, O=Tile, s=RowMean)
def gemm_residual_partial_rmsnorm(acc, C: Tile, gamma: RowVector):
    """D = A Bᵀ + C; O = gamma · D; s = the mean square of D's rows, before gamma."""
    d = acc + C
    return {"D": d, "O": d * gamma, "s": d * d}
