"""Where a model has what the kernels may replace; `proof` then shows whether it is that."""

from __future__ import annotations

import sys
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from coda_agent.layers.passes import ACTIVATIONS
from coda_agent.runtime.function import exact
from coda_agent.runtime.sharded import distributed

TYPES = torch.bfloat16, torch.float16
QKV, MLP = ("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj", "down_proj")
NORMS = "input_layernorm", "post_attention_layernorm"
SANDWICH = *NORMS, "pre_feedforward_layernorm", "post_feedforward_layernorm"


@dataclass(frozen=True)
class Form:
    """How the kernels write a decoder layer down.

    Attributes:
        activation: Of its gate, one of `passes.ACTIVATIONS`.
        offset: What its norms add to their weights: 0, or 1 as Gemma's.
        rotates: Whether kernels rotate query and key, and apply norms of heads before that; else
            the model's own code does.
        sandwich: Whether norms lie behind attention and the MLP, too.
    """

    activation: str
    offset: float
    rotates: bool
    sandwich: bool


def linears(layer: Any) -> dict[str, Any]:
    """Return a decoder layer's linears by their names in attention and MLP; None of absent ones."""
    names = {name: layer.self_attn for name in (*QKV, "o_proj")} | dict.fromkeys(MLP, layer.mlp)
    return {name: getattr(owner, name, None) for name, owner in names.items()}


def norms(layer: Any) -> dict[str, Any]:
    """Return a decoder layer's norms of the stream, by name."""
    return {name: getattr(layer, name) for name in SANDWICH if hasattr(layer, name)}


def misfit(layer: Any, types: tuple[torch.dtype, ...] = TYPES) -> str:
    """Say why a decoder layer has not the parts that kernels replace; "" if it has.

    Args:
        layer: The layer.
        types: What its weights may be.
    """
    parts = {name for name, _ in layer.named_children()}
    if parts not in ({"self_attn", "mlp", *NORMS}, {"self_attn", "mlp", *SANDWICH}):
        return f"its parts are not self_attn, mlp, {', '.join(NORMS)}"
    if why := altered("the layer", layer, fsdp_hooks=True):
        return why
    for name, linear in linears(layer).items():
        if linear is None:
            return f"it has no {name}"
        if type(linear) is not nn.Linear:
            return f"{name} is {named(linear)}, not a plain nn.Linear"
        if why := altered(name, linear):
            return why
        if linear.weight.is_meta:
            return f"{name}'s weight is offloaded"
        if linear.weight.dtype not in types:
            expected = " or ".join(str(kind).removeprefix("torch.") for kind in types)
            return f"{name} is {linear.weight.dtype}, expected {expected}"
        if any(extent % 16 for extent in linear.weight.shape):
            return f"{name} is {tuple(linear.weight.shape)}, expected multiples of 16"
    for name, part in (*norms(layer).items(), ("mlp", layer.mlp), ("self_attn", layer.self_attn)):
        if why := altered(name, part):
            return why
    if not isinstance(getattr(layer.self_attn, "head_dim", None), int):
        return "its attention has no head_dim"
    if any(linear.bias is not None for n, linear in linears(layer).items() if n in MLP):
        return "the MLP has biases"
    if len({linear.bias is None for n, linear in linears(layer).items() if n in QKV}) > 1:
        return "only some of query, key and value have biases"
    return ""


def misfit_head(model: Any, norm: Any) -> str:
    """Say why a head and its loss are not what kernels replace, by their parts; "" if they are."""
    head = getattr(model, "lm_head", None)
    # fully_shard derives a class from its own and the module's, in this order.
    kind = type(head).__bases__[-1] if fsdp((head,)) else type(head)
    if head is None or kind is not nn.Linear or head.bias is not None:
        return f"it is {named(head)}, not a plain nn.Linear without a bias"
    for name, module in (("lm_head", head), ("the final norm", norm), ("the model", model)):
        if why := altered(name, module, fsdp_hooks=True):
            return why
    if head.weight.is_meta:
        return "its weight is offloaded"
    if head.weight.dtype not in TYPES or any(extent % 16 for extent in head.weight.shape):
        shape = tuple(head.weight.shape)
        return f"it is {shape} {head.weight.dtype}, expected 16 bits and multiples of 16"
    if not callable(getattr(model, "loss_function", None)):
        return "the model has no loss_function of transformers' kind"
    return ""


def taken(x: Tensor) -> bool:
    """Return whether kernels take a tensor's type here."""
    return x.dtype in TYPES or exact.get()


def named(module: Any) -> str:
    """Name a module's class, and the package that it comes from where that is not torch."""
    kind = type(module)
    package = kind.__module__.partition(".")[0]
    return kind.__name__ if package in ("torch", "builtins") else f"{package}'s {kind.__name__}"


