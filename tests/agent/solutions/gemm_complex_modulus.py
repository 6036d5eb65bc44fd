from coda_agent.primitives import HalfTile, absolute, epilogue, maximum, pairs, sqrt


@epilogue(O=HalfTile)
def gemm_complex_modulus(acc):
    x, y = pairs(acc)
    m = maximum(maximum(absolute(x), absolute(y)), 1e-30)
    u = x / m
    v = y / m
    return {"O": m * sqrt(u * u + v * v)}
