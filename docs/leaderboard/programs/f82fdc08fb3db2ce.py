"""gemm_bias_act: Linear layer with a scaled addend, a bias per column or row, and an activation.

Composed from the PyTorch reference of the spec.
"""

from coda_agent.primitives import (
    ColVector,
    RowVector,
    Scalar,
    Tile,
    epilogue,
    gelu_tanh,
    relu,
    silu,
)


@epilogue(O=Tile)
def gemm_bias_act__gelu_tanh__column(acc, C: Tile, bias: RowVector, alpha: Scalar, beta: Scalar):
    """O = gelu_tanh(alpha · (A Bᵀ) + beta · C + bias)"""
    return {"O": gelu_tanh(alpha * acc + beta * C + bias)}


@epilogue(O=Tile)
def gemm_bias_act__gelu_tanh__row(acc, C: Tile, bias: ColVector, alpha: Scalar, beta: Scalar):
    """O = gelu_tanh(alpha · (A Bᵀ) + beta · C + bias)"""
    return {"O": gelu_tanh(alpha * acc + beta * C + bias)}


@epilogue(O=Tile)
def gemm_bias_act__relu__column(acc, C: Tile, bias: RowVector, alpha: Scalar, beta: Scalar):
    """O = relu(alpha · (A Bᵀ) + beta · C + bias)"""
    return {"O": relu(alpha * acc + beta * C + bias)}


@epilogue(O=Tile)
def gemm_bias_act__relu__row(acc, C: Tile, bias: ColVector, alpha: Scalar, beta: Scalar):
    """O = relu(alpha · (A Bᵀ) + beta · C + bias)"""
    return {"O": relu(alpha * acc + beta * C + bias)}


@epilogue(O=Tile)
def gemm_bias_act__silu__column(acc, C: Tile, bias: RowVector, alpha: Scalar, beta: Scalar):
    """O = silu(alpha · (A Bᵀ) + beta · C + bias)"""
    return {"O": silu(alpha * acc + beta * C + bias)}


@epilogue(O=Tile)
def gemm_bias_act__silu__row(acc, C: Tile, bias: ColVector, alpha: Scalar, beta: Scalar):
    """O = silu(alpha · (A Bᵀ) + beta · C + bias)"""
    return {"O": silu(alpha * acc + beta * C + bias)}
