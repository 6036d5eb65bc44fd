"""gemm_partial_cross_entropy: Language-model head with the two numbers of each row that a
cross-entropy needs.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColIndex, RowGather, RowLogSumExp, Tile, epilogue, gather


@epilogue(Z=Tile, z_tgt=RowGather, lse=RowLogSumExp)
def gemm_partial_cross_entropy(acc, y: ColIndex):
    """Z = A Bᵀ; z_tgt = gather(Z, y); lse = row log-sum-exp of Z"""
    return {"Z": acc, "z_tgt": gather(acc, y), "lse": acc}
