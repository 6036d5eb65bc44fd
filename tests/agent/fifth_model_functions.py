"""Fifty functions more, held out until all mends for the other four fifties were made."""

import math

import torch
import torch.nn.functional as F

from coda_agent.primitives.placed import philox

# Llama, Gemma 3, Qwen3, DeepSeek, Mamba 2.


def llama_qkv_heads(hidden_states, q_proj, k_proj, v_proj, head_dim: int = 64):
    b, s, _ = hidden_states.shape
    q = F.linear(hidden_states, q_proj).view(b, s, -1, head_dim).transpose(1, 2)
    k = F.linear(hidden_states, k_proj).view(b, s, -1, head_dim).transpose(1, 2)
    v = F.linear(hidden_states, v_proj).view(b, s, -1, head_dim).transpose(1, 2)
    return q, k, v


def llama_down_proj(x, down_proj, residual):
    return residual + F.linear(x, down_proj)


def llama_rope_q(x, wq, cos, sin, head_dim: int = 128):
    q = F.linear(x, wq).view(x.shape[0], -1, head_dim)
    q1, q2 = q.chunk(2, dim=-1)
    rotated = torch.cat((-q2, q1), dim=-1)
    q = q * cos.unsqueeze(1) + rotated * sin.unsqueeze(1)
    return q.flatten(1)


def gemma3_q_norm(x, wq, weight, eps: float = 1e-6):
    q = F.linear(x, wq).unflatten(-1, (-1, 128))
    output = q.float() * torch.rsqrt(q.float().pow(2).mean(-1, keepdim=True) + eps)
    output = output * (1.0 + weight.float())
    return output.type_as(q).flatten(-2)


def gemma3_embed_logits(hidden, embed, final_logit_softcapping: float = 30.0):
    logits = F.linear(hidden, embed)
    logits = logits / final_logit_softcapping
    logits = torch.tanh(logits)
    return logits * final_logit_softcapping


def qwen3_gate_up(x, gate_up_proj):
    gate, up = F.linear(x, gate_up_proj).chunk(2, dim=-1)
    return F.silu(gate) * up


def qwen3_moe_router(hidden_states, gate):
    _, _, hidden_dim = hidden_states.shape
    hidden_states = hidden_states.view(-1, hidden_dim)
    router_logits = F.linear(hidden_states, gate)
    return router_logits


def deepseek_expert_accumulate(h, w_down, topk_weight, out):
    return out + (h @ w_down.T) * topk_weight[:, None]


def deepseek_sigmoid_router(x, gate, e_score_correction_bias, n_group: int = 4):
    scores = F.linear(x.float(), gate.float()).sigmoid()
    return scores, scores + e_score_correction_bias


def deepseek_kv_compressed(x, kv_a_proj):
    compressed = F.linear(x, kv_a_proj)
    c_kv, k_pe = torch.split(compressed, [512, 64], dim=-1)
    return c_kv, k_pe


def mamba2_in_proj(u, in_proj):
    z, xbc = F.linear(u, in_proj).chunk(2, dim=-1)
    return z * torch.sigmoid(z), xbc


def mamba2_decay(u, w_dt, dt_bias, A_log):
    dt = F.softplus(F.linear(u, w_dt).float() + dt_bias)
    dA = torch.exp(-dt * A_log.exp())
    return dt, dA


def mamba2_gated_out_statistic(x, w_z, y):
    z = F.linear(x, w_z).float()
    g = y.float() * F.silu(z)
    return g.to(x.dtype), g.pow(2).mean(-1)


# ViT, SigLIP, DiT, Flux, Whisper, T5, GPT-2.


def siglip_patch_embed(patches, w, b, position_embeddings):
    x = F.linear(patches, w, b)
    return x + position_embeddings.unsqueeze(0)


