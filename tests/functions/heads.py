"""Queries, keys, values, and scores of heads, as models have them; `EXAMPLES` has shapes."""

import math

import torch
import torch.nn.functional as F

from coda_agent.primitives.placed import philox


def gemma2_logits(hidden_states, lm_head, softcap=30.0):
    logits = hidden_states @ lm_head.T
    logits = logits / softcap
    logits = torch.tanh(logits)
    return logits * softcap


def attention_output(attn, w_o, residual):
    return residual + F.linear(attn, w_o)


def qkv_projection(x, w_qkv, b_qkv):
    qkv = F.linear(x, w_qkv, b_qkv)
    q, k, v = qkv.split([128, 64, 64], dim=-1)
    return q, k, v


def olmo_clip_qkv(x, w_qkv):
    return F.linear(x, w_qkv).clamp(min=-8.0, max=8.0)


def attention_scores(q, k, mask):
    return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1)) + mask


def causal_scores(q, k):
    scores = q @ k.T * q.shape[-1] ** -0.5
    keep = torch.ones(scores.shape, dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~keep, -1e4)


def unet_attention_rescale(hidden_states, weight, bias, residual, output_scale: float = 1.414):
    return (torch.nn.functional.linear(hidden_states, weight, bias) + residual) / output_scale


def segmentation_head(x, weight, bias):
    return F.leaky_relu(F.linear(x, weight, bias), negative_slope=0.1)


def gpt_neox_qkv(x, w, b):
    q, k, v = F.linear(x, w, b).chunk(3, dim=-1)
    return q, k, v


def cosine_attention_q(x, w):
    q = F.linear(x, w).unflatten(-1, (-1, 64))
    return F.normalize(q.float(), dim=-1).flatten(-2).to(x.dtype)


def grok_attention_softcap(q, k, scale: float = 0.088):
    return 30.0 * torch.tanh((q @ k.mT) * scale / 30.0)


def dropout_given_mask(h, w, mask, p: float = 0.2):
    return F.linear(h, w) * mask / (1.0 - p)


def mpt_alibi(q, k, pos_q, pos_k, slope):
    return q @ k.t() * q.new_tensor(0.125) + slope * (pos_k - pos_q[:, None])


def swin_scores(q, k, bias, scale: float = 0.17):
    return (q * scale) @ k.transpose(-2, -1) + bias


def padding_mask(q, k, key_padding):
    scores = (q @ k.T).float()
    return torch.where(key_padding[None, :] > 0, scores, torch.full_like(scores, -10.0))


def llama_logits(hidden_states, lm_head):
    logits = F.linear(hidden_states, lm_head)
    return logits.float()


def qwen2_qkv(x, w_q, b_q, w_k, b_k, w_v, b_v):
    q = F.linear(x, w_q, b_q)
    k = F.linear(x, w_k, b_k)
    v = F.linear(x, w_v, b_v)
    return q, k, v


def mistral_sliding_scores(q, k, scale: float = 0.125, window: int = 32):
    scores = q @ k.T * scale
    i = torch.arange(q.shape[0], device=q.device)[:, None]
    j = torch.arange(k.shape[0], device=q.device)[None, :]
    keep = (j <= i) & (j > i - window)
    return scores.masked_fill(~keep, float("-inf"))


def mistral_sliding_scores_finite(q, k, window: int = 32):
    scores = (q @ k.T) / math.sqrt(64)
    i = torch.arange(scores.shape[0])[:, None]
    j = torch.arange(scores.shape[1])[None, :]
    return torch.where((j <= i) & (i - j < window), scores, torch.finfo(torch.float16).min)


def t5_scores(q, k, position_bias):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores += position_bias
    return scores


def vit_head_probs(cls, w, b):
    return F.linear(cls, w, b).softmax(dim=-1)


def bounded_head(pred, w, b, lo, hi):
    return lo + (hi - lo) * torch.sigmoid(F.linear(pred, w, b))


def mistral_sliding_scores_next(q, k, scale: float = 0.125):
    return q @ k.T * scale


def vit_head_probs_next(cls, w, b):
    y = F.linear(cls, w, b).float()
    return y, y.logsumexp(-1)


def llama_attention_residual(attn_output, o_proj, residual):
    bsz, q_len, _ = attn_output.size()
    hidden_states = F.linear(attn_output.reshape(bsz, q_len, -1), o_proj)
    return residual + hidden_states


def llama_q_heads(x, wq):
    b, s, _ = x.shape
    return F.linear(x, wq).view(b, s, -1, 64).transpose(1, 2)


def gemma2_capped_scores(q, k, attn_logit_softcapping: float = 50.0):
    attn_weights = torch.matmul(q, k.transpose(0, 1)) * 64**-0.5
    attn_weights = attn_weights / attn_logit_softcapping
    attn_weights = torch.tanh(attn_weights)
    return attn_weights * attn_logit_softcapping


def gpt2_c_attn(x, weight, bias):
    size_out = (*x.size()[:-1], weight.shape[1])
    y = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    query, key, value = y.view(size_out).split(80, dim=2)
    return query, key, value


