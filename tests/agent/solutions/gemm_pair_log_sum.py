from coda_agent.primitives import (
    HalfTile,
    absolute,
    epilogue,
    equal,
    exp,
    log1p,
    maximum,
    pairs,
    where,
)


@epilogue(O=HalfTile)
def gemm_pair_log_sum(acc):
    even, odd = pairs(acc)
    apart = where(equal(even, odd), 0.0, absolute(even - odd))  # inf - inf is NaN
    return {"O": maximum(even, odd) + log1p(exp(-apart))}
