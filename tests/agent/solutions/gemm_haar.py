from coda_agent.primitives import HalfTile, epilogue, pairs


@epilogue(low=HalfTile, high=HalfTile)
def gemm_haar(acc):
    even, odd = pairs(acc * 0.7071067811865476)
    return {"low": even + odd, "high": even - odd}
