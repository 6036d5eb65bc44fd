from coda_agent.primitives import HalfTile, atan2, epilogue, pairs


@epilogue(O=HalfTile)
def gemm_complex_phase(acc):
    x, y = pairs(acc)
    return {"O": atan2(y, x)}
