"""gemm_fp8_rmsnorm_swiglu_quantised: FP8 gate and up projections behind a delayed RMSNorm, with
SwiGLU written in FP8, row by row, and each row's amax.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import (
    ColVector,
    HalfTile,
    RowMax,
    Scalar,
    absolute,
    clamp,
    epilogue,
    pairs,
    swiglu,
)


@epilogue(O=HalfTile, amax=RowMax)
def gemm_fp8_rmsnorm_swiglu_quantised(
    acc,
    scale_a: Scalar,
    scale_b: Scalar,
    r: ColVector,
    scale_o: ColVector,
):
    """O = clamp(silu(gate) · up · scale_o, -448.0, 448.0); gate, up = even and odd columns of
      scale_a · scale_b · (A Bᵀ) · r
    amax = row maximum of absolute(silu(gate) · up)
    """
    gate, up = pairs(scale_a * scale_b * acc * r)
    x = swiglu(gate, up)
    return {"O": clamp(x * scale_o, -448.0, 448.0), "amax": absolute(x)}
