"""A decoder layer of packed weights, and the names that others have for its parts."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_agent.layers.fit import eps
from coda_agent.layers.functional import (
    Normed,
    linear_residual_norm,
    mlp,
    norm_linear,
    normed,
    qk_norm_rope,
)
from coda_agent.layers.packing import (
    interleave,
    pack_qkv,
    pair_halves,
    rotary_table,
    separate,
    split_pairs,
    unpack_qkv,
)

Attend = Callable[[Tensor, Tensor, Tensor], Tensor]
"""(B, S, Hq · D), (B, S, Hk · D), (B, S, Hk · D) to (B, S, Hq · D)."""


@dataclass(frozen=True)
class Names:
    """What a library calls the weights of a decoder layer.

    Attributes:
        halves: Whether its rotary embedding takes halves of heads, not pairs.
        input_norm, qkv, o, mlp_norm, gate_up, down: Modules; several where one here packs them.
        q_norm, k_norm: Of heads, in layers that have them.
    """

    halves: bool
    input_norm: str
    qkv: tuple[str, str, str]
    o: str
    mlp_norm: str
    gate_up: tuple[str, str]
    down: str
    q_norm: str
    k_norm: str


HUGGING_FACE = Names(
    True,
    "input_layernorm",
    ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj",
    "post_attention_layernorm",
    ("mlp.gate_proj", "mlp.up_proj"),
    "mlp.down_proj",
    "self_attn.q_norm",
    "self_attn.k_norm",
)
TORCHTITAN = Names(
    False,
    "attention_norm",
    ("attention.wq", "attention.wk", "attention.wv"),
    "attention.wo",
    "ffn_norm",
    ("feed_forward.w1", "feed_forward.w3"),
    "feed_forward.w2",
    "attention.q_norm",
    "attention.k_norm",
)
_ALIKE = "input_norm", "o", "mlp_norm", "down"
_HEADS = "q_norm", "k_norm"


class DecoderLayer(nn.Module):
    """A pre-norm layer of a decoder: attention behind an RMSNorm, a gated MLP behind another.

    Its weights are packed as the kernels take them. A state dict of Hugging Face or torchtitan
    loads as it is, and `state_dict_of` gives one back.

    Args:
        width: d, a multiple of 16.
        ffn: Columns of gate and of up.
        heads, kv_heads: Of queries; of keys and values.
        head_dim: D.
        eps: Of all norms.
        activation: Of the gate: "silu" (SwiGLU), "gelu", "gelu_tanh" (GeGLU) or "relu" (ReGLU).
        qk_norm: Whether the heads of query and key have RMSNorms, as in Qwen3.
        fp8: Whether to multiply in e4m3 in training, forward (`functional`). Without gradients, in
            eval, all is in 16 bits; for inference there is `fp8.DecoderLayer`.
        kind: `device` and `dtype` of the parameters; 16-bit types only.
    """

    def __init__(
        self,
        width: int,
        ffn: int,
        heads: int,
        kv_heads: int,
        head_dim: int,
        eps: float = 1e-5,
        activation: str = "silu",
        qk_norm: bool = False,
        fp8: bool = False,
        **kind: Any,
    ) -> None:
        super().__init__()
        self.activation, self.fp8 = activation, fp8
        self.heads, self.head_dim = (heads, kv_heads), head_dim
        self.sizes = (heads * head_dim, kv_heads * head_dim, kv_heads * head_dim)
        self.input_norm = nn.RMSNorm(width, eps=eps, **kind)
        self.qkv = nn.Linear(width, sum(self.sizes), bias=False, **kind)
        self.o = nn.Linear(self.sizes[0], width, bias=False, **kind)
        self.mlp_norm = nn.RMSNorm(width, eps=eps, **kind)
        self.gate_up = nn.Linear(width, 2 * ffn, bias=False, **kind)
        self.down = nn.Linear(ffn, width, bias=False, **kind)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(head_dim, eps=eps, **kind) if qk_norm else None for _ in _HEADS
        )
        self.register_load_state_dict_pre_hook(_pack)

    def forward(
        self,
        x: Tensor,
        given: Normed | None,
        table: Tensor | None,
        next_norm: nn.RMSNorm,
        attend: Attend | None = None,
    ) -> tuple[Tensor, Normed]:
        """The stream behind this layer, and its `Normed` by `next_norm`.

        Args:
            x: (B, S, d), the stream.
            given: Its `Normed` by this layer's `input_norm`, from the layer before; None where
                there is none.
            table: (B · S, columns of `qkv`), as `table` gives it, for all layers alike.
            next_norm: The norm behind this layer.
            attend: Attention; by default PyTorch's, causal.
        """
        rows, fp8 = x.flatten(0, 1), self.fp8 and (self.training or torch.is_grad_enabled())
        if given is None:
            given = normed(rows, self.input_norm.weight, eps(self.input_norm))
        *qkv, rows = norm_linear(
            rows,
            given,
            self.input_norm.weight,
            self.qkv.weight,
            self.sizes,
            table if self.q_norm is None else None,
            rotated=(sum(self.heads), self.head_dim),
            fp8=fp8,
        )
        for i, (norm, start) in enumerate(((self.q_norm, 0), (self.k_norm, self.sizes[0]))):
            if norm is not None:
                cut = None if table is None else table[:, start : start + self.sizes[i]]
                qkv[i] = qk_norm_rope(qkv[i], norm.weight, eps(norm), cut)
        q, k, v = (t.unflatten(0, x.shape[:2]) for t in qkv)
        a = (attend or self._attend)(q, k, v).flatten(0, 1)
        norm = self.mlp_norm
        o = self.o.weight
        rows, given = linear_residual_norm(a, o, rows, norm.weight, eps(norm), fp8=fp8)
        weights = norm.weight, self.gate_up.weight, self.down.weight, next_norm.weight
        rows, given = mlp(rows, given, *weights, eps(next_norm), self.activation, fp8=fp8)
        return rows.view_as(x), given

    def table(self, cos: Tensor, sin: Tensor) -> Tensor:
        """The rotation's table of this layer out of Hugging Face's cosines and sines (B, S, D)."""
        return rotary_table(cos, sin, sum(self.heads), sum(self.sizes))

    def _attend(self, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        q, k, v = (t.unflatten(-1, (-1, self.head_dim)).transpose(1, 2) for t in (q, k, v))
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return out.transpose(1, 2).flatten(2)

    def state_dict_of(self, names: Names) -> dict[str, Tensor]:
        """Its weights as a library names and orders them: copies."""
        own = {name: t.detach().clone() for name, t in self.named_parameters()}
        heads = self.heads if names.halves else None
        given = dict(zip(names.qkv, unpack_qkv(own["qkv.weight"], self.sizes, heads), strict=True))
        given |= zip(names.gate_up, separate(own["gate_up.weight"]), strict=True)
        given |= {getattr(names, part): own[f"{part}.weight"] for part in _ALIKE}
        for part in _HEADS if self.q_norm is not None else ():
            gamma = own[f"{part}.weight"]
            given[getattr(names, part)] = split_pairs(gamma, 1) if names.halves else gamma
        return {f"{name}.weight": t for name, t in given.items()}


def _pack(module: Any, state: dict[str, Tensor], prefix: str, *_: Any) -> None:
    """Bring another library's weights in `state` under this module's names, packed."""
    for names in (HUGGING_FACE, TORCHTITAN):
        if f"{prefix}{names.o}.weight" not in state:
            continue
        heads = module.heads if names.halves else None
        packs: dict[str, Callable[..., Tensor]] = {
            "qkv": partial(pack_qkv, heads=heads),
            "gate_up": interleave,
        }
        if names.halves:
            packs |= dict.fromkeys(_HEADS, partial(pair_halves, heads=1))
        for part in ("qkv", "gate_up", *_ALIKE, *(_HEADS if module.q_norm is not None else ())):
            theirs = getattr(names, part)
            keys = [f"{prefix}{n}.weight" for n in ([theirs] if type(theirs) is str else theirs)]
            if all(key in state for key in keys):  # else PyTorch says which are missing
                weights = [state.pop(key) for key in keys]
                packed = packs[part](*weights) if part in packs else weights[0]
                state[f"{prefix}{part}.weight"] = packed