def siglip_mlp_fc1(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def siglip_pair_loss(img, txt, logit_scale, logit_bias):
    logits = img @ txt.t() * logit_scale.exp() + logit_bias
    n = torch.arange(logits.shape[0], device=logits.device)
    m = torch.arange(logits.shape[1], device=logits.device)
    labels = 2.0 * (n[:, None] == m[None, :]) - 1.0
    return -F.logsigmoid(labels * logits.float()).sum(-1)


def dit_mlp_residual(h, w, b, gate_mlp, x):
    return x + gate_mlp.unsqueeze(1) * F.linear(h, w, b)


def dit_modulation_three(c, w, b):
    shift, scale, gate = F.linear(c, w, b).chunk(3, dim=-1)
    return shift, 1 + scale, gate


def flux_single_linear1(x_mod, w, b):
    qkv, mlp = torch.split(F.linear(x_mod, w, b), [384, 512], dim=-1)
    return qkv, F.gelu(mlp, approximate="tanh")


def flux_single_linear2(attn, mlp, w, b, gate, x):
    output = F.linear(torch.cat((attn, mlp), 2), w, b)
    return x + gate * output


def flux_final_layer(x, w, b, out_scale: float = 0.3611, out_shift: float = 0.1159):
    return F.linear(x, w, b) * out_scale + out_shift


def whisper_scaled_query(x, w, b, head_dim: int = 64):
    return F.linear(x, w, b) * head_dim**-0.5


def whisper_key_heads(x, w):
    b, t, _ = x.shape
    return F.linear(x, w).view(b, t, -1, 64).permute(0, 2, 3, 1)


def t5_gated_gelu(x, wi_0, wi_1):
    hidden_gelu = 0.5 * F.linear(x, wi_0)
    hidden_linear = F.linear(x, wi_1)
    return hidden_gelu * (1.0 + torch.erf(hidden_gelu * math.sqrt(2.0))) * hidden_linear


def gpt2_attn_proj_dropout(x, w, b, residual, seed, offset, p: float = 0.1):
    y = torch.addmm(b, x, w)
    keep = philox(seed, offset, *y.shape, device=y.device) >= p
    return residual + torch.where(keep, y / (1 - p), 0.0)


def gpt2_conv1d(x, weight, bias):
    nf = weight.shape[1]
    size_out = (*x.size()[:-1], nf)
    x = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return x.view(size_out)


# Adapters, FP8 training, quantised inference.


def lora_merged_forward(x, weight, lora_A_out, lora_B, bias, lora_alpha: int = 16, r: int = 8):
    result = F.linear(x, weight, bias=bias)
    return result + F.linear(lora_A_out, lora_B) * (lora_alpha / r)


def lora_down(x, lora_A, scaling: float = 0.25):
    return (x @ lora_A.T) * scaling


def dora_column_scale(x, weight, lora_out, magnitude, weight_norm):
    out = F.linear(x, weight) + lora_out
    return out * (magnitude / weight_norm)


def fp8_delayed_scaling(x, w, scale_x, scale_w, scale_out):
    y = x.float() @ w.float().t() * (scale_x * scale_w)
    amax = y.abs().amax(-1)
    y8 = (y * scale_out).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return y8, amax


def fp8_grad_output(dy8, w8, scale_dy, scale_w, act):
    dx = dy8.float() @ w8.float() * scale_dy * scale_w
    return (dx * (act > 0)).to(torch.bfloat16)


def fp8_blockwise_store(x, w):
    y = F.linear(x, w).float()
    blocks = y.view(y.shape[0], -1, 128)
    scale = blocks.abs().amax(-1).clamp(min=1e-4) / 448.0
    q = (blocks / scale.unsqueeze(-1)).to(torch.float8_e4m3fn)
    return q.view_as(y), scale


def smoothquant_fake_int8(x, w, b, step):
    y = F.linear(x, w, b).float()
    return torch.round(y / step).clamp(-128, 127) * step


def awq_channel_scaled(x, w, scales, bias):
    return F.linear(x, w) / scales + bias


def kv_cache_quantised(x, w, k_scale):
    k = F.linear(x, w)
    return (k / k_scale).to(torch.float8_e4m3fn)


# Losses and statistics.


def chunked_logits_lse(h, lm_head, labels):
    logits = F.linear(h, lm_head).float()
    target = logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1)
    return target, torch.logsumexp(logits, dim=-1)


def lm_loss_per_token(h, lm_head, labels):
    logits = F.linear(h, lm_head).float()
    return torch.logsumexp(logits, -1) - logits.gather(-1, labels[:, None])[:, 0]


