"""Two smooth activations of one sigmoid or one exponential: Mish and CLIP's QuickGELU.

O_mish = x · tanh(log(1 + eˣ))          O_quick = x · σ(1.702 x),   x[m, n] = (A Bᵀ)[m, n] + b[n]

A (M, K) and B (N, K) bfloat16, b (N,) float32; each O (M, N) bfloat16.
"""

from coda_agent.primitives import RowVector, Tile, epilogue, mish, quick_gelu


@epilogue(O_mish=Tile)
def bias_mish(acc, b: RowVector):
    return {"O_mish": mish(acc + b)}


@epilogue(O_quick=Tile)
def bias_quick_gelu(acc, b: RowVector):
    return {"O_quick": quick_gelu(acc + b)}


# --- end of program ---

INPUTS = {"b": {"scale": 4.0}}

WHY = """
- `mish` is no tanh of a logarithm of an exponential: tanh(log(1 + e)) is a ratio of polynomials in
  e, so one exponential and one reciprocal do.
- Worse: `acc * tanh(softplus(acc))`, three transcendentals and MUFU.TANH's relative error of 2⁻¹¹.
- `quick_gelu` costs what `silu` does.
"""


def reference(A, B, b):
    from torch.nn.functional import mish

    x = A @ B.T + b
    return {"O_mish": mish(x), "O_quick": x * (1.702 * x).sigmoid()}
