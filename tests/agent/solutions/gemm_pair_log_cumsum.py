from coda_agent.primitives import Tile, absolute, epilogue, exp, interleave, log1p, maximum, pairs


@epilogue(O=Tile)
def gemm_pair_log_cumsum(acc):
    even, odd = pairs(acc)
    return {"O": interleave(even, maximum(even, odd) + log1p(exp(-absolute(even - odd))))}
