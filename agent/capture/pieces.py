"""A Transformer's layer as PyTorch functions, attention left out.

One function reaches from attention's result to what the next layer's attention takes, so that each
norm stands behind the product that makes its input; another from the last MLP to the loss. What is
done to queries and keys by heads is a function of its own: the projections are one kernel, whose
columns have one epilogue. Weights are (out, in), as those of `nn.Linear`. The first layer's norm
and projections, which no product precedes, are PyTorch's.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from coda_agent.agent.capture.config import Layer

if TYPE_CHECKING:
    from torch import Tensor

STEPS = {"o": "output", "gate": "mlp", "up": "mlp", "down": "down", "head": "head"}
"""What the kernel of a projection is called; of others, "projections"."""
_FIXED = 1e-6
"""The epsilon of a conditioned norm before attention and at the end, whatever the configuration
says (diffusers' AdaLayerNormZero)."""


@dataclass(frozen=True)
class Piece:
    """A function of tensors, by name.

    Attributes:
        name: "layer" and "heads", which stand between two calls of attention, or "exit".
        function: Takes the layer and them.
        inputs: Their shapes, and their element types where that is not the model's.
    """

    name: str
    function: Callable[..., Any]
    inputs: Mapping[str, tuple[tuple[int, ...], str]]


def pieces(c: Layer, batch: int, positions: int) -> list[Piece]:
    """The functions of a model's layer, for `batch` samples of `positions` tokens each."""
    s, rows = c.sizes, (batch, positions)
    hidden = s["hidden"]
    widths = {"q": s["q"], "k": s["kv"], "v": s["kv"], "o": hidden, "up": s["mlp"]}
    widths |= {"gate": s["mlp"], "down": hidden, "head": s["vocabulary"]}
    inner = {"o": s["q"], "down": s["mlp"]}

    def declared(names: str) -> Iterator[tuple[str, tuple[tuple[int, ...], str]]]:
        for name in names.split():
            kind, _, of = name.partition("_")
            shape = {
                "w": (widths.get(of, 0), inner.get(of, hidden)), "b": (widths.get(of, 0),),
                "g": (s["head"] if of in "qk" else hidden,), "offset": (hidden,),
                "scale": (batch, hidden), "shift": (batch, hidden), "mix": (batch, hidden),
                "attended": (*rows, s["q"]), "residual": (*rows, hidden),
                "active": (*rows, s["mlp"]), "q": (*rows, s["q"]), "k": (*rows, s["kv"]),
                "cos": (positions, s["head"]), "sin": (positions, s["head"]), "target": rows,
            }[kind]  # fmt: skip
            yield name, (shape, "int64" if kind == "target" else "")

    def projection(*names: str) -> str:
        return " ".join(f"w_{n}" + f" b_{n}" * (n in c.biased) for n in names)

    def norm(at: str, joined: str) -> str:
        own = {"layer": f"g_{at} offset_{at}", "modulated": f"scale_{at} shift_{at}"}
        before = f"g_post_{joined} " * c.family.post_norms
        before += f"mix_{joined} " * (c.family.norm == "modulated")
        return before + own.get(c.family.norm, f"g_{at}")

    heads = "q k " + "g_q g_k " * c.family.head_norms + "cos sin" * c.family.rotary
    mlp = projection(*(["gate"] * c.family.gated), "up", "down")
    layer = f"attended residual {projection('o')} {norm('mlp', 'attention')} {mlp} "
    layer += f"{norm('next', 'mlp')} {projection('q', 'k', 'v')}"
    exit = f"active residual {projection('down')} {norm('next', 'mlp')} {projection('head')}"
    exit += " target" * (c.family.norm != "modulated")
    found = [Piece("layer", between, dict(declared(layer)))]
    if c.family.head_norms or c.family.rotary:
        found.append(Piece("heads", turned, dict(declared(heads))))
    return [*found, Piece("exit", ending, dict(declared(exit)))]


def between(c: Layer, t: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
    """From attention's result to the residual stream, and the next queries, keys and values."""
    h = _joined(c, t, "attention", _linear(t, "o", t["attended"]))
    n = _normed(c, t, "mlp", h)
    active = _activated(c.activation, _linear(t, "gate" if c.family.gated else "up", n))
    if c.family.gated:
        active = active * _linear(t, "up", n)
    h = _joined(c, {**t, "residual": h}, "mlp", _linear(t, "down", active))
    n = _normed(c, t, "next", h)
    return h, *(_linear(t, x, n) for x in "qkv")


def turned(c: Layer, t: Mapping[str, Tensor]) -> list[Tensor]:
    """Queries and keys, (batch, positions, heads, width), normalised and rotated in halves."""
    import torch

    found: list[Tensor] = []
    for name in "qk":
        x = t[name].unflatten(-1, (-1, c.sizes["head"]))
        if c.family.head_norms:
            x = _scaled(c, x, t[f"g_{name}"])
        if c.family.rotary:
            one, two = x.chunk(2, -1)
            x = x * t["cos"][:, None] + torch.cat((-two, one), -1) * t["sin"][:, None]
        found.append(x)
    return found


def ending(c: Layer, t: Mapping[str, Tensor]) -> Tensor:
    """From the last MLP's activations to the loss; of a conditioned model, to what it returns."""
    import torch
    import torch.nn.functional as F

    h = _joined(c, t, "mlp", _linear(t, "down", t["active"]))
    logits = _linear(t, "head", _normed(c, t, "next", h, last=True))
    if "target" not in t:
        return logits
    if c.soft_cap:
        logits = c.soft_cap * torch.tanh(logits / c.soft_cap)
    return F.cross_entropy(logits.flatten(0, 1).float(), t["target"].flatten())


def _linear(t: Mapping[str, Tensor], name: str, x: Tensor) -> Tensor:
    import torch.nn.functional as F

    return F.linear(x, t[f"w_{name}"], t.get(f"b_{name}"))


def _joined(c: Layer, t: Mapping[str, Tensor], of: str, y: Tensor) -> Tensor:
    """The residual stream with what attention or the MLP adds."""
    if c.family.post_norms:
        y = _scaled(c, y, t[f"g_post_{of}"])
    if c.family.norm == "modulated":
        y = t[f"mix_{of}"][:, None] * y
    return t["residual"] + y


def _normed(c: Layer, t: Mapping[str, Tensor], at: str, x: Tensor, *, last: bool = False) -> Tensor:
    import torch.nn.functional as F

    width = (x.shape[-1],)
    if c.family.norm == "layer":
        return F.layer_norm(x, width, t[f"g_{at}"], t[f"offset_{at}"], c.epsilon)
    if c.family.norm == "modulated":
        x = F.layer_norm(x, width, None, None, c.epsilon if at == "mlp" else _FIXED)
        return x * (1 + t[f"scale_{at}"][:, None]) + t[f"shift_{at}"][:, None]
    return _scaled(c, x, t[f"g_{at}"])


def _scaled(c: Layer, x: Tensor, g: Tensor) -> Tensor:
    """An RMSNorm, of a head too."""
    import torch

    wide = x.float() if x.dtype.itemsize < 4 else x
    wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + c.epsilon)
    if c.family.norm == "one_plus":
        return (wide * (1.0 + g.to(wide.dtype))).to(x.dtype)
    return wide.to(x.dtype) * g


def _activated(kind: str, x: Tensor) -> Tensor:
    import torch.nn.functional as F

    if kind.startswith("gelu"):
        return F.gelu(x, approximate="tanh" if kind == "gelu_tanh" else "none")
    return F.silu(x) if kind == "silu" else F.relu(x)
