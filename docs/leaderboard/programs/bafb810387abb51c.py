from coda_agent.primitives import (
    ColIndex,
    ColVector,
    RowGather,
    RowLogSumExp,
    Tile,
    epilogue,
    gather,
)


@epilogue(Z=Tile, z_tgt=RowGather, lse=RowLogSumExp)
def gemm_rmsnorm_partial_cross_entropy(acc, r: ColVector, y: ColIndex):
    """Z = r ⊙ A Bᵀ, rows scaled; z_tgt = Z in column y of each row; lse = its log-sum-exp."""
    z = acc * r
    return {"Z": z, "z_tgt": gather(z, y), "lse": z}
