"""gemm_fp8_residual_partial_rmsnorm: FP8 output projection plus residual, the norm's weight, and
the row statistics of the next RMSNorm.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColVector, RowMean, RowVector, Tile, epilogue


@epilogue(D=Tile, O=Tile, s=RowMean)
def gemm_fp8_residual_partial_rmsnorm(
    acc,
    scale_a: ColVector,
    scale_b: RowVector,
    C: Tile,
    gamma: RowVector,
):
    """D = (A Bᵀ) · scale_a · scale_b + C; O = D · gamma; s = row mean of D²"""
    d = acc * scale_a * scale_b + C
    return {"D": d, "O": d * gamma, "s": d * d}
