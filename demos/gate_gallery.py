"""Every gate of the vocabulary, with biases: SwiGLU, GeGLU, ReGLU, GLU, and that of gpt-oss.

O[m, j] = act(X[m, 2j] + b[2j]) · (X[m, 2j + 1] + b[2j + 1]),   X = A Bᵀ

A (M, K) and B (N, K) bfloat16, N even, b (N,) float32; O (M, N/2) bfloat16. act is silu, gelu_tanh,
relu or σ, one program each. gpt-oss limits the gate g to at most 7 and u to [-7, 7], and computes
g · σ(1.702 g) · (u + 1).
"""

from coda_agent.primitives import (
    HalfTile,
    RowVector,
    epilogue,
    geglu,
    glu,
    pairs,
    reglu,
    swiglu,
    swiglu_oai,
)


@epilogue(O_swiglu=HalfTile)
def bias_swiglu(acc, b: RowVector):
    gate, up = pairs(acc + b)
    return {"O_swiglu": swiglu(gate, up)}


@epilogue(O_geglu=HalfTile)
def bias_geglu(acc, b: RowVector):
    gate, up = pairs(acc + b)
    return {"O_geglu": geglu(gate, up)}


@epilogue(O_reglu=HalfTile)
def bias_reglu(acc, b: RowVector):
    gate, up = pairs(acc + b)
    return {"O_reglu": reglu(gate, up)}


@epilogue(O_glu=HalfTile)
def bias_glu(acc, b: RowVector):
    gate, up = pairs(acc + b)
    return {"O_glu": glu(gate, up)}


@epilogue(O_oai=HalfTile)
def bias_swiglu_oai(acc, b: RowVector):
    gate, up = pairs(acc + b)
    return {"O_oai": swiglu_oai(gate, up, 1.702, 7.0)}


# --- end of program ---

INPUTS = {"b": {"scale": 3.0}}

WHY = """
- The bias is added at full width and the sum taken apart: `pairs(acc + b)` is one addition a
  column.
- Taking b apart first is the same arithmetic with more to read.
- Full-width and half-width values never mix: `gate + b` is refused, since b has N columns and the
  gate N/2.
- Cost rises from ReGLU (one maximum), over GLU and SwiGLU (one exponential and one reciprocal), to
  GeGLU.
- The limits of gpt-oss's gate are numbers of the program: another limit is another kernel.
"""


def reference(A, B, b):
    from torch.nn.functional import gelu, relu, silu

    x = A @ B.T + b
    g, u = x[:, 0::2], x[:, 1::2]
    limited = g.clamp(max=7.0)
    return {
        "O_swiglu": silu(g) * u,
        "O_geglu": gelu(g, approximate="tanh") * u,
        "O_reglu": relu(g) * u,
        "O_glu": g.sigmoid() * u,
        "O_oai": limited * (1.702 * limited).sigmoid() * (u.clamp(-7.0, 7.0) + 1),
    }
