"""Fifty functions as models have them, written before the composer was seen on any."""

import math

import torch
import torch.nn.functional as F

from coda_agent.primitives.placed import philox


def llama_mlp_hidden(x, gate_proj, up_proj):
    return F.silu(F.linear(x, gate_proj)) * F.linear(x, up_proj)


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


def gemma_norm_applied(x, w, rstd, weight):
    output = F.linear(x, w).float() * rstd.unsqueeze(-1)
    output = output * (1.0 + weight.float())
    return output.type_as(x)


def gemma_geglu(x, gate, up):
    return F.gelu(x @ gate.T, approximate="tanh") * (x @ up.T)


def gemma_tied_logits(embedded, table):
    logits = embedded @ table.T
    return 30.0 * torch.tanh(logits.float() / 30.0)


def gpt2_mlp_gelu_new(x, w, b):
    h = x @ w + b
    return (
        0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
    )


def gpt2_mlp_out(x, w, b, residual):
    h = torch.addmm(b, x.view(-1, x.size(-1)), w).view(residual.shape)
    return residual + h


def bert_self_output(hidden, w, b, inp, ln_w, ln_b):
    h = F.linear(hidden, w, b)
    return F.layer_norm(h + inp, (128,), ln_w, ln_b, 1e-12)


def bert_output_with_moments(hidden, w, b, inp):
    h = (F.linear(hidden, w, b) + inp).float()
    return h.to(hidden.dtype), h.mean(-1), h.var(-1, unbiased=False)


def t5_scores(q, k, position_bias):
    scores = torch.matmul(q, k.transpose(-1, -2))
    scores += position_bias
    return scores


def t5_ff_clamped(h, wo, residual):
    out = residual + F.linear(h.to(wo.dtype), wo)
    return out.clamp(min=-64000, max=64000)


def t5_dense_relu(hidden_states, wi):
    return F.linear(hidden_states, wi).relu()


def t5_tied_logits(hidden, embed, model_dim: int = 80):
    hidden = hidden * (model_dim**-0.5)
    return F.linear(hidden, embed)


def vit_embed_positions(x, w, b, pos):
    return F.linear(x, w, b) + pos


def vit_head_probs(cls, w, b):
    return F.linear(cls, w, b).softmax(dim=-1)


def dit_gate_msa(x, w, b, gate_msa, residual):
    return residual + gate_msa.unsqueeze(1) * F.linear(x, w, b)


def dit_modulation_six(c, w, b):
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = F.linear(
        F.silu(c), w, b
    ).chunk(6, dim=1)
    return shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp


def dit_timestep_mlp_in(t_freq, w, b):
    return F.silu(F.linear(t_freq, w, b))


def mamba_in_proj(u, in_proj):
    xz = F.linear(u, in_proj)
    x, z = xz.chunk(2, dim=-1)
    return x, F.silu(z)


def mamba_gated_output(x, w_z, y):
    z = F.linear(x, w_z)
    return y * F.silu(z)


def switch_router_jitter(x, gate, eps: float = 0.01):
    noise = torch.rand_like(x) * 2 * eps + (1 - eps)
    return F.linear(x * noise, gate).float()


def st_moe_z_loss(x, gate):
    router_logits = F.linear(x, gate).float()
    log_z = torch.logsumexp(router_logits, dim=-1)
    return router_logits, log_z**2


def noisy_topk_logits(x, gate, noise, noise_scale):
    clean = F.linear(x, gate)
    return clean + noise * (F.softplus(noise_scale) + 1e-2)


def peft_lora_forward(x, w, x_a, lora_b, scaling: float = 2.0):
    result = F.linear(x, w)
    result = result + F.linear(x_a, lora_b) * scaling
    return result


def adapter_down(x, down, b):
    return F.leaky_relu(F.linear(x, down, b), 0.2)


def dora_rescaled(x, w, magnitude, norm, scaling: float = 0.5):
    mag_norm_scale = (magnitude / norm).view(1, -1)
    return (mag_norm_scale - 1) * F.linear(x, w) * scaling


def fp8_relu_no_casts(x, w):
    return torch.relu(x @ w.T)


