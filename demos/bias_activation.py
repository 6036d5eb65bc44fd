"""Linear layer with bias and GELU.

O[m, n] = gelu_tanh(Σₖ A[m, k] B[n, k] + b[n])

A (M, K) and B (N, K) bfloat16, b (N,) float32 or bfloat16; O (M, N) bfloat16.
"""

from coda_agent.primitives import RowVector, Tile, epilogue, gelu_tanh


@epilogue(O=Tile)
def bias_gelu(acc, b: RowVector):
    """O = gelu_tanh(A Bᵀ + b)."""
    return {"O": gelu_tanh(acc + b)}


# --- end of program ---

WHY = """
- A bias has one number a column, so it is a `RowVector`: 4·N bytes for each row of tiles. Both it
  and the accumulator are fp32 when they meet, whatever the bias was stored as.
- `gelu_tanh` is one atom with a lowering of its own. Writing the formula out with `tanh` takes more
  instructions for the same value. `gelu_erf` is the exact form, at nearly twice the operations: use
  the one that the model was trained with, since they differ by up to 5e-4.
- Worse: a second kernel for bias and activation. It would read and write M·N elements once more.
"""


def reference(A, B, b):
    from torch.nn.functional import gelu

    return {"O": gelu(A @ B.T + b, approximate="tanh")}
