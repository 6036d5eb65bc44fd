"""Norms and their statistics, before and behind a product, as models have them; `EXAMPLES` has shapes."""

import torch
import torch.nn.functional as F


def qwen3_q_norm(x, w_q, g):
    q = F.linear(x, w_q).view(x.shape[0], -1, 64)
    q = q.float()
    q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (g.float() * q).to(x.dtype).flatten(1)


def delayed_gemma_norm(x, w, inv_rms, g):
    return (F.linear(x, w).float() * inv_rms[:, None] * (1.0 + g.float())).to(x.dtype)


def layer_norm_given_statistics(x, w, mean, rstd, g, b):
    y = F.linear(x, w).float()
    return ((y - mean[:, None]) * rstd[:, None] * g + b).to(x.dtype)


def vae_conv1x1_group_norm(x, weight, bias, g, b):
    y = F.linear(x, weight, bias)
    return F.group_norm(y, 4, g, b, eps=1e-6)


def rms_statistic(x, w, residual, eps: float = 1e-6):
    h = residual + x @ w.T
    return h, torch.rsqrt(h.float().pow(2).mean(-1) + eps)


def layer_norm_moments(x, w, residual):
    h = (residual + x @ w.T).float()
    return h, h.mean(-1), (h * h).mean(-1)


def olmo2_post_norm(x, w, rstd, weight, residual):
    y = (x @ w.T).float() * rstd.unsqueeze(-1)
    return residual + (weight * y.to(x.dtype))


def cohere_qk_norm(x, w, g):
    q = F.linear(x, w).unflatten(-1, (-1, 128)).float()
    mean = q.mean(-1, keepdim=True)
    var = (q - mean).pow(2).mean(-1, keepdim=True)
    return (g * (q - mean) * torch.rsqrt(var + 1e-5)).flatten(-2).to(x.dtype)


def label_smoothing_terms(h, head):
    logits = F.linear(h, head).float()
    return torch.logsumexp(logits, -1), logits.mean(-1)


def inference_batch_norm(x, w, mean, inv_std, g, b):
    y = x @ w
    return F.relu((y - mean) * inv_std * g + b)


def rms_norm_backward(dy, w, x, rstd, g, c):
    dx_hat = (dy @ w).float() * g
    x_hat = x.float() * rstd[:, None]
    return ((dx_hat - x_hat * c[:, None]) * rstd[:, None]).to(x.dtype)


def gemma_norm_applied(x, w, rstd, weight):
    output = F.linear(x, w).float() * rstd.unsqueeze(-1)
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def bert_self_output(hidden, w, b, inp, ln_w, ln_b):
    h = F.linear(hidden, w, b)
    return F.layer_norm(h + inp, (128,), ln_w, ln_b, 1e-12)


def bert_output_with_moments(hidden, w, b, inp):
    h = (F.linear(hidden, w, b) + inp).float()
    return h.to(hidden.dtype), h.mean(-1), h.var(-1, unbiased=False)


def dora_rescaled(x, w, magnitude, norm, scaling: float = 0.5):
    mag_norm_scale = (magnitude / norm).view(1, -1)
    return (mag_norm_scale - 1) * F.linear(x, w) * scaling


def qk_l2_norm(x, w, eps):
    q = (x @ w.T).float().view(x.shape[0], -1, 64)
    q = q / (q.norm(dim=-1, keepdim=True) + eps)
    return q.flatten(1).to(x.dtype)


def group_norm_tokens(x, w, gamma, beta):
    y = F.linear(x, w).float().view(x.shape[0], -1, 32)
    mean = y.mean(-1, keepdim=True)
    var = y.var(-1, keepdim=True, unbiased=False)
    y = ((y - mean) / torch.sqrt(var + 1e-5)).flatten(1)
    return y * gamma + beta


def qwen3_k_norm(x, w, norm_weight, eps: float = 1e-6):
    k = F.linear(x, w).view(x.shape[0], -1, 64)
    variance = k.float().pow(2).mean(-1, keepdim=True)
    k = k.float() * torch.rsqrt(variance + eps)
    return (norm_weight * k.to(x.dtype)).reshape(x.shape[0], -1)


def layer_norm_dx(dy, w, xhat, rstd, gamma, c1, c2):
    wdy = (dy @ w).float() * gamma
    return (wdy - (xhat * c1[:, None] + c2[:, None])) * rstd[:, None]


def layer_norm_row_terms(dy, w, xhat, gamma):
    wdy = (dy @ w).float() * gamma.float()
    return (xhat.float() * wdy).mean(dim=-1), wdy.mean(dim=-1)


def gemma3_q_norm(x, wq, weight, eps: float = 1e-6):
    q = F.linear(x, wq).unflatten(-1, (-1, 128))
    output = q.float() * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + eps)
    output = output * (1.0 + weight.float())
    return output.type_as(q).flatten(-2)


def mamba2_gated_out_statistic(x, w_z, y):
    z = F.linear(x, w_z).float()
    g = y.float() * F.silu(z)
    return g.to(x.dtype), g.pow(2).mean(-1)


def dora_column_scale(x, weight, lora_out, magnitude, weight_norm):
    out = F.linear(x, weight) + lora_out
    return out * (magnitude / weight_norm)


EXAMPLES = {
    "qwen3_q_norm": "x=96,80 w_q=256,80 g=64",
    "delayed_gemma_norm": "x=96,80 w=128,80 inv_rms=96:float32 g=128",
    "layer_norm_given_statistics": "x=96,80 w=128,80 mean=96:float32 rstd=96:float32 g=128 b=128",
    "vae_conv1x1_group_norm": "x=96,80 weight=128,80 bias=128 g=128 b=128",
    "rms_statistic": "x=96,80 w=128,80 residual=96,128",
    "layer_norm_moments": "x=96,80 w=128,80 residual=96,128",
    "olmo2_post_norm": "x=96,80 w=128,80 rstd=96:float32 weight=128 residual=96,128",
    "cohere_qk_norm": "x=96,80 w=256,80 g=128:float32",
    "label_smoothing_terms": "h=96,80 head=128,80",
    "inference_batch_norm": "x=96,80 w=80,128 mean=128 inv_std=128 g=128 b=128",
    "rms_norm_backward": "dy=96,80 w=80,128 x=96,128 rstd=96:float32 g=128:float32 c=96:float32",
    "gemma_norm_applied": "x=96,80 w=128,80 rstd=96:float32 weight=128",
    "bert_self_output": "hidden=2,48,80 w=128,80 b=128 inp=2,48,128 ln_w=128 ln_b=128",
    "bert_output_with_moments": "hidden=2,48,80 w=128,80 b=128 inp=2,48,128",
    "dora_rescaled": "x=96,80 w=128,80 magnitude=128 norm=128",
    "qk_l2_norm": "x=96,80 w=256,80 eps=",
    "group_norm_tokens": "x=96,80 w=256,80 gamma=256 beta=256",
    "qwen3_k_norm": "x=96,80 w=256,80 norm_weight=64",
    "layer_norm_dx": "dy=96,80 w=80,128 xhat=96,128 rstd=96:float32 gamma=128 c1=96:float32 c2=96:float32",
    "layer_norm_row_terms": "dy=96,80 w=80,128 xhat=96,128 gamma=128",
    "gemma3_q_norm": "x=96,80 wq=256,80 weight=128",
    "mamba2_gated_out_statistic": "x=96,80 w_z=256,80 y=96,256",
    "dora_column_scale": "x=96,80 weight=128,80 lora_out=96,128 magnitude=128 weight_norm=128",
}
