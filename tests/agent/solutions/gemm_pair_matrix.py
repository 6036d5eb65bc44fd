from coda_agent.primitives import Tile, epilogue, interleave, pairs


@epilogue(O=Tile)
def gemm_pair_matrix(acc):
    x, y = pairs(acc)
    return {"O": interleave(0.8 * x - 0.6 * y, 0.6 * x + 0.8 * y)}
