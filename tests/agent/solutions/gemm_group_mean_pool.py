from coda_agent.primitives import GroupTile64, epilogue, group_mean


@epilogue(O=GroupTile64)
def gemm_group_mean_pool(acc):
    return {"O": group_mean(acc, 64)}
