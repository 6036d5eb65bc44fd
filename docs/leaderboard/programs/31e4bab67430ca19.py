"""gemm_fp8_rmsnorm_swiglu: FP8 gate and up projections behind a delayed RMSNorm, with SwiGLU on
adjacent column pairs.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColVector, HalfTile, Scalar, Tile, epilogue, pairs, swiglu


@epilogue(D=Tile, O=HalfTile)
def gemm_fp8_rmsnorm_swiglu(acc, scale_a: Scalar, scale_b: Scalar, r: ColVector):
    """D = scale_a · scale_b · (A Bᵀ) · r
    O = silu(gate) · up; gate, up = even and odd columns of D
    """
    d = scale_a * scale_b * acc * r
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up)}
