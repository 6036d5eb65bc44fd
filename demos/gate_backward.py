"""The backward pass of a gate: one gradient in, the two of each column pair out.

dZ[m, 2n]     = G[m, n] · Z[m, 2n + 1] · silu'(Z[m, 2n])
dZ[m, 2n + 1] = G[m, n] · silu(Z[m, 2n]),   G = A Bᵀ,   z[m] = (1 / N) Σᵢ dZ[m, i] · Z[m, i]

A (M, K) is the gradient of the layer's result and B (N, K) the down projection's weight,
transposed; Z (M, 2N) the saved pre-activation, gates and ups alternating; all bfloat16. dZ (M, 2N)
bfloat16; z (M,) float32, the row statistic that the backward pass of a norm before needs; O (M, N)
bfloat16, the gated activation again.
"""

from coda_agent.primitives import (
    RowMean,
    Tile,
    WideTile,
    derivative,
    epilogue,
    interleave,
    pairs,
    swiglu,
)


@epilogue(dZ=WideTile, z=RowMean, O=Tile)
def gate_backward(acc, Z: WideTile):
    """dZ = gradients of the gate and up columns; z = row means of dZ · Z; O = silu(gate) ⊙ up."""
    gate, up = pairs(Z)
    d_gate = acc * derivative(swiglu, gate, up, wrt=0)
    d_up = acc * derivative(swiglu, gate, up, wrt=1)
    z = gate * d_gate + up * d_up
    return {"dZ": interleave(d_gate, d_up), "z": z, "O": swiglu(gate, up)}


# --- end of program ---

WHY = """
- The forward pass narrows N columns to N/2; the backward pass widens. `pairs` of a `WideTile` gives
  two values of full width, beside the accumulator's own, and `interleave` of two such the output.
- Both numbers of a pair travel as one 32-bit word, in the registers of the element they belong to:
  nothing moves between threads.
- O costs its M·N elements written, and saves the forward pass from keeping it.
- z is folded in fp32, before dZ is rounded; a row has N elements to the mean, each of two products.
- Worse: G stored, and a second kernel that reads it with Z and writes dZ: 4·M·N bytes more.
"""


def reference(A, B, Z):
    import torch
    from torch.nn.functional import silu

    x = Z.detach().requires_grad_()
    gated = silu(x[:, 0::2]) * x[:, 1::2]
    gradient = torch.autograd.grad(gated, x, A @ B.T)[0]
    pairs = (gradient * Z).unflatten(1, (-1, 2)).sum(-1)
    return {"dZ": gradient, "z": pairs.mean(-1), "O": gated.detach()}
