from coda_agent.primitives import GroupTile32, epilogue, exp, group_max, group_sum, log


@epilogue(O=GroupTile32)
def gemm_group_log_sum(acc):
    top = group_max(acc, 32)
    return {"O": top + log(group_sum(exp(acc - top), 32))}
