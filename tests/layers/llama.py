"""A small Llama in plain PyTorch, with Hugging Face's names and structure."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint

ACTIVATIONS: dict[str, Callable[[], nn.Module]] = {
    "silu": nn.SiLU,
    "gelu": nn.GELU,
    "gelu_tanh": lambda: nn.GELU("tanh"),
    "relu": nn.ReLU,
}


@dataclass
class Config:
    vocab: int = 96
    width: int = 64
    ffn: int = 80
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 16
    eps: float = 1e-5
    qkv_bias: bool = False
    o_bias: bool = False
    qk_norm: bool = False
    tied: bool = False
    hidden_act: str = "silu"
    sandwich: bool = (
        False  # as Gemma 3: norms behind attention and the MLP, whose weights are one less
    )


class RMSNorm(nn.Module):
    def __init__(self, width: int, eps: float, one: float = 0.0) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.rand(width) + 0.5 - one)
        self.variance_epsilon, self.one = eps, one

    def forward(self, x: Tensor) -> Tensor:
        wide = x.double() if x.dtype == torch.float64 else x.float()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + self.variance_epsilon)
        if self.one:
            return (wide * (self.one + self.weight.to(wide.dtype))).to(x.dtype)
        return self.weight * wide.to(x.dtype)


def rotate_half(x: Tensor) -> Tensor:
    a, b = x.chunk(2, dim=-1)
    return torch.cat((-b, a), dim=-1)


def apply_rotary_pos_emb(q: Tensor, k: Tensor, cos: Tensor, sin: Tensor) -> tuple[Tensor, Tensor]:
    cos, sin = cos.unsqueeze(1), sin.unsqueeze(1)
    return q * cos + rotate_half(q) * sin, k * cos + rotate_half(k) * sin


class Attention(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.head_dim = c.head_dim
        self.q_proj = nn.Linear(c.width, c.heads * c.head_dim, bias=c.qkv_bias)
        self.k_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.v_proj = nn.Linear(c.width, c.kv_heads * c.head_dim, bias=c.qkv_bias)
        self.o_proj = nn.Linear(c.heads * c.head_dim, c.width, bias=c.o_bias)
        if c.qk_norm:
            self.q_norm = RMSNorm(c.head_dim, c.eps, float(c.sandwich))
            self.k_norm = RMSNorm(c.head_dim, c.eps, float(c.sandwich))

    def forward(
        self, hidden_states: Tensor, position_embeddings: Any = None, **_: Any
    ) -> tuple[Tensor, None]:
        shape = (*hidden_states.shape[:-1], -1, self.head_dim)
        q, k = self.q_proj(hidden_states).view(shape), self.k_proj(hidden_states).view(shape)
        if hasattr(self, "q_norm"):
            q, k = self.q_norm(q), self.k_norm(k)
        q, k = q.transpose(1, 2), k.transpose(1, 2)
        v = self.v_proj(hidden_states).view(shape).transpose(1, 2)
        cos, sin = position_embeddings
        q, k = apply_rotary_pos_emb(q, k, cos, sin)
        out = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o_proj(out.transpose(1, 2).flatten(2)), None


class Mlp(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.gate_proj = nn.Linear(c.width, c.ffn, bias=False)
        self.up_proj = nn.Linear(c.width, c.ffn, bias=False)
        self.down_proj = nn.Linear(c.ffn, c.width, bias=False)
        self.act_fn = ACTIVATIONS[c.hidden_act]()

    def forward(self, x: Tensor) -> Tensor:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))


class Layer(nn.Module):
    input_layernorm: RMSNorm
    post_attention_layernorm: RMSNorm
    pre_feedforward_layernorm: RMSNorm
    post_feedforward_layernorm: RMSNorm

    def __init__(self, c: Config) -> None:
        super().__init__()
        self.self_attn, self.mlp = Attention(c), Mlp(c)
        sandwich = ("pre_feedforward_layernorm", "post_feedforward_layernorm") if c.sandwich else ()
        for name in ("input_layernorm", "post_attention_layernorm", *sandwich):
            self.add_module(name, RMSNorm(c.width, c.eps, float(c.sandwich)))

    def forward(self, hidden_states: Tensor, **kwargs: Any) -> Tensor:
        x = hidden_states
        a = self.self_attn(hidden_states=self.input_layernorm(x), **kwargs)[0]
        if hasattr(self, "pre_feedforward_layernorm"):
            x = x + self.post_attention_layernorm(a)
            return x + self.post_feedforward_layernorm(self.mlp(self.pre_feedforward_layernorm(x)))
        x = x + a
        return x + self.mlp(self.post_attention_layernorm(x))


class Stack(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config = c
        self.embed_tokens = nn.Embedding(c.vocab, c.width)
        self.layers = nn.ModuleList([Layer(c) for _ in range(c.layers)])
        self.norm = RMSNorm(c.width, c.eps, float(c.sandwich))
        self.checkpoint: bool | None = None  # use_reentrant, where layers are checkpointed

    def forward(self, input_ids: Tensor, **_: Any) -> Tensor:
        ids = input_ids
        x = self.embed_tokens(ids)
        places = positions(ids, self.config, x.dtype)
        for layer in self.layers:
            if self.checkpoint is None:
                x = layer(x, position_embeddings=places)
            else:
                x = checkpoint(
                    lambda x, layer=layer: layer(x, position_embeddings=places),
                    x,
                    use_reentrant=self.checkpoint,
                )
        return self.norm(x)


class Given(NamedTuple):
    """What a model gives; FSDP finds the tensors in it."""

    loss: Tensor | None
    logits: Tensor


class Llama(nn.Module):
    def __init__(self, c: Config) -> None:
        super().__init__()
        self.config, self.model = c, Stack(c)
        self.lm_head = nn.Linear(c.width, c.vocab, bias=False)
        if c.tied:
            self.lm_head.weight = self.model.embed_tokens.weight

    def forward(self, ids: Tensor, labels: Tensor | None = None) -> Given:
        logits, loss = self.lm_head(self.model(ids)), None
        if labels is not None:
            wide = logits if logits.dtype == torch.float64 else logits.float()
            loss = F.cross_entropy(wide[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return Given(loss, logits)


def positions(ids: Tensor, c: Config, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """Cosines and sines (B, S, D). In float64 those that were rounded to bfloat16: they are inputs."""
    turns = 10000.0 ** (-torch.arange(0, c.head_dim, 2, device=ids.device) / c.head_dim)
    angles = torch.arange(ids.shape[1], device=ids.device)[:, None] * turns
    angles = torch.cat((angles, angles), dim=-1).expand(len(ids), -1, -1)
    return angles.cos().bfloat16().to(dtype), angles.sin().bfloat16().to(dtype)
