from coda_agent.primitives import (
    Tile,
    absolute,
    epilogue,
    equal,
    exp,
    interleave,
    log1p,
    maximum,
    pairs,
    where,
)


@epilogue(O=Tile)
def gemm_pair_log_cumsum(acc):
    even, odd = pairs(acc)
    apart = where(equal(even, odd), 0.0, absolute(even - odd))  # inf - inf is NaN
    return {"O": interleave(even, maximum(even, odd) + log1p(exp(-apart)))}
