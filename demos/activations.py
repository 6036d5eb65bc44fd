"""Activations of the vocabulary, one program each, on a linear layer with bias.

O[m, n] = act(Σₖ A[m, k] B[n, k] + b[n])

A (M, K) and B (N, K) bfloat16, b (N,) float32; each O (M, N) bfloat16.
"""

from coda_agent.primitives import (
    RowVector,
    Tile,
    clamp,
    epilogue,
    gelu_erf,
    hard_swish,
    leaky_relu,
    relu,
    relu_squared,
    sigmoid,
    softplus,
)


@epilogue(O_relu=Tile)
def bias_relu(acc, b: RowVector):
    return {"O_relu": relu(acc + b)}


@epilogue(O_leaky=Tile)
def bias_leaky_relu(acc, b: RowVector):
    return {"O_leaky": leaky_relu(acc + b, 0.1)}


@epilogue(O_squared=Tile)
def bias_relu_squared(acc, b: RowVector):
    return {"O_squared": relu_squared(acc + b)}


@epilogue(O_clamp=Tile)
def bias_clamp(acc, b: RowVector):
    return {"O_clamp": clamp(acc + b, -1.0, 1.0)}


@epilogue(O_hard_swish=Tile)
def bias_hard_swish(acc, b: RowVector):
    return {"O_hard_swish": hard_swish(acc + b)}


@epilogue(O_sigmoid=Tile)
def bias_sigmoid(acc, b: RowVector):
    return {"O_sigmoid": sigmoid(acc + b)}


@epilogue(O_softplus=Tile)
def bias_softplus(acc, b: RowVector):
    return {"O_softplus": softplus(acc + b)}


@epilogue(O_gelu=Tile)
def bias_gelu_erf(acc, b: RowVector):
    return {"O_gelu": gelu_erf(acc + b)}


# --- end of program ---

WHY = """
- The first five are maxima, minima and multiplications, which cost next to nothing beside the
  store.
- `sigmoid` and `softplus` take transcendentals; `gelu_erf` is a polynomial of some ten operations.
- `relu`, `clamp` and `leaky_relu` keep NaN, as torch does, so a fault upstream stays visible.
- There is no branching on a value: write a piecewise function with `maximum`, `minimum` and
  `clamp`.
"""


def reference(A, B, b):
    import torch.nn.functional as F

    x = A @ B.T + b
    return {
        "O_relu": F.relu(x),
        "O_leaky": F.leaky_relu(x, 0.1),
        "O_squared": F.relu(x).square(),
        "O_clamp": x.clamp(-1.0, 1.0),
        "O_hard_swish": F.hardswish(x),
        "O_sigmoid": x.sigmoid(),
        "O_softplus": F.softplus(x),
        "O_gelu": F.gelu(x),
    }
