from coda_agent.primitives import Tile, absolute, epilogue, maximum, softplus


@epilogue(O=Tile)
def gemm_log_mixture(acc, C: Tile):
    return {"O": maximum(acc, C) + softplus(-absolute(acc - C))}
