from coda_agent.primitives import RowLogSumExp, RowVector, epilogue, log


@epilogue(lse=RowLogSumExp)
def gemm_weighted_log_sum(acc, w: RowVector):
    return {"lse": acc + log(w)}
