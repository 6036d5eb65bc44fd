from coda_agent.primitives import Tile, epilogue, greater_equal


@epilogue(O=Tile)
def gemm_code_book(acc):
    low = 0.75 * greater_equal(-0.625, acc) + 0.5 * greater_equal(0.0, acc)
    return {"O": 1.0 - low - 0.75 * greater_equal(0.625, acc)}