def static_fp8_gelu(x, w, inv_scale):
    y = F.gelu(F.linear(x, w)).float()
    return (y * inv_scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fake_quant_4bit(x, w, step: float = 0.1):
    y = x @ w.T
    q = torch.round(y / step).clamp(-8, 7)
    return q * step


def huber_rows(h, w, target):
    return F.huber_loss(F.linear(h, w).float(), target.float(), reduction="none", delta=0.5).mean(
        -1
    )


def reward_scalar(h, w, b):
    return F.linear(h, w, b).squeeze(-1)


def tanh_layer_backward(dy, w, y):
    grad = dy.mm(w)
    grad = grad * (1 - y.pow(2))
    return grad, grad.sum(dim=0)


def linear_weight_grad_batched(dy, x):
    return torch.einsum("bso,bsi->oi", dy, x)


def flash_ds(p, dout, v, delta):
    dp = dout @ v.T
    return p * (dp - delta[:, None])


def dropout_residual_train(x, w, b, p: float = 0.1):
    return F.dropout(F.linear(x, w, b), p=p, training=True)


def prelu_module(x, w, a):
    return F.prelu(F.linear(x, w), a)


def prelu_shared(x, w, b, a):
    y = F.linear(x, w, b)
    return torch.maximum(y, torch.zeros_like(y)) + a * torch.minimum(y, torch.zeros_like(y))


def conv1x1_bn_swish(x, w, b, mean, var, g, beta):
    y = F.linear(x, w, b).float()
    y = (y - mean) / torch.sqrt(var + 1e-3) * g + beta
    return (y * torch.sigmoid(y)).to(x.dtype)


def conv1x1_nchw(x, w, b):
    return F.relu(F.conv2d(x, w, b))


def glu_conformer(x, w, b):
    return F.glu(F.linear(x, w, b), dim=-1)


def rotary_half_q(x, w, cos, sin):
    q = F.linear(x, w).view(96, -1, 64).float()
    q1, q2 = q[..., :32], q[..., 32:]
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat([q1 * c - q2 * s, q2 * c + q1 * s], dim=-1).view(96, -1)


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


def vqvae_nearest(z, codebook, z2, e2):
    d = z2.unsqueeze(1) + e2 - 2 * torch.matmul(z, codebook.t())
    return torch.argmin(d, dim=1)


def gru_update(x, w, b, h_prev):
    z = torch.sigmoid(F.linear(x, w, b))
    return (1 - z) * h_prev


def lstm_cell(x, w, b, c):
    i, f, g, o = F.linear(x, w, b).chunk(4, dim=1)
    c_new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c_new), c_new


def bounded_head(pred, w, b, lo, hi):
    return lo + (hi - lo) * torch.sigmoid(F.linear(pred, w, b))


EXAMPLES = {
    "llama_mlp_hidden": "x=96,80 gate_proj=256,80 up_proj=256,80",
    "llama_logits": "hidden_states=2,48,80 lm_head=512,80",
    "qwen2_qkv": "x=2,48,80 w_q=256,80 b_q=256 w_k=128,80 b_k=128 w_v=128,80 b_v=128",
    "mistral_sliding_scores": "q=96,64 k=128,64",
    "mistral_sliding_scores_finite": "q=96,64 k=128,64",
    "gemma_norm_applied": "x=96,80 w=128,80 rstd=96:float32 weight=128",
    "gemma_geglu": "x=2,48,80 gate=256,80 up=256,80",
    "gemma_tied_logits": "embedded=96,80 table=512,80",
    "gpt2_mlp_gelu_new": "x=2,48,80 w=80,320 b=320",
    "gpt2_mlp_out": "x=2,48,320 w=320,80 b=80 residual=2,48,80",
    "bert_self_output": "hidden=2,48,80 w=128,80 b=128 inp=2,48,128 ln_w=128 ln_b=128",
    "bert_output_with_moments": "hidden=2,48,80 w=128,80 b=128 inp=2,48,128",
    "t5_scores": "q=96,64 k=128,64 position_bias=96,128",
    "t5_ff_clamped": "h=2,48,80 wo=128,80 residual=2,48,128",
    "t5_dense_relu": "hidden_states=2,48,80 wi=256,80",
    "t5_tied_logits": "hidden=96,80 embed=512,80",
    "vit_embed_positions": "x=2,48,80 w=128,80 b=128 pos=1,48,128",
    "vit_head_probs": "cls=96,80 w=128,80 b=128",
    "dit_gate_msa": "x=2,48,80 w=128,80 b=128 gate_msa=2,128 residual=2,48,128",
    "dit_modulation_six": "c=64,80 w=768,80 b=768",
    "dit_timestep_mlp_in": "t_freq=64,80 w=128,80 b=128",
    "mamba_in_proj": "u=2,48,80 in_proj=512,80",
    "mamba_gated_output": "x=96,80 w_z=128,80 y=96,128",
    "switch_router_jitter": "x=96,80 gate=64,80",
    "st_moe_z_loss": "x=96,80 gate=64,80",
    "noisy_topk_logits": "x=96,80 gate=64,80 noise=96,64 noise_scale=96,64",
    "peft_lora_forward": "x=96,80 w=128,80 x_a=96,16 lora_b=128,16",
    "adapter_down": "x=2,48,80 down=16,80 b=16",
    "dora_rescaled": "x=96,80 w=128,80 magnitude=128 norm=128",
    "fp8_relu_no_casts": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn",
    "static_fp8_gelu": "x=96,80 w=128,80 inv_scale=",
    "fake_quant_4bit": "x=96,80 w=128,80",
    "huber_rows": "h=96,80 w=128,80 target=96,128",
    "reward_scalar": "h=96,80 w=1,80 b=1",
    "tanh_layer_backward": "dy=96,80 w=80,128 y=96,128",
    "linear_weight_grad_batched": "dy=2,48,128 x=2,48,80",
    "flash_ds": "p=96,128 dout=96,80 v=128,80 delta=96:float32",
    "dropout_residual_train": "x=96,80 w=128,80 b=128",
    "prelu_module": "x=96,80 w=128,80 a=128",
    "prelu_shared": "x=96,80 w=128,80 b=128 a=",
    "conv1x1_bn_swish": "x=96,80 w=128,80 b=128 mean=128:float32 var=128:float32 g=128:float32 beta=128:float32",
    "conv1x1_nchw": "x=2,80,8,8 w=128,80,1,1 b=128",
    "glu_conformer": "x=96,80 w=256,80 b=256",
    "rotary_half_q": "x=96,80 w=256,80 cos=96,32:float32 sin=96,32:float32",
    "qk_l2_norm": "x=96,80 w=256,80 eps=",
    "group_norm_tokens": "x=96,80 w=256,80 gamma=256 beta=256",
    "vqvae_nearest": "z=96,80 codebook=512,80 z2=96:float32 e2=512:float32",
    "gru_update": "x=96,80 w=128,80 b=128 h_prev=96,128",
    "lstm_cell": "x=96,80 w=512,80 b=512 c=96,128",
    "bounded_head": "pred=96,80 w=128,80 b=128 lo= hi=",
}
"""Shapes of the arguments, as `coda-agent spec new --shape` takes them."""


