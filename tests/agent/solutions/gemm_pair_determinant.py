from coda_agent.primitives import HalfTile, RowVector, epilogue, pairs


@epilogue(O=HalfTile)
def gemm_pair_determinant(acc, w: RowVector):
    x, y = pairs(acc)
    u, v = pairs(w)
    return {"O": x * v - y * u}