def deepseek_scores_for_choice(x, gate, correction):
    logits = F.linear(x.float(), gate.float())
    scores = logits.sigmoid()
    return scores, scores + correction.unsqueeze(0)


def additive_mask_scores(q, k, mask):
    return torch.baddbmm(mask[None], q[None], k.T[None], beta=1.0, alpha=0.125)[0]


def masked_key_scores(q, k, key_mask):
    scores = q @ k.T
    scores = scores * 0.125 + (1.0 - key_mask) * -10000.0
    return scores


def masked_key_scores_next(q, k):
    return q @ k.T * 0.125


def llama_qkv_heads(hidden_states, q_proj, k_proj, v_proj, head_dim: int = 64):
    b, s, _ = hidden_states.shape
    q = F.linear(hidden_states, q_proj).view(b, s, -1, head_dim).transpose(1, 2)
    k = F.linear(hidden_states, k_proj).view(b, s, -1, head_dim).transpose(1, 2)
    v = F.linear(hidden_states, v_proj).view(b, s, -1, head_dim).transpose(1, 2)
    return q, k, v


def deepseek_kv_compressed(x, kv_a_proj):
    compressed = F.linear(x, kv_a_proj)
    c_kv, k_pe = torch.split(compressed, [512, 64], dim=-1)
    return c_kv, k_pe


def whisper_scaled_query(x, w, b, head_dim: int = 64):
    return F.linear(x, w, b) * head_dim**-0.5


def whisper_key_heads(x, w):
    b, t, _ = x.shape
    return F.linear(x, w).view(b, t, -1, 64).permute(0, 2, 3, 1)


def gpt2_attn_proj_dropout(x, w, b, residual, seed, offset, p: float = 0.1):
    y = torch.addmm(b, x, w)
    keep = philox(seed, offset, *y.shape, device=y.device) >= p
    return residual + torch.where(keep, y / (1 - p), 0.0)


EXAMPLES = {
    "gemma2_logits": "hidden_states=96,80 lm_head=128,80",
    "attention_output": "attn=2,48,80 w_o=128,80 residual=2,48,128",
    "qkv_projection": "x=96,80 w_qkv=256,80 b_qkv=256",
    "olmo_clip_qkv": "x=2,48,80 w_qkv=128,80",
    "attention_scores": "q=96,80 k=128,80 mask=96,128",
    "causal_scores": "q=96,80 k=96,80",
    "unet_attention_rescale": "hidden_states=2,48,80 weight=128,80 bias=128 residual=2,48,128",
    "segmentation_head": "x=2,48,80 weight=128,80 bias=128",
    "gpt_neox_qkv": "x=2,48,80 w=192,80 b=192",
    "cosine_attention_q": "x=2,48,80 w=256,80",
    "grok_attention_softcap": "q=96,80 k=128,80",
    "dropout_given_mask": "h=96,80 w=128,80 mask=96,128",
    "mpt_alibi": "q=96,80 k=128,80 pos_q=96:float32 pos_k=128:float32 slope=",
    "swin_scores": "q=96,80 k=128,80 bias=96,128",
    "padding_mask": "q=96,80 k=128,80 key_padding=128:float32",
    "llama_logits": "hidden_states=2,48,80 lm_head=512,80",
    "qwen2_qkv": "x=2,48,80 w_q=256,80 b_q=256 w_k=128,80 b_k=128 w_v=128,80 b_v=128",
    "mistral_sliding_scores": "q=96,64 k=128,64",
    "mistral_sliding_scores_finite": "q=96,64 k=128,64",
    "t5_scores": "q=96,64 k=128,64 position_bias=96,128",
    "vit_head_probs": "cls=96,80 w=128,80 b=128",
    "bounded_head": "pred=96,80 w=128,80 b=128 lo= hi=",
    "mistral_sliding_scores_next": "q=96,64 k=128,64",
    "vit_head_probs_next": "cls=96,80 w=128,80 b=128",
    "llama_attention_residual": "attn_output=2,48,80 o_proj=128,80 residual=2,48,128",
    "llama_q_heads": "x=2,48,80 wq=256,80",
    "gemma2_capped_scores": "q=96,64 k=128,64",
    "gpt2_c_attn": "x=2,48,80 weight=80,240 bias=240",
    "deepseek_scores_for_choice": "x=96,80 gate=64,80 correction=64:float32",
    "additive_mask_scores": "q=96,64 k=128,64 mask=96,128",
    "masked_key_scores": "q=2,48,64 k=128,64 key_mask=128",
    "masked_key_scores_next": "q=2,48,64 k=128,64",
    "llama_qkv_heads": "hidden_states=2,48,80 q_proj=256,80 k_proj=128,80 v_proj=128,80",
    "deepseek_kv_compressed": "x=2,48,80 kv_a_proj=576,80",
    "whisper_scaled_query": "x=2,48,80 w=128,80 b=128",
    "whisper_key_heads": "x=2,48,80 w=256,80",
    "gpt2_attn_proj_dropout": "x=96,80 w=80,128 b=128 residual=96,128 seed= offset=",
}
