from coda_agent.primitives import HalfTile, absolute, epilogue, exp, log1p, maximum, pairs


@epilogue(O=HalfTile)
def gemm_pair_log_sum(acc):
    even, odd = pairs(acc)
    return {"O": maximum(even, odd) + log1p(exp(-absolute(even - odd)))}
