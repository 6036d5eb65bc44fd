from coda_agent.primitives import RowVector, Tile, epilogue, exp, interleave, maximum, pairs


@epilogue(O=Tile)
def gemm_pair_softmax(acc, bias: RowVector):
    even, odd = pairs(acc + bias)
    top = maximum(even, odd)
    left = exp(even - top)
    right = exp(odd - top)
    total = left + right
    return {"O": interleave(left / total, right / total)}
