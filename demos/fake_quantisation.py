"""Linear layer whose result is quantised to FP8 and back, as training for quantisation wants it.

O = e4m3(A Bᵀ / scale) · scale

A (M, K) and B (N, K) bfloat16, scale a number; O (M, N) bfloat16.
"""

from coda_agent.primitives import Scalar, Tile, epilogue, to_e4m3


@epilogue(O=Tile)
def fake_quantisation(acc, scale: Scalar):
    """O = e4m3(A Bᵀ / scale) · scale."""
    return {"O": to_e4m3(acc / scale) * scale}


# --- end of program ---

WHY = """
- The rounding is an operation, since its result is computed on; a store rounds by itself.
- It saturates at 448 like the GPU's conversion. The reference clamps: releases of PyTorch differ in
  what their cast gives beyond.
- It costs three conversions an element. They share a unit with the transcendental functions.
"""

INPUTS = {"A": "whole", "B": "whole", "scale": 1 / 64}


def reference(A, B, scale):
    import torch

    q = (A @ B.T / scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return {"O": q.to(A.dtype) * scale}
