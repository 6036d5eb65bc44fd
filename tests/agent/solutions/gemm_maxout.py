from coda_agent.primitives import HalfTile, RowVector, epilogue, maximum, pairs


@epilogue(O=HalfTile)
def gemm_maxout(acc, bias: RowVector):
    even, odd = pairs(acc + bias)
    return {"O": maximum(even, odd)}
