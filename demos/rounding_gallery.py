"""Roundings that are computed on: of a stored value's statistic, of gradients, and to integers.

S = 1.04 A Bᵀ,   s[m] = Σₙ bf16(S)²;   H = f16(z) - z for z = A Bᵀ (1 + 2⁻¹²), G = e5m2(A Bᵀ);
Q = 4 round(A Bᵀ / 4), L = ⌊A Bᵀ / 4⌋ + ⌈r⌉, T = trunc(A Bᵀ / 4) · r

A (M, K), B (N, K) bfloat16, r (M,) float32; S, H, G, Q, L, T (M, N) bfloat16, s (M,) float32.
"""

from coda_agent.primitives import (
    ColVector,
    RowSum,
    Tile,
    epilogue,
    floor,
    round_even,
    to_bfloat16,
    to_e5m2,
    to_float16,
    trunc,
)


@epilogue(S=Tile, s=RowSum)
def stored_squares(acc):
    """S = 1.04 A Bᵀ; s = Σ bf16(S)² over each row: the statistic of what S will hold."""
    d = acc * 1.0390625
    stored = to_bfloat16(d)
    return {"S": d, "s": stored * stored}


@epilogue(H=Tile, G=Tile)
def narrow_formats(acc):
    """H = the error of float16; G = e5m2(A Bᵀ), for gradients in FP8."""
    d = acc * 1.000244140625
    return {"H": to_float16(d) - d, "G": to_e5m2(acc)}


@epilogue(Q=Tile, L=Tile, T=Tile)
def integers(acc, r: ColVector):
    """Q = 4 round(A Bᵀ / 4); L = ⌊A Bᵀ / 4⌋ + ⌈r⌉; T = trunc(A Bᵀ / 4) · r."""
    d = acc * 0.25
    return {"Q": round_even(d) * 4.0, "L": floor(d) - floor(-r), "T": trunc(d) * r}


# --- end of program ---

INPUTS = {"A": "whole", "B": "whole"}

WHY = """
- A norm that reads S in bfloat16 sees rounded values. Taken of the rounded value here, its
  statistic is exactly theirs.
- float16 and e5m2 have an infinity, and what is too large becomes it; e4m3 saturates.
- round_even is torch.round: ties go to the even integer. Dividing by a power of two before and
  multiplying after rounds to any fixed-point grid.
"""


def reference(A, B, r):
    import torch

    d = A @ B.T
    s, h, q = d * 1.0390625, d * (1 + 2**-12), d / 4
    return {
        "S": s,
        "s": s.to(torch.bfloat16).to(d.dtype).square().sum(-1),
        "H": h.to(torch.float16).to(d.dtype) - h,
        "G": d.to(torch.float8_e5m2).to(d.dtype),
        "Q": q.round() * 4,
        "L": q.floor() + r.ceil()[:, None],
        "T": q.trunc() * r[:, None],
    }
