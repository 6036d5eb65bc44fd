from coda_agent.primitives import (
    RowMean,
    Tile,
    WideTile,
    derivative,
    epilogue,
    interleave,
    pairs,
    silu,
)


@epilogue(dZ=WideTile, z=RowMean, O=Tile)
def gemm_partial_swiglu_bwd(acc, Z: WideTile):
    """dZ = gradients of gate and up; z = row means of Z · dZ over pairs; O = silu(gate) · up."""
    gate, up = pairs(Z)
    activated = silu(gate)
    d_gate = acc * up * derivative(silu, gate)
    d_up = acc * activated
    return {
        "dZ": interleave(d_gate, d_up),
        "z": gate * d_gate + up * d_up,
        "O": activated * up,
    }
