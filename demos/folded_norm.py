"""Normalise columns with running statistics, as batch normalisation does at inference.

O[m, n] = max(0, (X[m, n] - mean[n]) / √(var[n] + 1e-5) · weight[n] + bias[n]),   X = A Bᵀ

A (M, K) and B (N, K) bfloat16, mean, var, weight and bias (N,) float32; O (M, N) bfloat16.
"""

from coda_agent.primitives import RowVector, Tile, epilogue, relu, rsqrt


@epilogue(O=Tile)
def folded_norm(acc, mean: RowVector, var: RowVector, weight: RowVector, bias: RowVector):
    """O = relu((A Bᵀ - mean) · weight / √(var + 1e-5) + bias)."""
    scale = weight * rsqrt(var + 1e-5)
    return {"O": relu(acc * scale + (bias - mean * scale))}


# --- end of program ---

INPUTS = {"var": "positive"}

WHY = """
- What varies with the column alone is gathered first: `scale` and the shift in brackets are row
  values, so an element costs one fused multiply-add and a maximum.
- The subtraction moves from the element to the shift, which is exact enough in fp32 unless mean ·
  scale dwarfs the result; then keep `(acc - mean) * scale + bias`.
- Four vectors cost 16·N bytes for each row of tiles, little beside 2·N·K of weight. If the
  statistics never change, fold `scale` into B and the shift into a bias: the program is then
  `relu(acc + shift)`.
"""


def reference(A, B, mean, var, weight, bias):
    from torch.nn.functional import batch_norm, relu

    return {"O": relu(batch_norm(A @ B.T, mean, var, weight, bias, eps=1e-5))}
