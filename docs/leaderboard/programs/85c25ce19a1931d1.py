"""gemm_residual_partial_rmsnorm: Output projection plus residual, the norm's weight, and the row
statistics of the next RMSNorm.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import RowMean, RowVector, Tile, epilogue


@epilogue(D=Tile, O=Tile, s=RowMean)
def gemm_residual_partial_rmsnorm(acc, C: Tile, gamma: RowVector):
    """D = A Bᵀ + C; O = D · gamma; s = row mean of D²"""
    d = acc + C
    return {"D": d, "O": d * gamma, "s": d * d}
