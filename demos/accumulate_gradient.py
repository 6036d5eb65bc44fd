"""The gradient of a weight, added in place to what earlier micro-batches left.

dW ← dW + alpha · A Bᵀ

A (M, K) is the gradient of a layer's result, transposed, and B (N, K) its input, transposed, K
being the tokens; both bfloat16. alpha is a number; dW (M, N) bfloat16.
"""

from coda_agent.primitives import AddTile, Scalar, epilogue


@epilogue(dW=AddTile)
def accumulate_gradient(acc, alpha: Scalar):
    """dW gains alpha · A Bᵀ."""
    return {"dW": alpha * acc}


# --- end of program ---

WHY = """
- The value returned is what is added. The old dW is never loaded: the store itself adds, and spends
  no registers on it.
- A call takes dW by its output's name, among the operands, and writes into it.
- What is added is rounded to dW's type before the sum, and the sum once more: in 16 bits twice.
  Many micro-batches want a float32 dW.
- alpha, such as one over a loss scale, is read at run time: another one compiles nothing.
- Worse: a `Tile` operand C and `"dW": C + alpha * acc`. It rounds once, but loads dW through shared
  memory, and writes the sum elsewhere.
"""


def reference(A, B, alpha, dW):
    return {"dW": dW + alpha * (A @ B.T)}
