from coda_agent.primitives import RowVector, Tile, epilogue, interleave, maximum, minimum, pairs


@epilogue(O=Tile)
def gemm_groupsort(acc, bias: RowVector):
    even, odd = pairs(acc + bias)
    return {"O": interleave(minimum(even, odd), maximum(even, odd))}
