"""gemm_fp8_swiglu_quantised: SwiGLU on a row-wise scaled FP8 product, written in FP8 with one
scale, and each row's amax.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import (
    ColVector,
    HalfTile,
    RowMax,
    RowVector,
    Scalar,
    absolute,
    clamp,
    epilogue,
    pairs,
    swiglu,
)


@epilogue(O=HalfTile, amax=RowMax)
def gemm_fp8_swiglu_quantised(acc, scale_a: ColVector, scale_b: RowVector, scale_o: Scalar):
    """O = clamp(scale_o · (silu(gate) · up), -448.0, 448.0); gate, up = even and odd columns of (A
      Bᵀ) · scale_a · scale_b
    amax = row maximum of absolute(silu(gate) · up)
    """
    gate, up = pairs(acc * scale_a * scale_b)
    x = swiglu(gate, up)
    return {"O": clamp(scale_o * x, -448.0, 448.0), "amax": absolute(x)}
