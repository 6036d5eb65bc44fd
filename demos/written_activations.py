"""Activations the vocabulary lacks, written out of atoms: ELU, squareplus, Mish, normal CDF.

elu(x) = x for x > 0, eˣ - 1 below          squareplus(x) = (x + √(x² + 4)) / 2
mish(x) = x · tanh(log(1 + eˣ))              Φ(x) = (1 + erf(x / √2)) / 2

x = A Bᵀ. A (M, K) and B (N, K) bfloat16; each O (M, N) bfloat16.
"""

from coda_agent.primitives import (
    Tile,
    epilogue,
    erf,
    exp,
    maximum,
    minimum,
    softplus,
    sqrt,
    tanh,
)


@epilogue(O_elu=Tile)
def elu(acc):
    return {"O_elu": maximum(acc, 0.0) + (exp(minimum(acc, 0.0)) - 1.0)}


@epilogue(O_squareplus=Tile)
def squareplus(acc):
    return {"O_squareplus": (acc + sqrt(acc * acc + 4.0)) * 0.5}


@epilogue(O_mish=Tile)
def mish(acc):
    return {"O_mish": acc * tanh(softplus(acc))}


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
- `tanh` is one instruction with relative error 2⁻¹¹: below the rounding of bfloat16, about that of
  fp16, and far above that of float32 outputs and sums.
"""


def reference(A, B):
    import torch
    import torch.nn.functional as F

    x = A @ B.T
    return {
        "O_elu": F.elu(x),
        "O_squareplus": (x + (x * x + 4).sqrt()) / 2,
        "O_mish": F.mish(x),
        "O_phi": torch.special.ndtr(x),
    }


def inputs(generator, m, n, k):
    from coda_agent.demos._draw import gemm

    return gemm(generator, m, n, k)
