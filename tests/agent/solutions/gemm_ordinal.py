from coda_agent.primitives import RowVector, Tile, epilogue, greater_equal, sigmoid


@epilogue(O=Tile)
def gemm_ordinal(acc, bias: RowVector):
    p = sigmoid(acc + bias)
    low = 1.0 - greater_equal(0.1, p) + 1.0 - greater_equal(0.3, p)
    return {"O": low + 1.0 - greater_equal(0.5, p) + 1.0 - greater_equal(0.8, p)}
