"""gemm_partial_swiglu_bwd: Backward of SwiGLU inside the down projection's gradient, with the row
statistic of the norm before it.

Composed from the PyTorch reference of the spec.
"""

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
    """dZ = interleave((A Bᵀ) · silu′(gate) · up, (A Bᵀ) · silu(gate)); gate, up = even and odd
      columns of Z
    z = row mean of (A Bᵀ) · silu′(gate) · up · gate + (A Bᵀ) · silu(gate) · up
    O = silu(gate) · up
    """
    gate, up = pairs(Z)
    x = acc * derivative(silu, gate) * up
    y = silu(gate)
    z = acc * y
    return {"dZ": interleave(x, z), "z": x * gate + z * up, "O": y * up}
