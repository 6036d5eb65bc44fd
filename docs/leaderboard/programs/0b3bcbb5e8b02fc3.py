"""gemm_fp8_rmsnorm: FP8 linear layer behind a delayed RMSNorm, which scales each row of the
product.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColVector, Scalar, Tile, epilogue


@epilogue(O=Tile)
def gemm_fp8_rmsnorm(acc, scale_a: Scalar, scale_b: Scalar, r: ColVector):
    """O = scale_a · scale_b · (A Bᵀ) · r"""
    return {"O": scale_a * scale_b * acc * r}
