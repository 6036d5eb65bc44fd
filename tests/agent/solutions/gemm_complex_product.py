from coda_agent.primitives import RowVector, Tile, epilogue, interleave, pairs


@epilogue(O=Tile)
def gemm_complex_product(acc, w: RowVector):
    x, y = pairs(acc)
    c, s = pairs(w)
    return {"O": interleave(x * c - y * s, x * s + y * c)}
