"""Fifty functions as people write them in models: what the composer is given in its trial.

Written from the README alone, in each library's own style and layout, before anyone asked the
composer. Each has example shapes in `EXAMPLES`; a type follows a colon, without one it is bfloat16.
"""

import math

import torch
import torch.nn.functional as F

# Language models: Hugging Face transformers and the models' own code.


def llama_gate_up(x, w_gate, w_up):
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


def llama_gate_up_fused(x, w_gate_up):
    gate, up = F.linear(x, w_gate_up).chunk(2, dim=-1)
    return F.silu(gate) * up


def gpt2_mlp_up(x, weight, bias):
    h = torch.addmm(bias, x, weight)
    return (
        0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
    )


def bert_intermediate(hidden_states, weight, bias):
    return F.gelu(F.linear(hidden_states, weight, bias))


def gemma_mlp(x, weight):
    gate, up = (x @ weight.t()).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gemma2_logits(hidden_states, lm_head, softcap=30.0):
    logits = hidden_states @ lm_head.T
    logits = logits / softcap
    logits = torch.tanh(logits)
    return logits * softcap


def nemotron_up(x, weight):
    return F.relu(x @ weight.T).square()


def clip_quick_gelu(x, weight, bias):
    x = F.linear(x, weight, bias)
    return x * torch.sigmoid(1.702 * x)


def attention_output(attn, w_o, residual):
    return residual + F.linear(attn, w_o)


def gptj_parallel_residual(hidden, w_out, b_out, attn_output, residual):
    return F.linear(hidden, w_out, b_out) + attn_output + residual


def gpt_oss_swiglu(x, weight, bias, alpha: float = 1.702, limit: float = 7.0):
    gate_up = F.linear(x, weight, bias)
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def qkv_projection(x, w_qkv, b_qkv):
    qkv = F.linear(x, w_qkv, b_qkv)
    q, k, v = qkv.split([128, 64, 64], dim=-1)
    return q, k, v


def olmo_clip_qkv(x, w_qkv):
    return F.linear(x, w_qkv).clamp(min=-8.0, max=8.0)


def qwen3_q_norm(x, w_q, g):
    q = F.linear(x, w_q).view(x.shape[0], -1, 64)
    q = q.float()
    q = q * torch.rsqrt(q.pow(2).mean(-1, keepdim=True) + 1e-6)
    return (g.float() * q).to(x.dtype).flatten(1)


def llama_rope(x, w_q, cos, sin):
    q = F.linear(x, w_q).view(x.shape[0], -1, 64)
    q1, q2 = q[..., :32], q[..., 32:]
    rotated = torch.cat((-q2, q1), dim=-1)
    return (q * cos[:, None, :] + rotated * sin[:, None, :]).flatten(1)


def residual_and_variance(x, w, residual):
    h = F.linear(x, w) + residual
    return h, h.float().pow(2).mean(dim=-1, keepdim=True)


def delayed_gemma_norm(x, w, inv_rms, g):
    return (F.linear(x, w).float() * inv_rms[:, None] * (1.0 + g.float())).to(x.dtype)


def layer_norm_given_statistics(x, w, mean, rstd, g, b):
    y = F.linear(x, w).float()
    return ((y - mean[:, None]) * rstd[:, None] * g + b).to(x.dtype)


def moe_expert_output(h, w_down, routing_weights):
    return F.linear(h, w_down) * routing_weights[:, None]


def deepseek_router(x, gate_weight, bias):
    scores = F.linear(x.float(), gate_weight.float()).sigmoid()
    return scores, scores + bias


def mixtral_top1_gap(x, gate_weight):
    top = torch.topk(F.linear(x, gate_weight).float(), 2, dim=-1).values
    return top[:, 0] - top[:, 1]


def token_loss(hidden_states, lm_head, labels):
    logits = (hidden_states @ lm_head.T).float()
    return F.cross_entropy(logits, labels, reduction="none")


def palm_z_loss(hidden_states, lm_head):
    logits = (hidden_states @ lm_head.T).float()
    return logits, 1e-4 * torch.logsumexp(logits, dim=-1).square()


def lora_linear(x, weight, xa, lora_B, scaling: float = 2.0):
    return F.linear(x, weight) + scaling * F.linear(xa, lora_B)


def attention_scores(q, k, mask):
    return torch.matmul(q, k.transpose(-2, -1)) / math.sqrt(q.size(-1)) + mask


