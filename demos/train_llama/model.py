"""A small Llama over bytes, in PyTorch and by `coda_agent.layers`; it gives its loss."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_agent.layers import DecoderLayer, head_loss

WORDS = 256
EPS = 1e-5


@dataclass(frozen=True)
class Sizes:
    """Of a model and of what it is given in a step.

    Attributes:
        width: d, a multiple of 16, as are the others.
        ffn: Columns of gate and of up.
        layers: Decoder layers.
        heads, kv_heads, head_dim: Of queries; of keys and values; D.
        batch, context: Sequences in a step and their bytes.
        rate: The learning rate at its highest.
    """

    width: int
    ffn: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    batch: int
    context: int
    rate: float


SIZES = {
    "tiny": Sizes(64, 176, 2, 4, 2, 16, 4, 32, 3e-3),
    "180m": Sizes(2048, 5632, 4, 16, 4, 128, 8, 1024, 3e-4),
}


class Llama(nn.Module):
    """By PyTorch alone. Parts of its layers have Hugging Face's names."""

    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.sizes = sizes
        self.embed = nn.Embedding(WORDS, sizes.width)
        self.layers = nn.ModuleList(self.layer() for _ in range(sizes.layers))
        self.norm = nn.RMSNorm(sizes.width, eps=EPS)
        self.head = nn.Linear(sizes.width, WORDS, bias=False)
        for p in self.parameters():
            if p.dim() > 1:
                nn.init.normal_(p, std=0.02)

    def layer(self) -> nn.Module:
        return _Layer(self.sizes)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        """The cross-entropy, float32, of `targets` behind `ids`, both (B, S) int64."""
        x = self.embed(ids)
        places = self.places(ids, x.dtype)
        for layer in self.layers:
            x = layer(x, places)
        logits = self.head(self.norm(x))
        return F.cross_entropy(logits.float().flatten(0, 1), targets.flatten())

    def places(self, ids: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Cosines and sines (S, D) of each position."""
        d = self.sizes.head_dim
        turns = 10000.0 ** (-torch.arange(0, d, 2, device=ids.device) / d)
        angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * turns
        angles = torch.cat((angles, angles), dim=-1)
        return angles.cos().to(dtype), angles.sin().to(dtype)


class LlamaByKernels(Llama):
    """The same by kernels, but for the embedding and attention. `Llama`'s state dict loads."""

    def layer(self) -> nn.Module:
        s = self.sizes
        return DecoderLayer(s.width, s.ffn, s.heads, s.kv_heads, s.head_dim, EPS)

    def forward(self, ids: Tensor, targets: Tensor) -> Tensor:
        x, layers = self.embed(ids), list[Any](self.layers)
        table = layers[0].table(*(t.expand(len(ids), -1, -1) for t in self.places(ids, x.dtype)))
        norms = [*(layer.input_norm for layer in layers[1:]), self.norm]
        given: Any = None
        for layer, next_norm in zip(layers, norms, strict=True):
            x, given = layer(x, given, table, next_norm)
        weights = self.norm.weight, self.head.weight
        return head_loss(x.flatten(0, 1), given, *weights, targets.flatten())


class _Layer(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(sizes.width, eps=EPS)
        self.self_attn = _Attention(sizes)
        self.post_attention_layernorm = nn.RMSNorm(sizes.width, eps=EPS)
        self.mlp = _Mlp(sizes)

    def forward(self, x: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        x = x + self.self_attn(self.input_layernorm(x), places)
        return x + self.mlp(self.post_attention_layernorm(x))


class _Attention(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.head_dim = sizes.head_dim
        queries, keys = sizes.heads * sizes.head_dim, sizes.kv_heads * sizes.head_dim
        self.q_proj = nn.Linear(sizes.width, queries, bias=False)
        self.k_proj = nn.Linear(sizes.width, keys, bias=False)
        self.v_proj = nn.Linear(sizes.width, keys, bias=False)
        self.o_proj = nn.Linear(queries, sizes.width, bias=False)

    def forward(self, n: Tensor, places: tuple[Tensor, Tensor]) -> Tensor:
        q, k, v = (
            project(n).unflatten(-1, (-1, self.head_dim)).transpose(1, 2)
            for project in (self.q_proj, self.k_proj, self.v_proj)
        )
        q, k = _rotated(q, *places), _rotated(k, *places)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2))


class _Mlp(nn.Module):
    def __init__(self, sizes: Sizes) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(sizes.width, sizes.ffn, bias=False)
        self.up_proj = nn.Linear(sizes.width, sizes.ffn, bias=False)
        self.down_proj = nn.Linear(sizes.ffn, sizes.width, bias=False)

    def forward(self, n: Tensor) -> Tensor:
        return self.down_proj(F.silu(self.gate_proj(n)) * self.up_proj(n))


def _rotated(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    left, right = x.chunk(2, dim=-1)
    return x * cos + torch.cat((-right, left), dim=-1) * sin
