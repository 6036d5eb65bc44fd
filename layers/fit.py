"""Whether a model's modules are what the kernels compute, which is tried on numbers."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from coda_agent.generated.sharded import distributed
from coda_agent.layers.passes import ACTIVATIONS

TYPES = torch.bfloat16, torch.float16
_PARTS = {"self_attn", "mlp", "input_layernorm", "post_attention_layernorm"}
_SANDWICH = _PARTS | {"pre_feedforward_layernorm", "post_feedforward_layernorm"}


def unfit(layer: Any, after: nn.Module | None, types: tuple[torch.dtype, ...] = TYPES) -> str:
    """Why a layer stays as it is; empty where it need not. `types` are what its weights may be."""
    parts = {name for name, _ in layer.named_children()}
    if parts not in (_PARTS, _SANDWICH):
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
        if linear.weight.dtype not in types:
            expected = " or ".join(str(kind).removeprefix("torch.") for kind in types)
            return f"{name} is {linear.weight.dtype}, expected {expected}"
        if any(extent % 16 for extent in linear.weight.shape):
            return f"{name} is {tuple(linear.weight.shape)}, expected multiples of 16"
    for name, part in (*linears.items(), *layer.named_children()):
        if name != "self_attn" and (part._forward_hooks or part._forward_pre_hooks):
            return f"{name} has forward hooks, as of tensor parallelism; kernels would skip them"
    if any(linears[n].bias is not None for n in ("gate_proj", "up_proj", "down_proj")):
        return "the MLP has biases"
    if len({linears[n].bias is None for n in ("q_proj", "k_proj", "v_proj")}) > 1:
        return "only some of query, key and value have biases"
    if not activation(block):
        return f"its activation is {type(block.act_fn).__name__}, expected SiLU, GELU or ReLU"
    attended = (getattr(attention, name, None) for name in ("q_norm", "k_norm"))
    norms = [getattr(layer, name) for name in sorted(parts) if name.endswith("norm")]
    offsets = {norm_offset(norm) for norm in (*norms, after)}
    for norm in (*norms, after):
        if norm_offset(norm) is None:
            return f"{type(norm).__name__} is no RMSNorm with a plain weight"
    offsets |= {norm_offset(norm) for norm in attended if norm is not None} - {None}
    if len(offsets) > 1:
        return "only some of its norms add one to their weights"
    if offsets == {1.0} and parts == _PARTS:
        return "its norms add one to their weights, which is done for Gemma 3's structure alone"
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
    # fully_shard derives a class from its own and the module's, in this order.
    kind = type(head).__bases__[-1] if fsdp((head,)) else type(head)
    if head is None or kind is not nn.Linear or head.bias is not None:
        return f"it is {kind.__name__}, expected nn.Linear without a bias"
    if head.weight.dtype not in TYPES or any(extent % 16 for extent in head.weight.shape):
        shape = tuple(head.weight.shape)
        return f"it is {shape} {head.weight.dtype}, expected 16 bits and multiples of 16"
    loss = getattr(getattr(model, "loss_function", None), "__name__", "")
    if loss != "ForCausalLMLoss":
        return "the model's loss is not transformers' ForCausalLMLoss"
    if getattr(getattr(model, "config", None), "final_logit_softcapping", None):
        return "its logits are capped"
    plain = norm_offset(norm) is not None
    return "" if plain else "the final norm is no RMSNorm with a plain weight"


def eps(norm: Any) -> float:
    """A norm's eps. Where `nn.RMSNorm` has None, it takes float32's for types of 16 bits."""
    found = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return torch.finfo(torch.float32).eps if found is None else found


def gamma(norm: Any, offset: float) -> Tensor:
    """What an RMSNorm multiplies by. One more than a weight has more digits than 16 bits hold: it
    is float32."""
    return norm.weight if offset == 0 else norm.weight.float() + offset


@torch.no_grad()
def norm_offset(norm: Any) -> float | None:
    """0 where a module is x · rsqrt(mean x² + eps) · weight, 1 where it multiplies by 1 + weight,
    as Gemma's; None where it is neither. It is tried on numbers."""
    weight = getattr(norm, "weight", None)
    if weight is None or weight.dtype not in TYPES:
        return None
    x = torch.linspace(-2, 3, 3 * len(weight), device=weight.device).to(weight).view(3, -1)
    wide, found = x.float(), norm.forward(x).float()  # past hooks: one of FSDP's would take a root
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps(norm))
    fits = (
        o for o in (0.0, 1.0) if torch.allclose(found, wide * (weight + o), rtol=0.02, atol=1e-3)
    )
    return next(fits, None)


def fsdp(modules: Iterable[Any]) -> list[Any]:
    """Those of the modules whose parameters `fully_shard` has taken."""
    known = sys.modules.get("torch.distributed.fsdp")
    return [m for m in modules if known is not None and isinstance(m, known.FSDPModule)]


@contextmanager
def gathered(*modules: Any) -> Iterator[None]:
    """FSDP's modules among these with whole weights, in the type that a forward pass has them in.
    All ranks come here together."""
    found = fsdp(modules)
    for module in found:
        module.unshard()
    try:
        yield
    finally:
        for module in found:
            module.reshard()


def check_whole(owner: str, module: Any) -> None:
    """Refuse a module of which a parameter is a DTensor where it runs.

    Args:
        owner: Its name.

    Raises:
        TypeError: one is.
    """
    for name, p in module.named_parameters():
        if distributed((p,)):
            raise TypeError(
                f"{owner}.{name} is a DTensor of {p.placements}, and the kernels take whole "
                "weights; leave a tensor-parallel model to PyTorch (report.revert(), if it is "
                "patched), and with FSDP2 call fully_shard on whole decoder layers, not on parts"
            )