def dpo_logp(h, lm_head, labels, temperature: float = 0.7):
    logits = (h @ lm_head.T).float() / temperature
    return logits.gather(1, labels[:, None])[:, 0], logits.logsumexp(1)


def distill_mse(h, w, teacher):
    student = F.linear(h, w).float()
    return F.mse_loss(student, teacher.float(), reduction="none").mean(dim=-1)


def focal_loss_rows(h, w, b, targets, gamma: float = 2.0):
    logits = F.linear(h, w, b).float()
    p = torch.sigmoid(logits)
    ce = F.binary_cross_entropy_with_logits(logits, targets.float(), reduction="none")
    p_t = p * targets + (1 - p) * (1 - targets)
    return (ce * (1 - p_t) ** gamma).sum(dim=1)


def router_load(x, gate):
    probs = torch.sigmoid(F.linear(x, gate).float())
    return probs, probs.sum(dim=0)


# Backward passes.


def swiglu_mlp_backward(dy, w_down, gate, up):
    dh = (dy @ w_down).float()
    gate, up = gate.float(), up.float()
    sig = torch.sigmoid(gate)
    dgate = dh * up * sig * (1 + gate * (1 - sig))
    dup = dh * gate * sig
    return dgate.to(dy.dtype), dup.to(dy.dtype)


def gelu_backward_exact(dy, w, pre):
    x = pre.float()
    cdf = 0.5 * (1 + torch.erf(x / math.sqrt(2)))
    pdf = torch.exp(-0.5 * x * x) / math.sqrt(2 * math.pi)
    return ((dy @ w).float() * (cdf + x * pdf)).to(dy.dtype)


def relu_squared_backward(dy, w, h):
    return (dy @ w) * 2 * F.relu(h)


def weight_grad_flat(grad_output, x):
    grad_output = grad_output.reshape(-1, grad_output.shape[-1])
    x = x.reshape(-1, x.shape[-1])
    return grad_output.t().mm(x)


def weight_grad_accumulate(dy, x, main_grad):
    return main_grad + (dy.t() @ x).float()


def rms_norm_input_grad(dy, w, x, rstd, g, dot):
    dxn = (dy @ w).float() * g
    xn = x.float() * rstd[:, None]
    return ((dxn - xn * dot[:, None]) * rstd[:, None]).to(dy.dtype)


def softmax_ds(dout, v, p, delta, scale: float = 0.125):
    return (p.float() * ((dout @ v.T).float() - delta.unsqueeze(-1)) * scale).to(dout.dtype)


def bias_gelu_dropout_backward(dy, w, mask, pre, p: float = 0.1):
    dh = (dy @ w) * mask / (1 - p)
    return torch.ops.aten.gelu_backward(dh, pre, approximate="tanh")


def linear_bias_grad(dy, w, y):
    dx = (dy @ w) * (y > 0)
    return dx, dx.float().sum(0)


