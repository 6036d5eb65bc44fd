from coda_agent.primitives import Tile, epilogue, maximum, minimum


@epilogue(O=Tile)
def gemm_median(acc, C: Tile, E: Tile):
    low = minimum(acc, C)
    high = maximum(acc, C)
    return {"O": maximum(low, minimum(high, E))}
