from coda_agent.primitives import Tile, epilogue, interleave, maximum, pairs


@epilogue(O=Tile)
def gemm_pair_cummax(acc):
    even, odd = pairs(acc)
    return {"O": interleave(even, maximum(even, odd))}
