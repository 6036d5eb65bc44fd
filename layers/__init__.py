"""The kernels in people's training: sequences of a Transformer with gradients, modules of them, and
models that run by them."""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from coda_agent.layers.functional import (
        Normed,
        linear_residual_norm,
        mlp,
        norm_linear,
        normed,
        qk_norm_rope,
    )
    from coda_agent.layers.head import head_loss
    from coda_agent.layers.modules import DecoderLayer
    from coda_agent.layers.patch import (
        apply_coda_kernels,
        apply_coda_kernels_to_gemma3,
        apply_coda_kernels_to_llama,
        apply_coda_kernels_to_mistral,
        apply_coda_kernels_to_qwen2,
        apply_coda_kernels_to_qwen3,
    )
    from coda_agent.layers.report import Report

__all__ = [
    "DecoderLayer",
    "Normed",
    "Report",
    "apply_coda_kernels",
    "apply_coda_kernels_to_gemma3",
    "apply_coda_kernels_to_llama",
    "apply_coda_kernels_to_mistral",
    "apply_coda_kernels_to_qwen2",
    "apply_coda_kernels_to_qwen3",
    "head_loss",
    "linear_residual_norm",
    "mlp",
    "norm_linear",
    "normed",
    "qk_norm_rope",
]
_FUNCTIONS = {name for name in __all__ if name.islower() and not name.startswith("apply")}
_FUNCTIONS |= {"Normed"}
_HOMES = {"DecoderLayer": "modules", "head_loss": "head"}


def __getattr__(name: str) -> Any:
    if name not in __all__:
        raise AttributeError(f"no {name!r} in coda_agent.layers; there are: {', '.join(__all__)}")
    home = _HOMES.get(name, "functional" if name in _FUNCTIONS else "patch")
    return getattr(import_module(f"coda_agent.layers.{home}"), name)
