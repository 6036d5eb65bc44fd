from coda_agent.primitives import (
    ColVector,
    Tile,
    absolute,
    epilogue,
    interleave,
    maximum,
    pairs,
    relu,
    sqrt,
)


@epilogue(O=Tile)
def gemm_modrelu(acc, b: ColVector):
    x, y = pairs(acc)
    # Squares of parts over the larger one stay in float32's range, as torch's modulus does.
    m = maximum(maximum(absolute(x), absolute(y)), 1e-30)
    u = x / m
    v = y / m
    h = sqrt(u * u + v * v)
    scale = relu(m * h + b) / maximum(h, 1e-30)
    return {"O": interleave(u * scale, v * scale)}
