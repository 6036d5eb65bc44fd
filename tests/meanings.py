"""What functions of the vocabulary and the paper's specs compute, written once more and on its own:
torch's own functions, and plain formulas in float64."""

from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.nn.functional as F


def wide(values: Mapping[str, Any]) -> dict[str, Any]:
    """The values with floating-point tensors in float64."""
    floats = {k for k, v in values.items() if isinstance(v, torch.Tensor) and v.is_floating_point()}
    return {k: v.double() if k in floats else v for k, v in values.items()}


def oai(g: torch.Tensor, u: torch.Tensor) -> torch.Tensor:
    g = g.clamp(max=7.0)
    return g * torch.sigmoid(1.702 * g) * (u.clamp(-7.0, 7.0) + 1)


def quick(x: torch.Tensor) -> torch.Tensor:
    return x * torch.sigmoid(1.702 * x)


def tanh_gelu(x: torch.Tensor) -> torch.Tensor:
    return F.gelu(x, approximate="tanh")


UNARY: dict[str, Callable[..., torch.Tensor]] = {
    "absolute": torch.abs,
    "acos": torch.acos,
    "acosh": torch.acosh,
    "asin": torch.asin,
    "asinh": torch.asinh,
    "atan": torch.atan,
    "atanh": torch.atanh,
    "cos": torch.cos,
    "cosh": torch.cosh,
    "erfc": torch.erfc,
    "expm1": torch.expm1,
    "floor": torch.floor,
    "erf": torch.erf,
    "exp": torch.exp,
    "exp2": torch.exp2,
    "gelu_erf": F.gelu,
    "gelu_tanh": tanh_gelu,
    "hard_swish": F.hardswish,
    "leaky_relu": F.leaky_relu,
    "log": torch.log,
    "log1p": torch.log1p,
    "log2": torch.log2,
    "mish": F.mish,
    "quick_gelu": quick,
    "relu": F.relu,
    "relu_squared": lambda x: F.relu(x).square(),
    "round_even": torch.round,
    "rsqrt": torch.rsqrt,
    "sigmoid": torch.sigmoid,
    "silu": F.silu,
    "sin": torch.sin,
    "sinh": torch.sinh,
    "softplus": F.softplus,
    "sqrt": torch.sqrt,
    "step": lambda x: (x > 0).to(x.dtype) + 0 * x,
    "tan": torch.tan,
    "tanh": torch.tanh,
    "trunc": torch.trunc,
    "wrapped": lambda x: x,
}
"""Every public elementwise function of one argument, in torch."""
BINARY: dict[str, Callable[..., torch.Tensor]] = {
    "atan2": torch.atan2,
    "copysign": torch.copysign,
    "equal": lambda x, y: (x == y).to(x.dtype) + 0 * (x + y),
    "fmod": torch.fmod,
    "geglu": lambda g, u: tanh_gelu(g) * u,
    "glu": lambda g, u: torch.sigmoid(g) * u,
    "greater": lambda x, y: (x > y).to(x.dtype) + 0 * (x + y),
    "greater_equal": lambda x, y: (x >= y).to(x.dtype) + 0 * (x + y),
    "maximum": torch.maximum,
    "minimum": torch.minimum,
    "power": torch.pow,
    "reglu": lambda g, u: F.relu(g) * u,
    "swiglu": lambda g, u: F.silu(g) * u,
    "swiglu_oai": oai,
}
"""Likewise of two."""
# Away from kinks, where a derivative is a matter of convention.
GRID = torch.linspace(-9.013, 9.013, 2000, dtype=torch.float64)
_UNIT: Callable[[torch.Tensor], torch.Tensor] = lambda x: x / 10
_DOMAINS: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    **dict.fromkeys(("log", "log2", "power", "rsqrt", "sqrt"), torch.abs),
    **dict.fromkeys(("acos", "asin", "atanh"), _UNIT),
    "acosh": lambda x: x.abs() + 1,
    "log1p": lambda x: x.abs() - 0.5,
}


def domain(name: str) -> torch.Tensor:
    """The first argument of a function: the grid, or where that is defined."""
    return _DOMAINS.get(name, torch.clone)(GRID)


def _bias_act(v: dict[str, Any], b: dict[str, str]) -> dict[str, torch.Tensor]:
    bias = v["bias"].view(-1, 1) if b["bias_per"] == "row" else v["bias"]
    x = v["alpha"] * (v["A"] @ v["B"].T) + v["beta"] * v["C"] + bias
    inner = (2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3)
    return {
        "O": {
            "relu": x.clamp(min=0),
            "silu": x / (1 + torch.exp(-x)),
            "gelu_tanh": x / 2 * (1 + torch.tanh(inner)),
        }[b["activation"]]
    }


def _gated(d: torch.Tensor) -> torch.Tensor:
    gate, up = d.reshape(d.shape[0], -1, 2).unbind(-1)
    return gate / (1 + torch.exp(-gate)) * up


