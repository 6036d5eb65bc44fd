"""gemm_rmsnorm_partial_cross_entropy: Language-model head behind a delayed RMSNorm, with what a
cross-entropy needs of each row.

Composed from the PyTorch reference of the spec.
"""

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
    """Z = (A Bᵀ) · r; z_tgt = gather(Z, y); lse = row log-sum-exp of Z"""
    z = acc * r
    return {"Z": z, "z_tgt": gather(z, y), "lse": z}
