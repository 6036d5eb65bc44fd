"""The weights that one product takes as one parameter, in a layer of Hugging Face's.

A copy of them in each training step then costs neither time nor memory. State dicts keep the names
and the order of rows that they had: what is saved loads into the model as it was, and the reverse.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn

from coda_agent.layers.modules import HUGGING_FACE
from coda_agent.layers.packing import interleave, pack_qkv, separate, unpack_qkv
from coda_agent.runtime.sharded import distributed

_QKV, _GATE_UP = "self_attn.qkv_weight", "mlp.gate_up_weight"
PLACES = {_QKV: HUGGING_FACE.qkv, _GATE_UP: HUGGING_FACE.gate_up}
"""The parameters, and the linears whose weights they hold."""


def unpackable(layer: Any) -> str:
    """Why a layer's weights cannot be packed; empty where they can."""
    for names in PLACES.values():
        weights = [layer.get_submodule(name).weight for name in names]
        if len({weight.requires_grad for weight in weights}) > 1:
            return f"only some of {', '.join(names)} are trained"
    return ""


class Packed:
    """The packed weights of a decoder layer, in the place of its own.

    Args:
        layer: With `HUGGING_FACE`'s names.
        sizes: Rows of query, key and value.
        heads: Of queries and of keys, whose halves become pairs; None leaves them.
    """

    def __init__(self, layer: Any, sizes: Sequence[int], heads: Sequence[int] | None) -> None:
        self.layer, self.sizes, self.heads = layer, sizes, heads
        self.were: dict[str, Any] = {}
        for place, names in PLACES.items():
            weights = [layer.get_submodule(name).weight for name in names]
            joined = nn.Parameter(self._joined(place, weights), weights[0].requires_grad)
            owner, _, name = place.partition(".")
            layer.get_submodule(owner).register_parameter(name, joined)
            for name, weight in zip(names, weights, strict=True):
                self.were[name], weight.data = weight, weight.new_empty(0)
                # None, not gone: torch.distributed.checkpoint looks it up by the state dict's name.
                layer.get_submodule(name).weight = None
        self.hooks = [
            layer.register_state_dict_post_hook(partial(self._give)),  # a method has no attributes
            layer.register_load_state_dict_pre_hook(self._take),
        ]

    def both(self) -> tuple[Tensor, Tensor]:
        """Of query, key and value; of gate and up."""
        return self.layer.self_attn.qkv_weight, self.layer.mlp.gate_up_weight

    def weight(self, name: str) -> Tensor:
        """That of a linear, copied out; its gradient reaches the parameter."""
        for place, names in PLACES.items():
            if name in names:
                return self._parts(place, self.layer.get_parameter(place))[names.index(name)]
        raise KeyError(name)

    def check(self) -> None:
        """Raises:
        TypeError: FSDP has taken the packed parameters.
        """
        if distributed(self.both()):
            raise TypeError(
                "packed weights that fully_shard has taken do not become the model's own again; "
                "load this model's state dict into one that is not patched"
            )

    def undo(self) -> None:
        """Give the linears their own parameters back, with today's values; `check` first."""
        with torch.no_grad():
            for name, weight in self.were.items():
                weight.data, weight.grad = self.weight(name).detach(), None
                self.layer.get_submodule(name).register_parameter("weight", weight)
        for place in PLACES:
            owner, _, name = place.partition(".")
            delattr(self.layer.get_submodule(owner), name)
        for hook in self.hooks:
            hook.remove()

    @torch.no_grad()
    def _joined(self, place: str, weights: Sequence[Tensor]) -> Tensor:
        if place == _GATE_UP:
            return interleave(*weights)
        q, k, v = weights
        return pack_qkv(q, k, v, self.heads)

    def _parts(self, place: str, packed: Tensor) -> tuple[Tensor, ...]:
        return unpack_qkv(packed, self.sizes, self.heads) if place == _QKV else separate(packed)

    def _give(self, _: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for place, names in PLACES.items():
            packed = state.pop(f"{prefix}{place}")
            # What FSDP shards is whole here for a moment; its parts are sharded likewise.
            for name, part in zip(names, self._parts(place, _replicated(packed)), strict=True):
                state[f"{prefix}{name}.weight"] = _sharded_as(packed, part)

    def _take(self, _: Any, state: dict[str, Any], prefix: str, *__: Any) -> None:
        for place, names in PLACES.items():
            keys = [f"{prefix}{name}.weight" for name in names]
            if all(key in state for key in keys):
                joined = self._joined(place, [_replicated(state.pop(key)) for key in keys])
                state[f"{prefix}{place}"] = _sharded_as(self.layer.get_parameter(place), joined)


def _replicated(t: Any) -> Any:
    """A DTensor with all of it on each rank; what is none, as it is."""
    if not distributed((t,)):
        return t
    from torch.distributed.tensor import Replicate

    return t.redistribute(placements=[Replicate()] * t.device_mesh.ndim)


def _sharded_as(other: Any, t: Any) -> Any:
    """`t`, which all ranks have whole, with the placements of a DTensor `other`."""
    if not distributed((other,)):
        return t
    from torch.distributed.tensor import distribute_tensor

    whole = t.to_local() if distributed((t,)) else t
    mesh, placements = other.device_mesh, other.placements
    # Cloned, or a shard would keep the memory of the whole.
    return distribute_tensor(whole, mesh, placements, src_data_rank=None).clone()
