from coda_agent.primitives import Tile, epilogue, greater, group_sum, sqrt, where


@epilogue(O=Tile)
def gemm_head_renorm(acc):
    norm = sqrt(group_sum(acc * acc, 64))
    return {"O": acc * where(greater(norm, 4.0), 4.0 / (norm + 1e-7), 1.0)}
