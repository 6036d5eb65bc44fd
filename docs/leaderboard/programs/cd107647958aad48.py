"""gemm_swiglu: Gate and up projections in one GEMM, with SwiGLU on adjacent column pairs.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import HalfTile, Tile, epilogue, pairs, swiglu


@epilogue(D=Tile, O=HalfTile)
def gemm_swiglu(acc):
    """D = A Bᵀ; O = silu(gate) · up; gate, up = even and odd columns of D"""
    gate, up = pairs(acc)
    return {"D": acc, "O": swiglu(gate, up)}
