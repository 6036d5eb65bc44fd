from coda_agent.primitives import Tile, epilogue, interleave, pairs


@epilogue(O=Tile)
def gemm_pair_cumsum(acc):
    even, odd = pairs(acc)
    return {"O": interleave(even, even + odd)}
