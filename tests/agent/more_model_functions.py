"""Fifty more functions of models, kept apart until the first fifty had been worked on: how far that carries."""

import torch
import torch.nn.functional as F


def nanogpt_fc(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def t5_gated_dense(x, wi_0, wi_1):
    hidden_gelu = F.gelu(x @ wi_0.T, approximate="tanh")
    hidden_linear = x @ wi_1.T
    return hidden_gelu * hidden_linear


def phi3_mlp(x, gate_up_proj):
    up_states = F.linear(x, gate_up_proj)
    gate, up_states = up_states.chunk(2, dim=-1)
    return up_states * F.silu(gate)


def gpt_neox_qkv(x, w, b):
    q, k, v = F.linear(x, w, b).chunk(3, dim=-1)
    return q, k, v


def residual_dropout_eval(x, h, w, b):
    return x + F.dropout(F.linear(h, w, b), 0.1, training=False)


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


def cosine_attention_q(x, w):
    q = F.linear(x, w).unflatten(-1, (-1, 64))
    return F.normalize(q.float(), dim=-1).flatten(-2).to(x.dtype)


def grok_attention_softcap(q, k, scale: float = 0.088):
    return 30.0 * torch.tanh((q @ k.mT) * scale / 30.0)


def logprob_terms(h, head, labels):
    logits = F.linear(h, head).float()
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1), logits.logsumexp(-1)


def label_smoothing_terms(h, head):
    logits = F.linear(h, head).float()
    return torch.logsumexp(logits, -1), logits.mean(-1)


def dpo_token_logprob(h, head, labels, lse):
    logits = F.linear(h, head).float()
    return logits.gather(-1, labels[:, None])[:, 0] - lse


def distillation_kl(h, head, teacher, lse):
    logq = F.linear(h, head).float() - lse[:, None]
    return (teacher * (torch.log(teacher) - logq)).sum(-1)


def token_entropy(h, head, lse):
    logp = F.linear(h, head).float() - lse[:, None]
    return -torch.sum(torch.exp(logp) * logp, dim=-1)


def dit_adaln_modulation(c, w, b):
    return F.linear(c, w, b).chunk(6, dim=1)


def flux_single_block_out(attn, mlp, w, b, gate, residual):
    hidden = torch.cat([attn, mlp], dim=-1)
    return residual + gate * F.linear(hidden, w, b)


def peft_lora_update(result, xa, lora_B, scaling: float = 0.5):
    return torch.addmm(result, xa, lora_B.t(), alpha=scaling)


def fp8_scaled_mm(x, w, scale_a, scale_b):
    return (x.to(torch.float32) @ w.to(torch.float32).t() * (scale_a * scale_b)).bfloat16()


