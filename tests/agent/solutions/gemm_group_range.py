from coda_agent.primitives import GroupTile32, epilogue, group_max, group_min


@epilogue(O=GroupTile32)
def gemm_group_range(acc):
    return {"O": group_max(acc, 32) - group_min(acc, 32)}
