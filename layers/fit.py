"""Whether a model's modules are what the kernels compute, which is tried on numbers."""

from __future__ import annotations

from typing import Any

import torch
from torch import nn

from coda_agent.layers.passes import ACTIVATIONS

_TYPES = torch.bfloat16, torch.float16
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}


def unfit(layer: Any, after: nn.Module | None) -> str:
    """Why a layer stays as it is; empty where it need not."""
    if {name for name, _ in layer.named_children()} != _PARTS:
        return f"its parts are not {', '.join(sorted(_PARTS))}"
    block, attention = layer.mlp, layer.self_attn
    linears: dict[str, Any]
    linears = {n: getattr(block, n, None) for n in ("gate_proj", "up_proj", "down_proj")}
    linears |= {n: getattr(attention, n, None) for n in ("q_proj", "k_proj", "v_proj", "o_proj")}
    for name, linear in linears.items():
        if type(linear) is not nn.Linear:
            return f"{name} is {type(linear).__name__}, expected nn.Linear"
        if "forward" in linear.__dict__:
            return f"{name} has been patched already"
        if linear.weight.dtype not in _TYPES:
            return f"{name} is {linear.weight.dtype}, expected bfloat16 or float16"
        if any(extent % 16 for extent in linear.weight.shape):
            return f"{name} is {tuple(linear.weight.shape)}, expected multiples of 16"
    if any(linears[n].bias is not None for n in ("gate_proj", "up_proj", "down_proj")):
        return "the MLP has biases"
    if len({linears[n].bias is None for n in ("q_proj", "k_proj", "v_proj")}) > 1:
        return "only some of query, key and value have biases"
    if not activation(block):
        return f"its activation is {type(block.act_fn).__name__}, expected SiLU, GELU or ReLU"
    for norm in (layer.input_layernorm, layer.post_attention_layernorm, after):
        if not is_rms_norm(norm):
            return f"{type(norm).__name__} is no RMSNorm with a plain weight"
    return ""


def activation(block: Any) -> str:
    """The name of an MLP's activation, by its values; empty where there is none."""
    probe = torch.linspace(-3, 3, 16, device=block.up_proj.weight.device)
    found = (
        n for n, (f, _) in ACTIVATIONS.items() if torch.allclose(block.act_fn(probe), f(probe))
    )
    return next(found, "")


def unfit_head(model: nn.Module, norm: nn.Module) -> str:
    head = getattr(model, "lm_head", None)
    if "forward" in vars(norm):
        return "the final norm has been patched already"
    if type(head) is not nn.Linear or head.bias is not None:
        return f"it is {type(head).__name__}, expected nn.Linear without a bias"
    if head.weight.dtype not in _TYPES or any(extent % 16 for extent in head.weight.shape):
        shape = tuple(head.weight.shape)
        return f"it is {shape} {head.weight.dtype}, expected 16 bits and multiples of 16"
    loss = getattr(getattr(model, "loss_function", None), "__name__", "")
    if loss != "ForCausalLMLoss":
        return "the model's loss is not transformers' ForCausalLMLoss"
    return "" if is_rms_norm(norm) else "the final norm is no RMSNorm with a plain weight"


def eps(norm: Any) -> float:
    return getattr(norm, "variance_epsilon", None) or getattr(norm, "eps", None) or 0.0


@torch.no_grad()
def is_rms_norm(norm: Any) -> bool:
    """Whether a module is x · rsqrt(mean x² + eps) · weight: tried on numbers."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dtype not in _TYPES:
        return False
    x = torch.linspace(-2, 3, 3 * len(weight), device=weight.device).to(weight).view(3, -1)
    wide = x.float()
    expected = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps(norm)) * weight
    return torch.allclose(norm(x).float(), expected, rtol=0.02, atol=1e-3)