def altered(name: str, module: nn.Module, *, fsdp_hooks: bool = False) -> str:
    """Say what makes a module's call something else than its class's forward; "" if nothing does.

    Args:
        name: What the module is called in the sentence.
        module: The module.
        fsdp_hooks: Whether FSDP's own hooks may be there: they run around the forward.
    """
    forward = vars(module).get("forward")
    if forward is not None:
        if hasattr(module, "_coda_bound"):
            return f"{name} has been patched already"
        if hasattr(module, "_hf_hook"):
            return f"{name} is offloaded or placed on a device by accelerate"
        return f"{name} has another forward than its class's"
    if hook := next(foreign_hooks(module, fsdp_hooks=fsdp_hooks), None):
        return f"{name} has a hook ({hook}), which kernels would skip"
    return ""


def foreign_hooks(module: Any, *, fsdp_hooks: bool = False) -> Iterator[str]:
    """Yield names of hooks that a call of a module runs, but those that only look at results.

    Transformers' own hooks record outputs; a module that the kernels call still has them.
    """
    for hooks in (
        module._forward_hooks,
        module._forward_pre_hooks,
        module._backward_hooks,
        module._backward_pre_hooks,
    ):
        for hook in hooks.values():
            home = getattr(hook, "__module__", None) or type(hook).__module__
            if home.startswith("transformers.utils."):
                continue
            if fsdp_hooks and home.startswith("torch.distributed."):
                continue
            yield getattr(hook, "__qualname__", type(hook).__qualname__)


def form(layer: Any, after: Any, *, rotates: bool) -> Form | str:
    """Return the form of a layer whose parts fit, by its values on numbers; else why it has none.

    Args:
        layer: The layer; norms' weights away from 0 and 1 tell the forms apart.
        after: The norm behind it.
        rotates: Whether kernels are to rotate.
    """
    activation = activation_of(layer.mlp)
    if not activation:
        kind = type(getattr(layer.mlp, "act_fn", None)).__name__
        return f"its activation is {kind}, expected SiLU, GELU or ReLU"
    heads = [getattr(layer.self_attn, name, None) for name in ("q_norm", "k_norm")]
    offsets = {norm_offset(norm) for norm in (*norms(layer).values(), after)}
    for norm in (*norms(layer).values(), after):
        if norm_offset(norm) is None:
            return f"{named(norm)} is no RMSNorm with a plain weight"
    if rotates and heads != [None, None]:
        offsets |= {None if norm is None else norm_offset(norm) for norm in heads}
    if len(offsets) > 1:
        return "only some of its norms add one to their weights"
    sandwich = hasattr(layer, SANDWICH[-1])
    if offsets == {1.0} and not sandwich:
        return "its norms add one to their weights, which is done for Gemma 3's structure alone"
    return Form(activation, offsets.pop() or 0.0, rotates, sandwich)


def activation_of(block: Any) -> str:
    """Name an MLP's activation, by its values; "" where it is none that kernels have."""
    if not hasattr(block, "act_fn"):
        return ""
    x = torch.linspace(-3, 3, 16)
    y = block.act_fn(x)
    return next((n for n, (f, _) in ACTIVATIONS.items() if torch.allclose(y, f(x))), "")


def eps(norm: Any) -> float:
    """Return a norm's eps. Where `nn.RMSNorm` has None, it takes float32's for types of 16 bits."""
    value = getattr(norm, "variance_epsilon", getattr(norm, "eps", None))
    return torch.finfo(torch.float32).eps if value is None else value


def gamma(norm: Any, offset: float) -> Tensor:
    """Return what an RMSNorm multiplies by. One more than a weight has more digits than 16 bits
    hold: it is float32."""
    return norm.weight if offset == 0 else norm.weight.float() + offset


@torch.no_grad()
def norm_offset(norm: Any) -> float | None:
    """Return 0 of x · rsqrt(mean x² + eps) · weight, 1 of · (1 + weight), None of another module.

    It is tried on numbers.
    """
    weight = getattr(norm, "weight", None)
    if weight is None or weight.ndim != 1:
        return None
    x = torch.linspace(-2, 3, 3 * len(weight), device=weight.device).to(weight).view(3, -1)
    try:
        result = norm.forward(x)
    except Exception:  # a foreign module: a norm of another signature is no RMSNorm
        return None
    if not isinstance(result, Tensor) or result.shape != x.shape:
        return None
    wide = x.float() * torch.rsqrt(x.float().square().mean(-1, keepdim=True) + eps(norm))
    fits = (o for o in (0.0, 1.0) if torch.allclose(result.float(), wide * (weight + o), rtol=0.02))
    return next(fits, None)


def fsdp(modules: Iterable[Any]) -> list[Any]:
    """Return those of the modules whose parameters `fully_shard` has taken."""
    home = sys.modules.get("torch.distributed.fsdp")
    return [m for m in modules if home is not None and isinstance(m, home.FSDPModule)]


@contextmanager
def gathered(*modules: Any) -> Iterator[None]:
    """Give FSDP's modules among these whole weights, in the type that a forward pass has them in.

    All ranks come here together.
    """
    sharded = fsdp(modules)
    for module in sharded:
        module.unshard()
    try:
        yield
    finally:
        for module in sharded:
            module.reshard()


def check_whole(owner: str, module: Any) -> None:
    """Refuse a module of which a parameter is a DTensor where it runs.

    Args:
        owner: Its name.
        module: The module.

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
