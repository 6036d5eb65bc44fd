"""An operation of one's own: a root of both signs, with one PTX instruction.

O[m, n] = sign(x) · √|x|, x = gain · Σₖ A[m, k] B[n, k]

A (M, K) and B (N, K) bfloat16, gain a number above 0; O (M, N) bfloat16.
"""

from coda_agent.primitives import Scalar, Tile, absolute, epilogue, ptx, sqrt


@epilogue(O=Tile)
def own_instruction(acc, gain: Scalar):
    """O = sign(x) · √|x| with x = gain · A Bᵀ."""
    x = gain * acc
    return {"O": ptx("copysign", "copysign.f32 $0, $2, $1;", sqrt(absolute(x)), x)}


# --- end of program ---

WHY = """
- `ptx` names a function of torch, which is what the operation means, and gives its instructions:
  `$0` is the result, `$1` and `$2` the arguments in torch's order. PTX's copysign takes the sign
  first.
- The instructions are compared with torch's function on all of float32, without a GPU too: small,
  huge and negative arguments count, whatever the kernel will see.
- Reach for it last. A composition of the vocabulary has a derivative.
"""


def reference(A, B, gain):
    x = gain * (A @ B.T)
    return {"O": x.abs().sqrt().copysign(x)}
