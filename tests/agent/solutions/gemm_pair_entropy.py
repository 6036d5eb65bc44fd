from coda_agent.primitives import HalfTile, absolute, epilogue, exp, log1p, pairs, sigmoid


@epilogue(O=HalfTile)
def gemm_pair_entropy(acc):
    even, odd = pairs(acc)
    d = absolute(even - odd)
    return {"O": log1p(exp(-d)) + d * sigmoid(-d)}
