from coda_agent.primitives import GroupTile32, clamp, epilogue, exp, group_max, group_sum, log


@epilogue(O=GroupTile32)
def gemm_group_log_sum(acc):
    # Float32's largest numbers: inf - inf is NaN.
    top = clamp(group_max(acc, 32), -3.4028234663852886e38, 3.4028234663852886e38)
    return {"O": top + log(group_sum(exp(acc - top), 32))}
