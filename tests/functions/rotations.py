"""Rotary embedding, in halves and in turns, as models have them; `EXAMPLES` has shapes."""

import torch
import torch.nn.functional as F


def llama_rope(x, w_q, cos, sin):
    q = F.linear(x, w_q).view(x.shape[0], -1, 64)
    q1, q2 = q[..., :32], q[..., 32:]
    rotated = torch.cat((-q2, q1), dim=-1)
    return (q * cos[:, None, :] + rotated * sin[:, None, :]).flatten(1)


def torchtitan_rope(x, wq, freqs_cos, freqs_sin):
    q = (x @ wq.T).float().reshape(x.shape[0], -1, 2)
    q0, q1 = q.unbind(-1)
    rotated = torch.stack([q0 * freqs_cos - q1 * freqs_sin, q0 * freqs_sin + q1 * freqs_cos], -1)
    return rotated.flatten(1).to(x.dtype)


def gptj_rotate(x, wq, cos, sin):
    q = x @ wq.T
    rotated = torch.stack((-q[:, 1::2], q[:, ::2]), dim=-1).flatten(-2)
    return q * cos + rotated * sin


def rotary_half_q(x, w, cos, sin):
    q = F.linear(x, w).view(96, -1, 64).float()
    q1, q2 = q[..., :32], q[..., 32:]
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat([q1 * c - q2 * s, q2 * c + q1 * s], dim=-1).view(96, -1)


def rotary_half_q_next(x, w, cos, sin):
    q = F.linear(x, w).view(x.shape[0], -1, 64).float()
    q1, q2 = q[..., :32], q[..., 32:]
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat([q1 * c - q2 * s, q2 * c + q1 * s], dim=-1).view(x.shape[0], -1)


def rotary_interleaved_k(x, w, freqs_cos, freqs_sin):
    k = F.linear(x, w).float()
    even, odd = k[..., 0::2], k[..., 1::2]
    out = torch.empty_like(k)
    out[..., 0::2] = even * freqs_cos - odd * freqs_sin
    out[..., 1::2] = even * freqs_sin + odd * freqs_cos
    return out.to(x.dtype)


def llama_rope_q(x, wq, cos, sin, head_dim: int = 128):
    q = F.linear(x, wq).view(x.shape[0], -1, head_dim)
    q1, q2 = q.chunk(2, dim=-1)
    rotated = torch.cat((-q2, q1), dim=-1)
    q = q * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
    return q.flatten(1)


def phi3_qkv(hidden_states, qkv_proj, cos, sin):
    qkv = F.linear(hidden_states, qkv_proj)
    query_states, key_states, value_states = qkv[:, :256], qkv[:, 256:320], qkv[:, 320:]

    def rotate_half(x):
        x1, x2 = x[..., : x.shape[-1] // 2], x[..., x.shape[-1] // 2 :]
        return torch.cat((-x2, x1), dim=-1)

    def turned(x):
        x = x.view(x.shape[0], -1, 64)
        return (x * cos[:, None] + rotate_half(x) * sin[:, None]).flatten(1)

    return turned(query_states), turned(key_states), value_states


def qk_rope_two_weights(x, wq, wk, cos, sin):
    def turned(w):
        t = (x @ w.T).view(x.shape[0], -1, 64)
        x1, x2 = t.chunk(2, dim=-1)
        return t * cos[:, None, :] + torch.cat((-x2, x1), dim=-1) * sin[:, None, :]

    return turned(wq), turned(wk)


def deepseek_kv_a(x, kv_a_proj, cos, sin):
    compressed_kv, k_pe = F.linear(x, kv_a_proj).split([192, 64], dim=-1)
    a, b = k_pe.chunk(2, dim=-1)
    return compressed_kv, k_pe * cos + torch.cat((-b, a), dim=-1) * sin


def vit_qkv_scaled(x, qkv, bias):
    q, k, v = F.linear(x, qkv, bias).reshape(x.shape[0], 3, 2, 64).unbind(1)
    return q * 64**-0.5, k, v


EXAMPLES = {
    "llama_rope": "x=96,80 w_q=256,80 cos=96,64 sin=96,64",
    "torchtitan_rope": "x=96,80 wq=256,80 freqs_cos=96,128:float32 freqs_sin=96,128:float32",
    "gptj_rotate": "x=96,80 wq=256,80 cos=96,256 sin=96,256",
    "rotary_half_q": "x=96,80 w=256,80 cos=96,32:float32 sin=96,32:float32",
    "rotary_half_q_next": "x=96,80 w=256,80 cos=96,32:float32 sin=96,32:float32",
    "rotary_interleaved_k": "x=96,80 w=256,80 freqs_cos=96,128:float32 freqs_sin=96,128:float32",
    "phi3_qkv": "hidden_states=96,80 qkv_proj=384,80 cos=96,64 sin=96,64",
    "qk_rope_two_weights": "x=96,80 wq=512,80 wk=128,80 cos=96,64 sin=96,64",
    "deepseek_kv_a": "x=96,80 kv_a_proj=256,80 cos=96,64 sin=96,64",
    "vit_qkv_scaled": "x=96,80 qkv=384,80 bias=384",
    "llama_rope_q": "x=96,80 wq=256,80 cos=96,128 sin=96,128",
}
