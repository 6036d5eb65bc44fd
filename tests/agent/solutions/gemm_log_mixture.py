from coda_agent.primitives import Tile, absolute, epilogue, exp, log1p, maximum


@epilogue(O=Tile)
def gemm_log_mixture(acc, C: Tile):
    return {"O": maximum(acc, C) + log1p(exp(-absolute(acc - C)))}
