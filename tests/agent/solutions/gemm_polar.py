from coda_agent.primitives import Tile, absolute, cos, epilogue, interleave, pairs, sin, wrapped


@epilogue(O=Tile)
def gemm_polar(acc):
    r, angle = pairs(acc)
    r = absolute(r)
    turned = wrapped(angle)
    return {"O": interleave(r * cos(turned), r * sin(turned))}
