"""Elementary functions of the product z = A Bᵀ and of a positive tile C, each output for itself.

A (M, K) and B (N, K), C (M, N) above 0 bfloat16; outputs (M, N) bfloat16.
"""

from coda_agent.primitives import (
    Tile,
    acos,
    acosh,
    asin,
    asinh,
    atan,
    atan2,
    atanh,
    clamp,
    copysign,
    cos,
    cosh,
    epilogue,
    equal,
    erfc,
    exp2,
    floor,
    fmod,
    greater_equal,
    log1p,
    log2,
    power,
    round_even,
    sin,
    sinh,
    tan,
    trunc,
    where,
    wrapped,
)


@epilogue(angles=Tile, inverse=Tile)
def trigonometry(acc, C: Tile):
    """Functions of an angle, and angles of what they give."""
    z = clamp(acc, -0.9, 0.9)
    return {
        "angles": sin(wrapped(acc)) + cos(wrapped(acc)) + tan(z),
        "inverse": asin(z) + acos(z) + atan(acc) + atan2(acc, C),
    }


@epilogue(hyperbolic=Tile, tails=Tile)
def exponentials(acc, C: Tile):
    """Hyperbolic functions and their inverses; powers, logarithms and a tail."""
    z = clamp(acc, -0.9, 0.9)
    return {
        "hyperbolic": sinh(z) + cosh(z) + asinh(acc) + acosh(C + 1.0) + atanh(z),
        "tails": erfc(acc) + exp2(z) + log2(C) + log1p(C) + power(C, z),
    }


@epilogue(whole=Tile)
def integers(acc, C: Tile):
    """Rounding to integers, what it leaves, and where nothing is left."""
    z = 4.0 * acc
    left = fmod(z, C + 1.0)
    size = copysign(z, C)
    whole = floor(z) + trunc(z) + round_even(z) + left
    return {"whole": where(equal(left, 0.0) + greater_equal(C, 3.0), size, whole)}


# --- end of program ---

WHY = """
- `sin` and `cos` are one instruction each and good for |x| <= π; `wrapped` brings any angle there.
  `tan` does so by itself.
- `log1p`, `log2` and `erfc` are CUDA's functions. They keep their digits where log(1 + x), log(x)
  near 1 and 1 - erf(x) lose them, and cost some ten instructions.
- `round_even` is right for any x; `fmod` where the quotient is below 2²².
"""

INPUTS = {"C": "positive"}


def reference(A, B, C):
    import torch

    x = A @ B.T
    z = x.clamp(-0.9, 0.9)
    left = torch.fmod(4 * x, C + 1)
    whole = (4 * x).floor() + (4 * x).trunc() + (4 * x).round() + left
    return {
        "angles": x.sin() + x.cos() + z.tan(),
        "inverse": z.asin() + z.acos() + x.atan() + torch.atan2(x, C),
        "hyperbolic": z.sinh() + z.cosh() + x.asinh() + (C + 1).acosh() + z.atanh(),
        "tails": x.erfc() + z.exp2() + C.log2() + C.log1p() + C**z,
        "whole": torch.where((left == 0) | (C >= 3), torch.copysign(4 * x, C), whole),
    }
