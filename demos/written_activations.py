"""Activations the vocabulary lacks, written out of atoms: ELU, squareplus, normal CDF and others.

elu(x) = x for x > 0, eˣ - 1 below          squareplus(x) = (x + √(x² + 4)) / 2
jump(x) = x for x > t, 0 below               Φ(x) = (1 + erf(x / √2)) / 2
snake(x) = x + sin²(x)                       siren(x) = sin(2x)

x = A Bᵀ. A (M, K) and B (N, K) bfloat16, t (N,) float32; each O (M, N) bfloat16.
"""

from coda_agent.primitives import (
    RowVector,
    Tile,
    cos,
    epilogue,
    erf,
    exp,
    maximum,
    minimum,
    sin,
    sqrt,
    step,
)


@epilogue(O_elu=Tile)
def elu(acc):
    x = minimum(acc, 0.0)
    s = maximum(x, -0.125)
    series = s * (1 + s / 2 * (1 + s / 3 * (1 + s / 4 * (1 + s / 5 * (1 + s / 6)))))
    return {"O_elu": maximum(acc, 0.0) + (series + (exp(x) - exp(s)))}


@epilogue(O_squareplus=Tile)
def squareplus(acc):
    return {"O_squareplus": (acc + sqrt(acc * acc + 4.0)) * 0.5}


@epilogue(O_jump=Tile)
def jump_relu(acc, t: RowVector):
    return {"O_jump": acc * step(acc - t)}


@epilogue(O_snake=Tile)
def snake(acc):
    return {"O_snake": acc + (0.5 - 0.5 * cos(2.0 * acc))}


@epilogue(O_siren=Tile)
def siren(acc):
    return {"O_siren": sin(2.0 * acc)}


@epilogue(O_phi=Tile)
def normal_cdf(acc):
    return {"O_phi": 0.5 + 0.5 * erf(acc * 0.7071067811865476)}


# --- end of program ---

WHY = """
- ELU is piecewise; here all pieces are computed, and those that do not apply are 0. The minimum
  also keeps large x from overflowing: exp(acc) alone would give inf - 1 in a piece that is not
  wanted.
- exp(x) - 1 has no digits left where x is near 0: exp errs by 2⁻²² of its result, which is 1 there.
  So the first terms of the exponential series go as far as -1/8, and exp adds what lies beyond:
  exp(x) - exp(s) is 0 where x is s. Then no value errs by more than 2⁻¹⁷ of itself, while a bf16
  store rounds by up to 2⁻⁸. 2 t / (1 - t) with t = tanh(x / 2) is shorter and the same in
  mathematics, but tanh errs by 2⁻¹¹ of its result.
- Squareplus is a smooth ReLU of one square root, with no exponential.
- A division by a number is written, or becomes, a multiplication by its reciprocal.
- `step` is the one comparison of the language: 1 or 0 as a factor, no branch.
- `sin` and `cos` are one instruction each and lose digits with |x| beyond π: twice a layer's output
  is small enough here, an angle that grows with a position is not (see rope). sin² is written with
  the cosine of the double angle, for one product less.
"""


def reference(A, B, t):
    import torch
    import torch.nn.functional as F

    x = A @ B.T
    return {
        "O_elu": F.elu(x),
        "O_squareplus": (x + (x * x + 4).sqrt()) / 2,
        "O_jump": x * (x > t),
        "O_snake": x + x.sin().square(),
        "O_siren": (2 * x).sin(),
        "O_phi": torch.special.ndtr(x),
    }