def causal_scores(q, k):
    scores = q @ k.T * q.shape[-1] ** -0.5
    keep = torch.ones(scores.shape, dtype=torch.bool, device=q.device).tril()
    return scores.masked_fill(~keep, -1e4)


def mamba_dt(x, w_dt, dt_bias):
    return F.softplus(x @ w_dt.T + dt_bias)


def rwkv_channel_mix(k, w_v, r):
    return torch.sigmoid(r) * F.linear(k, w_v)


def gated_attention(h, w_gate, attn):
    return attn * torch.sigmoid(h @ w_gate.T)


# Diffusion: diffusers, DiT, Flux.


def dit_modulated(x, w, b, shift, scale):
    x = F.linear(x, w, b)
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def dit_gated_residual(x, h, w, b, gate):
    return x + gate.unsqueeze(1) * F.linear(h, w, b)


def sd_geglu(hidden_states, weight, bias):
    hidden_states, gate = F.linear(hidden_states, weight, bias).chunk(2, dim=-1)
    return hidden_states * F.gelu(gate)


def unet_attention_rescale(hidden_states, weight, bias, residual, output_scale: float = 1.414):
    return (torch.nn.functional.linear(hidden_states, weight, bias) + residual) / output_scale


def vae_conv1x1_group_norm(x, weight, bias, g, b):
    y = F.linear(x, weight, bias)
    return F.group_norm(y, 4, g, b, eps=1e-6)


# Vision.


def vit_patch_embed(patches, weight, bias, pos_embed):
    return F.linear(patches, weight, bias) + pos_embed


def layer_scale_drop_path(x, h, w, b, gamma, keep):
    return x + keep[:, None] * gamma * F.linear(h, w, b)


def resnet_conv1x1(x, weight, running_mean, running_var, g, b):
    y = torch.einsum("bpk,nk->bpn", x, weight).flatten(0, 1)
    y = F.batch_norm(y, running_mean, running_var, g, b, training=False, eps=1e-5)
    return F.relu(y)


def mobilenet_block(x, weight, bias):
    return F.hardswish(F.linear(x, weight, bias))


def clip_logits(image_features, text_features, logit_scale):
    return logit_scale.exp() * image_features @ text_features.t()


def siglip_loss(img, txt, t, b, labels):
    logits = img @ txt.T * t + b
    return -F.logsigmoid(labels * logits).sum(dim=-1)


def vq_distances(z, codebook, zz, cc):
    d = zz[:, None] + cc[None, :] - 2.0 * (z @ codebook.T).float()
    return d, d.amin(dim=-1)


def segmentation_head(x, weight, bias):
    return F.leaky_relu(F.linear(x, weight, bias), negative_slope=0.1)


def glu_conv(x, weight, bias):
    return F.glu(F.linear(x, weight, bias), dim=-1)


# Training: torchtitan, Megatron, torchao.


def swiglu_backward(dy, w_down, gate, up):
    dh = dy @ w_down
    sig = torch.sigmoid(gate)
    dup = dh * gate * sig
    dgate = dh * up * sig * (1 + gate * (1 - sig))
    return dgate, dup


def relu_backward_and_bias(dy, w, h):
    dh = (dy @ w) * (h > 0)
    return dh, dh.float().sum(dim=0)


def accumulate_weight_gradient(main_grad, dy, x):
    return main_grad + (dy.t() @ x).float()


def dropout_residual(h, w, residual, u, p: float = 0.1):
    y = F.linear(h, w)
    y = torch.where(u > p, y / (1 - p), torch.zeros_like(y))
    return residual + y


def fp8_linear(x, w, scale_x, scale_w):
    return ((x.float() @ w.float().T) * scale_x[:, None] * scale_w[None, :]).to(torch.bfloat16)


def fp8_quantised_gelu(x, w, scale):
    h = F.gelu(x @ w.T, approximate="tanh").float()
    amax = h.abs().amax(dim=-1)
    return (h * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), amax


def int8_weight_only(x, w_int8, scales):
    return F.linear(x, w_int8.to(x.dtype)) * scales