EXAMPLES = {
    "llama_qkv_heads": "hidden_states=2,48,80 q_proj=256,80 k_proj=128,80 v_proj=128,80",
    "llama_down_proj": "x=2,48,80 down_proj=128,80 residual=2,48,128",
    "llama_rope_q": "x=96,80 wq=256,80 cos=96,128 sin=96,128",
    "gemma3_q_norm": "x=96,80 wq=256,80 weight=128",
    "gemma3_embed_logits": "hidden=96,80 embed=512,80",
    "qwen3_gate_up": "x=2,48,80 gate_up_proj=512,80",
    "qwen3_moe_router": "hidden_states=2,48,80 gate=64,80",
    "deepseek_expert_accumulate": "h=96,80 w_down=128,80 topk_weight=96 out=96,128",
    "deepseek_sigmoid_router": "x=96,80 gate=64,80 e_score_correction_bias=64:float32",
    "deepseek_kv_compressed": "x=2,48,80 kv_a_proj=576,80",
    "mamba2_in_proj": "u=2,48,80 in_proj=512,80",
    "mamba2_decay": "u=2,48,80 w_dt=32,80 dt_bias=32:float32 A_log=32:float32",
    "mamba2_gated_out_statistic": "x=96,80 w_z=256,80 y=96,256",
    "siglip_patch_embed": "patches=2,48,80 w=128,80 b=128 position_embeddings=48,128",
    "siglip_mlp_fc1": "x=2,48,80 w=320,80 b=320",
    "siglip_pair_loss": "img=96,80 txt=128,80 logit_scale= logit_bias=",
    "dit_mlp_residual": "h=2,48,80 w=128,80 b=128 gate_mlp=2,128 x=2,48,128",
    "dit_modulation_three": "c=64,80 w=384,80 b=384",
    "flux_single_linear1": "x_mod=2,48,128 w=896,128 b=896",
    "flux_single_linear2": "attn=2,48,80 mlp=2,48,320 w=128,400 b=128 gate=2,1,128 x=2,48,128",
    "flux_final_layer": "x=2,48,80 w=64,80 b=64",
    "whisper_scaled_query": "x=2,48,80 w=128,80 b=128",
    "whisper_key_heads": "x=2,48,80 w=256,80",
    "t5_gated_gelu": "x=2,48,80 wi_0=256,80 wi_1=256,80",
    "gpt2_attn_proj_dropout": "x=96,80 w=80,128 b=128 residual=96,128 seed= offset=",
    "gpt2_conv1d": "x=2,48,80 weight=80,240 bias=240",
    "lora_merged_forward": "x=96,80 weight=128,80 lora_A_out=96,16 lora_B=128,16 bias=128",
    "lora_down": "x=2,48,80 lora_A=16,80",
    "dora_column_scale": "x=96,80 weight=128,80 lora_out=96,128 magnitude=128 weight_norm=128",
    "fp8_delayed_scaling": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn scale_x= scale_w= scale_out=",
    "fp8_grad_output": "dy8=96,80:float8_e4m3fn w8=80,128:float8_e4m3fn scale_dy= scale_w= act=96,128",
    "fp8_blockwise_store": "x=96,80 w=256,80",
    "smoothquant_fake_int8": "x=96,80 w=128,80 b=128 step=128:float32",
    "awq_channel_scaled": "x=96,80 w=128,80 scales=128 bias=128",
    "kv_cache_quantised": "x=2,48,80 w=128,80 k_scale=",
    "chunked_logits_lse": "h=96,80 lm_head=512,80 labels=96:int64",
    "lm_loss_per_token": "h=96,80 lm_head=512,80 labels=96:int64",
    "dpo_logp": "h=96,80 lm_head=512,80 labels=96:int64",
    "distill_mse": "h=96,80 w=128,80 teacher=96,128",
    "focal_loss_rows": "h=96,80 w=64,80 b=64 targets=96,64",
    "router_load": "x=96,80 gate=64,80",
    "swiglu_mlp_backward": "dy=96,80 w_down=80,128 gate=96,128 up=96,128",
    "gelu_backward_exact": "dy=96,80 w=80,128 pre=96,128",
    "relu_squared_backward": "dy=96,80 w=80,128 h=96,128",
    "weight_grad_flat": "grad_output=2,48,128 x=2,48,80",
    "weight_grad_accumulate": "dy=96,128 x=96,80 main_grad=128,80:float32",
    "rms_norm_input_grad": "dy=96,80 w=80,128 x=96,128 rstd=96:float32 g=128 dot=96:float32",
    "softmax_ds": "dout=96,64 v=128,64 p=96,128 delta=96:float32",
    "bias_gelu_dropout_backward": "dy=96,80 w=80,128 mask=96,128 pre=96,128",
    "linear_bias_grad": "dy=96,80 w=80,128 y=96,128",
}
"""Shapes of the arguments, as `coda-agent spec new --shape` takes them."""


# What refusals say to do instead, done.


def dit_modulation_three_next(c, w, b):
    shift, scale, gate = F.linear(c, w, b).split([128, 128, 128], dim=-1)
    return shift, 1 + scale, gate


def lm_loss_per_token_next(h, lm_head, labels):
    logits = F.linear(h, lm_head).float()
    return torch.logsumexp(logits, -1), logits.gather(-1, labels[:, None])[:, 0]


NEXT = {
    "dit_modulation_three_next": "c=64,80 w=384,80 b=384",
    "lm_loss_per_token_next": "h=96,80 lm_head=512,80 labels=96:int64",
}
