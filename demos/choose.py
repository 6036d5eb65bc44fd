"""A choice between two values: ELU of the products that a mask keeps, and 0 elsewhere.

z = Σₖ A[m, k] B[n, k];  O[m, n] = ELU(z) where C[m, n] > 0, else 0

A (M, K) and B (N, K), C (M, N) bfloat16; O (M, N) bfloat16.
"""

from coda_agent.primitives import Tile, epilogue, expm1, greater, where


@epilogue(O=Tile)
def choose(acc, C: Tile):
    """O = ELU(A Bᵀ) where C > 0, else 0."""
    elu = where(greater(acc, 0.0), acc, expm1(acc))
    return {"O": where(greater(C, 0.0), elu, 0.0)}


# --- end of program ---

WHY = """
- A comparison gives 1 or 0, so products of conditions are "and", and `1 - c` is "not".
- Both values are computed, and one is taken. What is not taken may be infinite: eᶻ - 1 of a large z
  here. `greater(acc, 0.0) * acc` would give NaN of an infinite z.
- `exp(acc) - 1.0` has few digits left near 0, and a program whose result loses them is refused;
  `expm1` keeps them.
"""


def reference(A, B, C):
    from torch.nn.functional import elu

    return {"O": elu(A @ B.T).masked_fill(~(C > 0), 0.0)}