EXAMPLES = {
    "llama_gate_up": "x=2,48,80 w_gate=128,80 w_up=128,80",
    "llama_gate_up_fused": "x=2,48,80 w_gate_up=256,80",
    "gpt2_mlp_up": "x=96,80 weight=80,128 bias=128",
    "bert_intermediate": "hidden_states=2,48,80 weight=128,80 bias=128",
    "gemma_mlp": "x=96,80 weight=256,80",
    "gemma2_logits": "hidden_states=96,80 lm_head=128,80",
    "nemotron_up": "x=96,80 weight=128,80",
    "clip_quick_gelu": "x=2,48,80 weight=128,80 bias=128",
    "attention_output": "attn=2,48,80 w_o=128,80 residual=2,48,128",
    "gptj_parallel_residual": "hidden=96,80 w_out=128,80 b_out=128 attn_output=96,128 residual=96,128",
    "gpt_oss_swiglu": "x=96,80 weight=256,80 bias=256",
    "qkv_projection": "x=96,80 w_qkv=256,80 b_qkv=256",
    "olmo_clip_qkv": "x=2,48,80 w_qkv=128,80",
    "qwen3_q_norm": "x=96,80 w_q=256,80 g=64",
    "llama_rope": "x=96,80 w_q=256,80 cos=96,64 sin=96,64",
    "residual_and_variance": "x=96,80 w=128,80 residual=96,128",
    "delayed_gemma_norm": "x=96,80 w=128,80 inv_rms=96:float32 g=128",
    "layer_norm_given_statistics": "x=96,80 w=128,80 mean=96:float32 rstd=96:float32 g=128 b=128",
    "moe_expert_output": "h=96,80 w_down=128,80 routing_weights=96",
    "deepseek_router": "x=96,80 gate_weight=128,80 bias=128:float32",
    "mixtral_top1_gap": "x=96,80 gate_weight=16,80",
    "token_loss": "hidden_states=96,80 lm_head=128,80 labels=96:int64",
    "palm_z_loss": "hidden_states=96,80 lm_head=128,80",
    "lora_linear": "x=96,80 weight=128,80 xa=96,16 lora_B=128,16",
    "attention_scores": "q=96,80 k=128,80 mask=96,128",
    "causal_scores": "q=96,80 k=96,80",
    "mamba_dt": "x=96,80 w_dt=128,80 dt_bias=128",
    "rwkv_channel_mix": "k=96,80 w_v=128,80 r=96,128",
    "gated_attention": "h=2,48,80 w_gate=128,80 attn=2,48,128",
    "dit_modulated": "x=2,48,80 w=128,80 b=128 shift=2,128 scale=2,128",
    "dit_gated_residual": "x=2,48,128 h=2,48,80 w=128,80 b=128 gate=2,128",
    "sd_geglu": "hidden_states=2,48,80 weight=256,80 bias=256",
    "unet_attention_rescale": "hidden_states=2,48,80 weight=128,80 bias=128 residual=2,48,128",
    "vae_conv1x1_group_norm": "x=96,80 weight=128,80 bias=128 g=128 b=128",
    "vit_patch_embed": "patches=2,48,80 weight=128,80 bias=128 pos_embed=48,128",
    "layer_scale_drop_path": "x=96,128 h=96,80 w=128,80 b=128 gamma=128 keep=96",
    "resnet_conv1x1": "x=2,48,80 weight=128,80 running_mean=128:float32 running_var=128:float32"
    " g=128:float32 b=128:float32",
    "mobilenet_block": "x=96,80 weight=128,80 bias=128",
    "clip_logits": "image_features=96,80 text_features=128,80 logit_scale=:float32",
    "siglip_loss": "img=96,80 txt=128,80 t=:float32 b=:float32 labels=96,128",
    "vq_distances": "z=96,80 codebook=128,80 zz=96:float32 cc=128:float32",
    "segmentation_head": "x=2,48,80 weight=128,80 bias=128",
    "glu_conv": "x=2,48,80 weight=256,80 bias=256",
    "swiglu_backward": "dy=96,80 w_down=80,128 gate=96,128 up=96,128",
    "relu_backward_and_bias": "dy=96,80 w=80,128 h=96,128",
    "accumulate_weight_gradient": "main_grad=96,128:float32 dy=80,96 x=80,128",
    "dropout_residual": "h=96,80 w=128,80 residual=96,128 u=96,128:float32",
    "fp8_linear": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn scale_x=96:float32 scale_w=128:float32",
    "fp8_quantised_gelu": "x=96,80 w=128,80 scale=:float32",
    "int8_weight_only": "x=96,80 w_int8=128,80:int8 scales=128",
}
"""Shapes of the arguments, as `coda-agent spec new --shape` takes them."""
