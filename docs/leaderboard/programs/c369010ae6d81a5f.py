"""gemm_rmsnorm: Linear layer whose RMSNorm is applied afterwards, as one scale per row.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import ColVector, Tile, epilogue


@epilogue(O=Tile)
def gemm_rmsnorm(acc, r: ColVector):
    """O = (A Bᵀ) · r"""
    return {"O": acc * r}
