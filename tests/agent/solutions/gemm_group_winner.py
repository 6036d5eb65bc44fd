from coda_agent.primitives import Tile, epilogue, greater_equal, group_max, where


@epilogue(O=Tile)
def gemm_group_winner(acc):
    return {"O": where(greater_equal(acc, group_max(acc, 32)), acc, 0.0)}
