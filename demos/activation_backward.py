"""The backward pass of an activation behind the GEMM that makes its output's gradient.

dX[m, n] = (A Bᵀ)[m, n] · act'(X[m, n]),   s[n] = Σₘ dX[m, n]

A (M, K) is the gradient behind the next layer and B (N, K) that layer's weight, transposed; X
(M, N) the saved pre-activation; all bfloat16. dX (M, N) bfloat16, s (N,) float32: the gradient of
the bias. `silu_again` also writes O = silu(X) (M, N) bfloat16, recomputed rather than saved.
"""

from coda_agent.primitives import ColSum, Tile, derivative, epilogue, gelu_tanh, relu_squared, silu


@epilogue(dX_gelu=Tile, s_gelu=ColSum)
def gelu_backward(acc, X: Tile):
    d = acc * derivative(gelu_tanh, X)
    return {"dX_gelu": d, "s_gelu": d}


@epilogue(dX_squared=Tile)
def relu_squared_backward(acc, X: Tile):
    return {"dX_squared": acc * derivative(relu_squared, X)}


@epilogue(dX_silu=Tile, O_silu=Tile)
def silu_again(acc, X: Tile):
    return {"dX_silu": acc * derivative(silu, X), "O_silu": silu(X)}


# --- end of program ---

INPUTS = {"X": {"scale": 2.0}}

WHY = """
- `derivative` takes the function itself and applies the chain rule: nothing to derive by hand, and
  nothing to get wrong.
- What the function and its derivative have in common is computed once: `silu_again` has one σ(X).
- Of a function of two arguments, `wrt` names the one: `derivative(swiglu, gate, up, wrt=1)`.
- The bias gradient comes from d in fp32, before dX is rounded.
- Worse: storing act'(X) in the forward pass, M·N elements more written and as many read as X.
"""


def reference(A, B, X):
    import torch
    from torch.nn.functional import gelu, relu, silu

    x = X.detach().requires_grad_()
    g = A @ B.T
    gelu_, silu_ = (torch.autograd.grad(o, x, g)[0] for o in (gelu(x, approximate="tanh"), silu(x)))
    squared = 2 * relu(X) * g  # autograd's mask makes 0 of a NaN in g
    return {
        "dX_gelu": gelu_,
        "s_gelu": gelu_.sum(0),
        "dX_squared": squared,
        "dX_silu": silu_,
        "O_silu": silu(X),
    }
