from coda_agent.primitives import AddTile, ColSum, ColVector, RowVector, Tile, epilogue


@epilogue(O=AddTile, C_out=Tile, dgamma=ColSum)
def gemm_residual_partial_rmsnorm_bwd__in_place(
    acc, C: Tile, r: ColVector, gamma: RowVector, z: ColVector
):
    """O gains the gradient through the norm; C_out = normalised C ⊙ gamma; dgamma sums columns."""
    c = C * r
    change = (acc * gamma - c * z) * r
    return {"O": change, "C_out": c * gamma, "dgamma": acc * c}


@epilogue(O=Tile, C_out=Tile, dgamma=ColSum)
def gemm_residual_partial_rmsnorm_bwd__out_of_place(
    acc, C: Tile, r: ColVector, gamma: RowVector, z: ColVector, X: Tile
):
    """O = X + the gradient through the norm; C_out and dgamma as in place."""
    c = C * r
    change = (acc * gamma - c * z) * r
    return {"O": X + change, "C_out": c * gamma, "dgamma": acc * c}