# What refusals say to do instead, done.


def mistral_sliding_scores_next(q, k, scale: float = 0.125):
    return q @ k.T * scale


def bert_self_output_next(hidden, w, b, inp):
    h = (F.linear(hidden, w, b) + inp).float()
    return h.to(hidden.dtype), h.mean(-1), (h * h).mean(-1)


def vit_head_probs_next(cls, w, b):
    y = F.linear(cls, w, b).float()
    return y, y.logsumexp(-1)


def dit_modulation_six_next(c, w, b):
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = F.linear(c, w, b).chunk(
        6, dim=1
    )
    return shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp


def switch_router_jitter_next(x, gate):
    return F.linear(x, gate).float()


def st_moe_z_loss_next(x, gate):
    router_logits = F.linear(x, gate).float()
    log_z = torch.logsumexp(router_logits, dim=-1)
    return router_logits, log_z


def fp8_relu_no_casts_next(x, w):
    return torch.relu(x.float() @ w.float().T)


def reward_scalar_next(h, w, b):
    return F.linear(h, w, b).squeeze(-1)


def dropout_residual_train_next(x, w, b, seed, offset, p: float = 0.1):
    y = F.linear(x, w, b)
    u = philox(seed, offset, *y.shape, device=y.device)
    return y * (u >= p) / (1 - p)


def conv1x1_nchw_next(x, w, b):
    return F.relu(F.linear(x, w, b))


def vqvae_nearest_next(z, codebook, z2, e2):
    return z2.unsqueeze(1) + e2 - 2 * torch.matmul(z, codebook.t())


def lstm_cell_next(x, w, b):
    return F.linear(x, w, b)


def rotary_half_q_next(x, w, cos, sin):
    q = F.linear(x, w).view(x.shape[0], -1, 64).float()
    q1, q2 = q[..., :32], q[..., 32:]
    c, s = cos[:, None, :], sin[:, None, :]
    return torch.cat([q1 * c - q2 * s, q2 * c + q1 * s], dim=-1).view(x.shape[0], -1)


NEXT = {
    "rotary_half_q_next": "x=96,80 w=256,80 cos=96,32:float32 sin=96,32:float32",
    "mistral_sliding_scores_next": "q=96,64 k=128,64",
    "bert_self_output_next": "hidden=2,48,80 w=128,80 b=128 inp=2,48,128",
    "vit_head_probs_next": "cls=96,80 w=128,80 b=128",
    "dit_modulation_six_next": "c=64,80 w=768,80 b=768",
    "switch_router_jitter_next": "x=96,80 gate=64,80",
    "st_moe_z_loss_next": "x=96,80 gate=64,80",
    "fp8_relu_no_casts_next": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn",
    "reward_scalar_next": "h=96,80 w=16,80 b=16",
    "dropout_residual_train_next": "x=96,80 w=128,80 b=128 seed= offset=",
    "conv1x1_nchw_next": "x=2,8,8,80 w=128,80 b=128",
    "vqvae_nearest_next": "z=96,80 codebook=512,80 z2=96:float32 e2=512:float32",
    "lstm_cell_next": "x=96,80 w=512,80 b=512",
}
