from coda_agent.primitives import Tile, epilogue, interleave, pairs


@epilogue(O=Tile)
def gemm_cross_spectrum(acc, C: Tile):
    x, y = pairs(acc)
    c, s = pairs(C)
    return {"O": interleave(x * c + y * s, y * c - x * s)}
