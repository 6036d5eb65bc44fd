"""The gated half of an MLP: SwiGLU on interleaved columns.

O[m, j] = silu(X[m, 2j]) · X[m, 2j + 1],   X = A Bᵀ,   silu(x) = x · σ(x)

A (M, K) and B (N, K) bfloat16, N even; O (M, N/2) bfloat16. The rows of B alternate: gate₀, up₀,
gate₁, up₁, …
"""

from coda_agent.primitives import HalfTile, epilogue, pairs, silu


@epilogue(O=HalfTile)
def gate(acc):
    """O = silu(gate) ⊙ up on adjacent column pairs."""
    g, u = pairs(acc)
    return {"O": silu(g) * u}


# --- end of program ---

WHY = """
- A gate needs two columns at once. With the weights interleaved, both lie in one thread's
  registers, so `pairs` moves nothing; the weight is interleaved once, when the model is loaded.
- Only M·N/2 elements are stored: half of what a plain GEMM writes. The gate and up projections
  themselves never reach memory, and nothing is rounded before the product.
- `swiglu(g, u)` names the same graph; other gates are `geglu`, `reglu` and `glu`.
- Worse: [gate | up] as two blocks of B. The partners then lie N/2 columns apart, in different
  tiles.
"""


def reference(A, B):
    from torch.nn.functional import silu

    x = A @ B.T
    return {"O": silu(x[:, 0::2]) * x[:, 1::2]}
