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
    return {"O_elu": maximum(acc, 0.0) + (exp(minimum(acc, 0.0)) - 1.0)}


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
- ELU is piecewise; here both pieces are computed and one of them is 0. The minimum inside exp also
  keeps large x from overflowing: exp(acc) alone would give inf - 1 in the branch that is not
  wanted.
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


def inputs(generator, m, n, k):
    from coda_agent.demos._draw import gemm, vector

    return {**gemm(generator, m, n, k), "t": vector(generator, n)}
