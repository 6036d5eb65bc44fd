"""gemm_residual_partial_rmsnorm_bwd: Backward of a delayed RMSNorm inside the product that brings
the gradient, added to the residual stream's.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import AddTile, ColSum, ColVector, RowVector, Tile, epilogue


@epilogue(O=AddTile, C_out=Tile, dgamma=ColSum)
def gemm_residual_partial_rmsnorm_bwd__in_place(
    acc,
    C: Tile,
    r: ColVector,
    gamma: RowVector,
    z: ColVector,
):
    """O += ((A Bᵀ) · gamma - C · r · z) · r
    C_out = C · r · gamma
    dgamma = column sum of (A Bᵀ) · (C · r)
    """
    x = C * r
    return {"O": (acc * gamma - x * z) * r, "C_out": x * gamma, "dgamma": acc * x}


@epilogue(O=Tile, C_out=Tile, dgamma=ColSum)
def gemm_residual_partial_rmsnorm_bwd__out_of_place(
    acc,
    C: Tile,
    r: ColVector,
    gamma: RowVector,
    z: ColVector,
    X: Tile,
):
    """O = ((A Bᵀ) · gamma - C · r · z) · r + X
    C_out = C · r · gamma
    dgamma = column sum of (A Bᵀ) · (C · r)
    """
    x = C * r
    return {"O": (acc * gamma - x * z) * r + X, "C_out": x * gamma, "dgamma": acc * x}
