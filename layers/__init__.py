"""The kernels in people's training: sequences of a Transformer with gradients, modules of them, and
models that run by them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_agent.layers.functional import (
        Normed,
        head_loss,
        linear_residual_norm,
        mlp,
        norm_linear,
        normed,
    )
    from coda_agent.layers.modules import DecoderLayer

__all__ = [
    "DecoderLayer",
    "Normed",
    "head_loss",
    "linear_residual_norm",
    "mlp",
    "norm_linear",
    "normed",
]
_ELSEWHERE = {"DecoderLayer": "modules"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"no {name!r} in coda_agent.layers; there are: {', '.join(__all__)}")
    home = _ELSEWHERE.get(name, "functional")
    return getattr(import_module(f"coda_agent.layers.{home}"), name)