def fp8_blockwise_output(x, w):
    y = F.linear(x, w).float()
    blocks = y.view(y.shape[0], -1, 128)
    scale = blocks.abs().amax(dim=-1).clamp(min=1e-4) / 448.0
    quantised = (blocks / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return quantised.view_as(y), scale


def kv_cache_fp8(x, w, scale):
    return (F.linear(x, w).float() / scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def dropout_given_mask(h, w, mask, p: float = 0.2):
    return F.linear(h, w) * mask / (1.0 - p)


def mixtral_weighted_expert(h, w2, weights):
    return (h @ w2.t()) * weights.unsqueeze(-1)


def mpt_alibi(q, k, pos_q, pos_k, slope):
    return q @ k.t() * q.new_tensor(0.125) + slope * (pos_k - pos_q[:, None])


def swin_scores(q, k, bias, scale: float = 0.17):
    return (q * scale) @ k.transpose(-2, -1) + bias


def flash_probabilities(q, k, m):
    p = torch.exp((q @ k.T).float() - m.unsqueeze(1))
    return p.to(q.dtype), p.sum(dim=1)


def padding_mask(q, k, key_padding):
    scores = (q @ k.T).float()
    return torch.where(key_padding[None, :] > 0, scores, torch.full_like(scores, -10.0))


def convnext_pw1(x, w, b):
    return F.gelu(F.linear(x, w, b))


def convnext_pw2(x, h, w, b, gamma):
    return x + gamma * F.linear(h, w, b)


def relu6_conv(x, w, b):
    return F.relu6(F.linear(x, w, b))


def squeeze_excite(x, s, w, b):
    return x * F.hardsigmoid(F.linear(s, w, b))


def inference_batch_norm(x, w, mean, inv_std, g, b):
    y = x @ w
    return F.relu((y - mean) * inv_std * g + b)


def yolo_mish(x, w, b):
    return F.mish(x @ w + b)


def info_nce(a, b, temperature: float = 0.07):
    logits = (a @ b.t()).float() / temperature
    return logits, torch.logsumexp(logits, dim=1)


def mae_loss(h, w, b, target):
    pred = F.linear(h, w, b)
    return F.mse_loss(pred.float(), target.float(), reduction="none").mean(dim=-1)


def smooth_l1_rows(h, w, target):
    return F.smooth_l1_loss((h @ w.T).float(), target.float(), reduction="none").sum(dim=-1)


def gelu_backward(dy, w, h):
    h = h.float()
    cdf = 0.5 * (1.0 + torch.erf(h * 0.7071067811865476))
    pdf = torch.exp(-0.5 * h**2) * 0.3989422804014327
    return ((dy @ w).float() * (cdf + h * pdf)).to(dy.dtype)


def geglu_backward(dy, w, gate, up):
    dh = dy @ w
    with torch.no_grad():
        act = F.relu(gate)
    return dh * up * (gate > 0).to(dh.dtype), dh * act


def rms_norm_backward(dy, w, x, rstd, g, c):
    dx_hat = (dy @ w).float() * g
    x_hat = x.float() * rstd[:, None]
    return ((dx_hat - x_hat * c[:, None]) * rstd[:, None]).to(x.dtype)


def input_and_bias_gradient(dy, w):
    dx = dy @ w
    return dx, dx.sum(0)


def weight_gradient_into(grad, dy, x):
    return torch.addmm(grad, dy.t(), x)


def mamba2_dt(x, w, bias, dt_min: float = 0.001, dt_max: float = 0.1):
    return F.softplus(F.linear(x, w) + bias).clamp(dt_min, dt_max)


def selu_layer(x, w, b):
    return F.selu(F.linear(x, w, b))


def prelu_layer(x, w, a):
    y = x @ w.T
    return torch.where(y >= 0, y, a * y)


def rwkv_decay(x, w, base):
    return torch.exp(-torch.exp(base + (x @ w.T).float()))


def torchtitan_rope(x, wq, freqs_cos, freqs_sin):
    q = (x @ wq.T).float().reshape(x.shape[0], -1, 2)
    q0, q1 = q.unbind(-1)
    rotated = torch.stack([q0 * freqs_cos - q1 * freqs_sin, q0 * freqs_sin + q1 * freqs_cos], -1)
    return rotated.flatten(1).to(x.dtype)


def gptj_rotate(x, wq, cos, sin):
    q = x @ wq.T
    rotated = torch.stack((-q[:, 1::2], q[:, ::2]), dim=-1).flatten(-2)
    return q * cos + rotated * sin


def conformer_glu(x, w, b):
    value, gate = F.linear(x, w, b).chunk(2, dim=-1)
    return value * gate.sigmoid()


def top_expert(x, gate):
    return F.softmax((x @ gate.T).float(), dim=-1).max(dim=-1).values


EXAMPLES = {
    "nanogpt_fc": "x=2,48,80 w=128,80 b=128",
    "t5_gated_dense": "x=2,48,80 wi_0=128,80 wi_1=128,80",
    "phi3_mlp": "x=2,48,80 gate_up_proj=256,80",
    "gpt_neox_qkv": "x=2,48,80 w=192,80 b=192",
    "residual_dropout_eval": "x=2,48,128 h=2,48,80 w=128,80 b=128",
    "rms_statistic": "x=96,80 w=128,80 residual=96,128",
    "layer_norm_moments": "x=96,80 w=128,80 residual=96,128",
    "olmo2_post_norm": "x=96,80 w=128,80 rstd=96:float32 weight=128 residual=96,128",
    "cohere_qk_norm": "x=96,80 w=256,80 g=128:float32",
    "cosine_attention_q": "x=2,48,80 w=256,80",
    "grok_attention_softcap": "q=96,80 k=128,80",
    "logprob_terms": "h=96,80 head=128,80 labels=96:int64",
    "label_smoothing_terms": "h=96,80 head=128,80",
    "dpo_token_logprob": "h=96,80 head=128,80 labels=96:int64 lse=96:float32",
    "distillation_kl": "h=96,80 head=128,80 teacher=96,128:float32 lse=96:float32",
    "token_entropy": "h=96,80 head=128,80 lse=96:float32",
    "dit_adaln_modulation": "c=96,80 w=768,80 b=768",
    "flux_single_block_out": "attn=96,80 mlp=96,320 w=128,400 b=128 gate=128 residual=96,128",
    "peft_lora_update": "result=96,128 xa=96,16 lora_B=128,16",
    "fp8_scaled_mm": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn scale_a= scale_b=",
    "fp8_blockwise_output": "x=96,80 w=256,80",
    "kv_cache_fp8": "x=2,48,80 w=128,80 scale=",
    "dropout_given_mask": "h=96,80 w=128,80 mask=96,128",
    "mixtral_weighted_expert": "h=96,80 w2=128,80 weights=96",
    "mpt_alibi": "q=96,80 k=128,80 pos_q=96:float32 pos_k=128:float32 slope=",
    "swin_scores": "q=96,80 k=128,80 bias=96,128",
    "flash_probabilities": "q=96,80 k=128,80 m=96:float32",
    "padding_mask": "q=96,80 k=128,80 key_padding=128:float32",
    "convnext_pw1": "x=2,7,9,80 w=128,80 b=128",
    "convnext_pw2": "x=2,7,9,128 h=2,7,9,80 w=128,80 b=128 gamma=128",
    "relu6_conv": "x=2,48,80 w=128,80 b=128",
    "squeeze_excite": "x=96,128 s=96,80 w=128,80 b=128",
    "inference_batch_norm": "x=96,80 w=80,128 mean=128 inv_std=128 g=128 b=128",
    "yolo_mish": "x=96,80 w=80,128 b=128",
    "info_nce": "a=96,80 b=128,80",
    "mae_loss": "h=2,48,80 w=128,80 b=128 target=2,48,128",
    "smooth_l1_rows": "h=96,80 w=128,80 target=96,128",
    "gelu_backward": "dy=96,80 w=80,128 h=96,128",
    "geglu_backward": "dy=96,80 w=80,128 gate=96,128 up=96,128",
    "rms_norm_backward": "dy=96,80 w=80,128 x=96,128 rstd=96:float32 g=128:float32 c=96:float32",
    "input_and_bias_gradient": "dy=96,80 w=80,128",
    "weight_gradient_into": "grad=96,128 dy=80,96 x=80,128",
    "mamba2_dt": "x=2,48,80 w=128,80 bias=128",
    "selu_layer": "x=96,80 w=128,80 b=128",
    "prelu_layer": "x=96,80 w=128,80 a=128",
    "rwkv_decay": "x=96,80 w=128,80 base=128:float32",
    "torchtitan_rope": "x=96,80 wq=256,80 freqs_cos=96,128:float32 freqs_sin=96,128:float32",
    "gptj_rotate": "x=96,80 wq=256,80 cos=96,256 sin=96,256",
    "conformer_glu": "x=2,48,80 w=256,80 b=256",
    "top_expert": "x=96,80 gate=128,80",
}
"""Shapes of the arguments, as `coda-agent spec new --shape` takes them."""
