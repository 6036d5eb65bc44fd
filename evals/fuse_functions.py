"""The functions that the suite `fuse` times, as models have them in PyTorch.

`x` is what the first product takes, w… are weights, (out, in), b… biases, and g… the factors of
norms. `skip` is the residual stream. Whose widths they have says `fuse_cases.py`.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor


def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


def gelu_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def relu_squared(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)).square()


def softplus(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.softplus(F.linear(x, w) + b)


def residual(x: Tensor, w: Tensor, skip: Tensor) -> Tensor:
    return skip + F.linear(x, w)


def layer_scale(x: Tensor, w: Tensor, b: Tensor, g: Tensor, skip: Tensor) -> Tensor:
    return skip + g * F.linear(x, w, b)


def gated_residual(x: Tensor, w: Tensor, b: Tensor, mix: Tensor, skip: Tensor) -> Tensor:
    return skip + mix[:, None] * F.linear(x, w, b)


def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


def glu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.glu(F.linear(x, w, b))


def swiglu_amax(x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)
    return y, y.abs().amax(-1)


def _rotated(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = y.unflatten(-1, (-1, cos.shape[-1]))
    left, right = y.chunk(2, -1)
    return y * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


def qkv_rope(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = F.linear(x, w_q), F.linear(x, w_k), F.linear(x, w_v)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v


def qkv_bias_rope(
    x: Tensor, w_q: Tensor, b_q: Tensor, w_k: Tensor, b_k: Tensor, w_v: Tensor, b_v: Tensor,
    cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = F.linear(x, w_q, b_q), F.linear(x, w_k, b_k), F.linear(x, w_v, b_v)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v


def q_norm_rope(x: Tensor, w: Tensor, g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = F.linear(x, w).unflatten(-1, (-1, len(g)))
    return _rotated(F.rms_norm(q, (len(g),), g, 1e-6).flatten(1), cos, sin)


def lora(x: Tensor, w: Tensor, w_down: Tensor, w_up: Tensor) -> Tensor:
    return F.linear(x, w) + 2.0 * F.linear(F.linear(x, w_down), w_up)


def softcap(x: Tensor, w: Tensor) -> Tensor:
    return 30.0 * torch.tanh(F.linear(x, w) / 30.0)


def cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


def log_probability(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    found = torch.log_softmax(F.linear(x, w).float(), -1)
    return found.gather(-1, target[:, None]).squeeze(-1)


def router(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(F.linear(x, w).float())
    return scores, scores + b


def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, skip: Tensor) -> Tensor:
    return skip + F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


def geglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, skip: Tensor) -> Tensor:
    gate = F.gelu(F.linear(x, w_gate), approximate="tanh")
    return skip + F.linear(gate * F.linear(x, w_up), w_down)


def gelu_mlp(
    x: Tensor, w_up: Tensor, b_up: Tensor, w_down: Tensor, b_down: Tensor, skip: Tensor
) -> Tensor:
    return skip + F.linear(F.gelu(F.linear(x, w_up, b_up)), w_down, b_down)


def norm_projection(
    x: Tensor, w_o: Tensor, skip: Tensor, g: Tensor, w: Tensor
) -> tuple[Tensor, ...]:
    h = skip + F.linear(x, w_o)
    return h, F.linear(F.rms_norm(h, g.shape, g, 1e-5), w)


def norm_swiglu_mlp(
    x: Tensor, w_o: Tensor, skip: Tensor, g: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor
) -> Tensor:
    h = skip + F.linear(x, w_o)
    return swiglu_mlp(F.rms_norm(h, g.shape, g, 1e-5), w_gate, w_up, w_down, h)


def layer_norm_gelu(
    x: Tensor, w_o: Tensor, b_o: Tensor, skip: Tensor, g: Tensor, b: Tensor, w: Tensor, b_up: Tensor
) -> tuple[Tensor, Tensor]:
    h = skip + F.linear(x, w_o, b_o)
    return h, gelu(F.layer_norm(h, g.shape, g, b, 1e-6), w, b_up)


def modulated_gelu(
    x: Tensor, w_o: Tensor, b_o: Tensor, mix: Tensor, skip: Tensor, scale: Tensor, shift: Tensor,
    w: Tensor, b: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = gated_residual(x, w_o, b_o, mix, skip)
    n = F.layer_norm(h, h.shape[-1:], None, None, 1e-6)
    return h, gelu_tanh(n * (1 + scale[:, None]) + shift[:, None], w, b)


def post_norm(x: Tensor, w: Tensor, g: Tensor, skip: Tensor) -> Tensor:
    y = F.linear(x, w).float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    return skip + (y * (1.0 + g.float())).to(skip.dtype)


def latent(x: Tensor, w_down: Tensor, g: Tensor, w_up: Tensor) -> Tensor:
    return F.linear(F.rms_norm(F.linear(x, w_down), g.shape, g, 1e-6), w_up)


def parallel_mlp(
    x: Tensor, w_o: Tensor, b_o: Tensor, n: Tensor, w_up: Tensor, b_up: Tensor, w_down: Tensor,
    b_down: Tensor, skip: Tensor,
) -> Tensor:  # fmt: skip
    return gelu_mlp(n, w_up, b_up, w_down, b_down, skip) + F.linear(x, w_o, b_o)


def masked_head(
    x: Tensor, w: Tensor, g: Tensor, b: Tensor, w_head: Tensor, b_head: Tensor
) -> Tensor:
    y = F.layer_norm(F.gelu(F.linear(x, w)), g.shape, g, b, 1e-5)
    return F.linear(y, w_head, b_head)


def channel_mix(x: Tensor, y: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(y, w_gate)) * F.linear(relu_squared(x, w_up), w_down)
