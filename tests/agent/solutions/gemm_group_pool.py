from coda_agent.primitives import GroupTile16, epilogue, group_max


@epilogue(O=GroupTile16)
def gemm_group_pool(acc):
    return {"O": group_max(acc, 16)}
