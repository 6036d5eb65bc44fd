"""Residual connection with dropout, whose random numbers follow from seed, offset and place.

O = C + A Bᵀ ⊙ keep / 0.9,   keep[m, n] = u[m, n] ≥ 0.1,   u of Philox4x32-10 with key (seed, 0)

A (M, K), B (N, K), C (M, N) bfloat16, seed and offset whole numbers below 2²⁴; O (M, N) bfloat16.
"""

from coda_agent.primitives import Scalar, Tile, dropout, epilogue, philox_uniform


@epilogue(O=Tile)
def dropped_residual(acc, C: Tile, seed: Scalar, offset: Scalar):
    """O = C + dropout of A Bᵀ with probability 0.1."""
    return {"O": C + dropout(acc, 0.1, seed, offset)}


@epilogue(U=Tile)
def noisy(acc, seed: Scalar, offset: Scalar):
    """U = A Bᵀ + u, uniform noise in [0, 1)."""
    return {"U": acc + philox_uniform(acc, seed, offset)}


# --- end of program ---

WHY = """
- A counter-based generator has no state: the number of an element follows from the seed, the offset
  and its place. No tile, launch or order changes it, and no mask is stored.
- The backward pass draws the same numbers: dropout(acc, p, seed, offset) of the gradient.
- A training step changes the offset, the run chooses the seed. Both may be in device memory, so a
  CUDA graph replays with new ones.
- The numbers are not those of torch.nn.functional.dropout, whose order follows its launch.
"""

INPUTS = {"seed": 12345, "offset": 678}


def reference(A, B, C, seed, offset):
    from coda_agent.primitives.placed import philox

    d = A @ B.T
    u = philox(seed, offset, *d.shape, device=d.device)
    return {"O": C + d * (u >= 0.1) / 0.9, "U": d + u}
