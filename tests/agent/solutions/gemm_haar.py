from coda_agent.primitives import HalfTile, epilogue, pairs


@epilogue(low=HalfTile, high=HalfTile)
def gemm_haar(acc):
    even, odd = pairs(acc)
    return {"low": (even + odd) * 0.7071067811865476, "high": (even - odd) * 0.7071067811865476}
