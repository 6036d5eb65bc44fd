from coda_agent.primitives import RowVector, Tile, epilogue, interleave, pairs, sigmoid


@epilogue(O=Tile)
def gemm_pair_softmax(acc, bias: RowVector):
    even, odd = pairs(acc + bias)
    return {"O": interleave(sigmoid(even - odd), sigmoid(odd - even))}
