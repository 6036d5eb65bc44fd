"""gemm_fp8_swiglu: SwiGLU on adjacent column pairs of a row-wise scaled FP8 product.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColVector, HalfTile, RowVector, Tile, epilogue, pairs, swiglu


@epilogue(D=Tile, O=HalfTile)
def gemm_fp8_swiglu(acc, scale_a: ColVector, scale_b: RowVector):
    """D = (A Bᵀ) · scale_a · scale_b
    O = silu(gate) · up; gate, up = even and odd columns of D
    """
    d = acc * scale_a * scale_b
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up)}
