"""Weight update stored in bfloat16 and FP8 by stochastic rounding, which keeps small steps.

W = sr(C - r · A Bᵀ) in bfloat16, Q = sr(64 A Bᵀ) / 64 in e4m3, by the random numbers of the places

A (M, K), B (N, K), C (M, N) bfloat16, r, seed and offset numbers; W, Q (M, N) bfloat16.
"""

from coda_agent.primitives import (
    Scalar,
    Tile,
    epilogue,
    philox_uniform,
    stochastic_bfloat16,
    stochastic_e4m3,
)


@epilogue(W=Tile, Q=Tile)
def stochastic_rounding(acc, C: Tile, r: Scalar, seed: Scalar, offset: Scalar):
    """W = sr(C - r · A Bᵀ) to bfloat16; Q = sr(64 A Bᵀ) / 64 to e4m3."""
    u = philox_uniform(acc, seed, offset)
    return {
        "W": stochastic_bfloat16(C - acc * r, u),
        "Q": stochastic_e4m3(acc * 64.0, u) * 0.015625,
    }


# --- end of program ---

WHY = """
- A step below half a unit in the last place of a bfloat16 weight is lost by rounding to nearest.
  Rounded up as often as it is large, it counts on average.
- The value is one that the type holds, so the store rounds nothing.
- The numbers follow from seed, offset and place, and a run can be repeated bit by bit.
"""

INPUTS = {"A": "whole", "B": "whole", "r": 2**-10, "seed": 12345, "offset": 678}


def reference(A, B, C, r, seed, offset):
    import torch

    from coda_agent.primitives.placed import philox
    from coda_agent.primitives.rounding import stochastic

    d = A @ B.T
    u = philox(seed, offset, *d.shape, device=d.device)
    q = stochastic(d * 64, u, torch.float8_e4m3fn) / 64
    return {"W": stochastic(C - d * r, u, torch.bfloat16), "Q": q}
