from coda_agent.primitives import ColVector, Tile, epilogue, interleave, maximum, pairs, relu, sqrt


@epilogue(O=Tile)
def gemm_modrelu(acc, b: ColVector):
    x, y = pairs(acc)
    modulus = sqrt(x * x + y * y)
    scale = relu(modulus + b) / maximum(modulus, 1e-30)
    return {"O": interleave(x * scale, y * scale)}
