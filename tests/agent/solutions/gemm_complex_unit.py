from coda_agent.primitives import Tile, absolute, epilogue, interleave, maximum, pairs, sqrt


@epilogue(O=Tile)
def gemm_complex_unit(acc):
    x, y = pairs(acc)
    m = maximum(maximum(absolute(x), absolute(y)), 1e-30)
    u = x / m
    v = y / m
    h = maximum(sqrt(u * u + v * v), 1e-30)
    return {"O": interleave(u / h, v / h)}