def _swiglu(d: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"D": d, "O": _gated(d)}


def _swiglu_backward(v: dict[str, Any], _: dict[str, str]) -> dict[str, torch.Tensor]:
    wide = v["Z"].requires_grad_()
    out = _gated(wide)
    (slope,) = torch.autograd.grad(out, wide, v["A"] @ v["B"].T)
    with torch.no_grad():
        return {"dZ": slope, "z": (slope * wide).sum(-1) / out.shape[-1], "O": out}


def _norm_backward(v: dict[str, Any], _: dict[str, str]) -> dict[str, torch.Tensor]:
    d, r = v["A"] @ v["B"].T, torch.diag(v["r"])
    c = r @ v["C"]
    change = r @ (d @ torch.diag(v["gamma"]) - torch.diag(v["z"]) @ c)
    return {"O": change + v["X"], "C_out": c * v["gamma"], "dgamma": torch.diag(d.T @ c)}


def _row_wise(v: dict[str, Any]) -> torch.Tensor:
    return (v["A"] * v["scale_a"].view(-1, 1)) @ (v["B"] * v["scale_b"].view(-1, 1)).T


def _normed(v: dict[str, Any]) -> torch.Tensor:
    return v["r"].view(-1, 1) * ((v["A"] * v["scale_a"]) @ (v["B"] * v["scale_b"]).T)


def _quantised(x: torch.Tensor, scale: Any) -> dict[str, torch.Tensor]:
    return {
        "O": torch.minimum(torch.tensor(448.0), (x * scale)).clamp(min=-448.0),
        "amax": torch.stack([row.abs().max() for row in x]),
    }


def _with_statistic(v: dict[str, Any], d: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"D": d, "O": d * v["gamma"], "s": (d * d).sum(-1) / d.shape[-1]}


def _rope(d: torch.Tensor, cs: torch.Tensor) -> dict[str, torch.Tensor]:
    # Turning (x, y) by -angle is a product with cos - i·sin.
    turned = torch.view_as_complex(d.unflatten(-1, (-1, 2)).contiguous())
    table = torch.view_as_complex(cs.unflatten(-1, (-1, 2)).contiguous()).conj()
    return {"D": d, "O": torch.view_as_real(turned * table).flatten(-2)}


def _entropy(z: torch.Tensor, y: torch.Tensor) -> dict[str, torch.Tensor]:
    chosen = torch.stack([row[i] for row, i in zip(z, y.tolist(), strict=True)])
    return {"Z": z, "z_tgt": chosen, "lse": z.exp().sum(-1).log()}


EXPECTED: dict[str, Callable[[dict[str, Any], dict[str, str]], dict[str, torch.Tensor]]] = {
    "gemm_bias_act": _bias_act,
    "gemm_fp8_residual_partial_rmsnorm": lambda v, _: _with_statistic(v, _row_wise(v) + v["C"]),
    "gemm_fp8_rmsnorm": lambda v, _: {"O": _normed(v)},
    "gemm_fp8_rmsnorm_rope": lambda v, _: _rope(_normed(v), v["cs"]),
    "gemm_fp8_rmsnorm_swiglu": lambda v, _: _swiglu(_normed(v)),
    "gemm_fp8_rmsnorm_swiglu_quantised": lambda v, _: _quantised(_gated(_normed(v)), v["scale_o"].view(-1, 1)),
    "gemm_fp8_swiglu": lambda v, _: _swiglu(_row_wise(v)),
    "gemm_fp8_swiglu_quantised": lambda v, _: _quantised(_gated(_row_wise(v)), v["scale_o"]),
    "gemm_partial_cross_entropy": lambda v, _: _entropy(v["A"] @ v["B"].T, v["y"]),
    "gemm_partial_swiglu_bwd": _swiglu_backward,
    "gemm_residual_partial_rmsnorm": lambda v, _: _with_statistic(v, v["A"] @ v["B"].T + v["C"]),
    "gemm_residual_partial_rmsnorm_bwd": _norm_backward,
    "gemm_rmsnorm": lambda v, _: {"O": v["r"].view(-1, 1) * (v["A"] @ v["B"].T)},
    "gemm_rmsnorm_partial_cross_entropy": lambda v, _: _entropy(v["r"].view(-1, 1) * (v["A"] @ v["B"].T), v["y"]),
    "gemm_rmsnorm_rope": lambda v, _: _rope(v["r"].view(-1, 1) * (v["A"] @ v["B"].T), v["cs"]),
    "gemm_rmsnorm_swiglu": lambda v, _: _swiglu(v["r"].view(-1, 1) * (v["A"] @ v["B"].T)),
    "gemm_rope": lambda v, _: _rope(v["A"] @ v["B"].T, v["cs"]),
    "gemm_swiglu": lambda v, _: _swiglu(v["A"] @ v["B"].T),
}  # fmt: skip
"""By spec: its outputs, of its inputs in float64 and the values of its parameters."""
