"""gemm_rmsnorm_swiglu: Gate and up projections behind a delayed RMSNorm, with SwiGLU on adjacent
column pairs.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColVector, HalfTile, Tile, epilogue, pairs, swiglu


@epilogue(D=Tile, O=HalfTile)
def gemm_rmsnorm_swiglu(acc, r: ColVector):
    """D = (A Bᵀ) · r; O = silu(gate) · up; gate, up = even and odd columns of D"""
    d = acc * r
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up)}
