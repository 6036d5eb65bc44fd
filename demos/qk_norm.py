"""RMS norm of each head of queries and keys, in the projection that makes them.

x = A Bᵀ + b,   O[m, h, j] = x[m, h, j] / √(mean over j of x² + ε) · g[h, j],   heads of 64 columns

A (M, K), B (N, K) bfloat16, b, g (N,) float32, N a multiple of 64; O (M, N) bfloat16.
"""

from coda_agent.primitives import RowVector, Tile, epilogue, group_mean, rsqrt


@epilogue(O=Tile)
def qk_norm(acc, b: RowVector, g: RowVector):
    """O = x / √(mean of x² in each head + 10⁻⁶) · g for x = A Bᵀ + b."""
    x = acc + b
    return {"O": x * rsqrt(group_mean(x * x, 64) + 1e-6) * g}


# --- end of program ---

WHY = """
- A head is a group of adjacent columns. It lies in one tile, so its statistic is known before
  anything is stored, and no second kernel reads the projection again.
- The group's columns lie in the registers of four threads, which exchange two words each. x is
  computed twice, since the accumulator stays where it is and x would need room beside it.
- Only tiles whose width is a multiple of the head's can run it.
- The weight is one for each column. Where all heads share one, repeat it.
"""

N_MULTIPLE = 64


def reference(A, B, b, g):
    x = (A @ B.T + b).unflatten(-1, (-1, 64))
    o = x * (x.square().mean(-1, keepdim=True) + 1e-6).rsqrt()
    return {"O": o.flatten(-2) * g}
