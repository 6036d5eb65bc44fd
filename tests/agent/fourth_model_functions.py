"""Fifty functions more, held out until the third fifty had been worked on."""

import torch
import torch.nn.functional as F

from coda_agent.primitives.placed import philox


def llama_attention_residual(attn_output, o_proj, residual):
    bsz, q_len, _ = attn_output.size()
    hidden_states = F.linear(attn_output.reshape(bsz, q_len, -1), o_proj)
    return residual + hidden_states


def llama_q_heads(x, wq):
    b, s, _ = x.shape
    return F.linear(x, wq).view(b, s, -1, 64).transpose(1, 2)


def qwen3_k_norm(x, w, norm_weight, eps: float = 1e-6):
    k = F.linear(x, w).view(x.shape[0], -1, 64)
    variance = k.float().pow(2).mean(-1, keepdim=True)
    k = k.float() * torch.rsqrt(variance + eps)
    return (norm_weight * k.to(x.dtype)).reshape(x.shape[0], -1)


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


def bert_pooled(hidden_states, w, b):
    first_token_tensor = hidden_states[:, 0]
    return torch.tanh(F.linear(first_token_tensor, w, b))


def bert_mlm_decoder(x, w, bias):
    return torch.matmul(x, w.t()) + bias


def cait_layer_scale(x, w, b, gamma, shortcut):
    return shortcut + gamma * F.linear(x, w, b)


def beit_drop_path(x, w, b, keep_mask, shortcut, keep_prob: float = 0.9):
    return shortcut + F.linear(x, w, b).div(keep_prob) * keep_mask


def swin_v2_logit_mlp(x, w, b):
    return 16 * torch.sigmoid(F.linear(x, w, b))


def dit_final_modulate(x, w, b, shift, scale):
    return F.linear(x, w, b) * (1 + scale) + shift


def ddpm_loss_rows(pred, w, b, noise):
    eps = F.linear(pred, w, b)
    return ((eps - noise) ** 2).mean(dim=1)


def edm_denoised(h, w, b, sigma):
    return F.linear(h, w, b) * sigma.view(-1, 1, 1)


def mamba_delta(x, dt_proj, dt_bias):
    delta = F.softplus(F.linear(x, dt_proj, dt_bias))
    return delta


def mamba_discrete_A(x, w, A_log):
    dt = F.softplus((x @ w.T).float())
    return torch.exp(dt * -torch.exp(A_log))


def griffin_decay(x, w, rec, log_lambda, c: float = 8.0):
    gate_a = torch.sigmoid((x @ w.T).float())
    log_a = -c * gate_a * F.softplus(log_lambda)
    a = torch.exp(log_a)
    return a, torch.sqrt(1 - a * a) * rec.float()


def mixtral_routing(x, gate, top_k: int = 2):
    router_logits = F.linear(x, gate)
    routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
    weights, _ = torch.topk(routing_weights, top_k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True)


def deepseek_scores_for_choice(x, gate, correction):
    logits = F.linear(x.float(), gate.float())
    scores = logits.sigmoid()
    return scores, scores + correction.unsqueeze(0)


def qwen_moe_expert_out(h, w2, top_w, shared):
    return shared + top_w * F.linear(h, w2)


def peft_lora_two_products(x, w, lora_a, lora_b):
    return x @ w.T + (x @ lora_a.T) @ lora_b.T


def ia3_scaled(x, w, b, l):
    return F.linear(x, w, b) * l.flatten()


def int8_linear(x, qweight, scale):
    w = qweight.to(x.dtype) * scale[:, None]
    return F.linear(x, w)


def fp8_rowwise_linear(x, w, x_scale, w_scale, b):
    out = torch.matmul(x.float(), w.float().t())
    out = out * x_scale * w_scale
    return (out + b.float()).to(torch.bfloat16)


def dynamic_fp8_rowwise(x, w):
    y = F.linear(x, w).float()
    amax = y.abs().amax(dim=-1, keepdim=True)
    scale = 448.0 / amax.clamp(min=1e-12)
    return (y * scale).to(torch.float8_e4m3fn), scale


def int8_requantise(x, w, scale):
    y = F.linear(x, w).float()
    return torch.clamp(torch.round(y / scale), -128, 127).to(torch.int8)


def group_quant_int4_scales(x, w):
    y = F.linear(x, w).float()
    g = y.reshape(-1, 2, 128)
    scale = g.abs().amax(-1, keepdim=True) / 7.0
    return (torch.round(g / scale).clamp(-8, 7) * scale).reshape(y.shape)


def lm_cross_entropy(h, w, targets):
    logits = F.linear(h, w).float()
    return F.cross_entropy(logits, targets, reduction="none")


def lm_mean_loss(h, w, targets):
    logits = (h @ w.T).float()
    return F.cross_entropy(logits, targets)


def multilabel_bce(h, w, labels):
    logits = F.linear(h, w).float()
    return F.binary_cross_entropy_with_logits(logits, labels.float(), reduction="none").sum(-1)


def clip_contrastive_terms(a, b, logit_scale: float = 14.3):
    logits_per_image = logit_scale * a.float() @ b.float().t()
    return logits_per_image, logits_per_image.logsumexp(dim=-1)


def kl_to_reference(h, w, ref_logp):
    logits = F.linear(h, w).float()
    logp = F.log_softmax(logits, dim=-1)
    return (logp.exp() * (logp - ref_logp)).sum(-1)


def ppo_ratio_loss(h, w, action, lse, old, adv):
    logp = F.linear(h, w).float().gather(1, action[:, None]).squeeze(1) - lse
    ratio = torch.exp(logp - old)
    return -torch.min(ratio * adv, ratio.clamp(0.8, 1.2) * adv)


def simclr_similarity(anchor, positive, temperature: float = 0.5):
    return F.normalize(anchor, dim=-1) @ F.normalize(positive, dim=-1).T / temperature


def swiglu_input_grads(dy, w, gate, up):
    dh = dy @ w
    s = torch.sigmoid(gate.float())
    silu = gate * s
    d_up = dh * silu
    d_gate = dh * up * (s + silu * (1 - s))
    return d_gate.to(dy.dtype), d_up.to(dy.dtype)


def gelu_tanh_backward(dy, w, h):
    h = h.float()
    inner = 0.7978845608 * (h + 0.044715 * h**3)
    t = torch.tanh(inner)
    dg = 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * 0.7978845608 * (1 + 3 * 0.044715 * h * h)
    return ((dy @ w).float() * dg).to(dy.dtype)


def silu_backward_autograd(dy, w, h):
    grad = dy @ w
    return torch.ops.aten.silu_backward(grad, h)


def linear_weight_grad(dy, x):
    return dy.t() @ x


def layer_norm_dx(dy, w, xhat, rstd, gamma, c1, c2):
    wdy = (dy @ w).float() * gamma
    return (wdy - (xhat * c1[:, None] + c2[:, None])) * rstd[:, None]


def layer_norm_row_terms(dy, w, xhat, gamma):
    wdy = (dy @ w).float() * gamma.float()
    return (xhat.float() * wdy).mean(dim=-1), wdy.mean(dim=-1)


def bernoulli_gate(x, w):
    probs = torch.sigmoid(x @ w.T)
    return torch.bernoulli(probs)


def gumbel_logits(x, w, tau: float = 1.0):
    logits = F.linear(x, w).float()
    u = torch.rand_like(logits)
    return (logits - torch.log(-torch.log(u + 1e-9) + 1e-9)) / tau


def channels_last_pointwise(x, w, b):
    return F.hardtanh(F.linear(x, w, b), 0.0, 6.0)


def rotary_interleaved_k(x, w, freqs_cos, freqs_sin):
    k = F.linear(x, w).float()
    even, odd = k[..., 0::2], k[..., 1::2]
    out = torch.empty_like(k)
    out[..., 0::2] = even * freqs_cos - odd * freqs_sin
    out[..., 1::2] = even * freqs_sin + odd * freqs_cos
    return out.to(x.dtype)


def additive_mask_scores(q, k, mask):
    return torch.baddbmm(mask[None], q[None], k.T[None], beta=1.0, alpha=0.125)[0]


def masked_key_scores(q, k, key_mask):
    scores = q @ k.T
    scores = scores * 0.125 + (1.0 - key_mask) * -10000.0
    return scores


def causal_softmax_stats(q, k):
    s = (q @ k.T).float() * 0.125
    m = s.max(dim=-1).values
    l = torch.exp(s - m[:, None]).sum(-1)
    return s, m, l


def retrieval_best(q, docs):
    sim = q @ docs.T
    return sim.amax(dim=1)


def squared_relu(x, w, b):
    return torch.square(F.relu(F.linear(x, w, b)))


def bilinear_gate(x, w, w2):
    return (x @ w.T) * (x @ w2.T)


def two_layer_mlp(x, w1, w2):
    return F.relu(x @ w1.T) @ w2.T


EXAMPLES = {
    "llama_attention_residual": "attn_output=2,48,80 o_proj=128,80 residual=2,48,128",
    "llama_q_heads": "x=2,48,80 wq=256,80",
    "qwen3_k_norm": "x=96,80 w=256,80 norm_weight=64",
    "gemma2_capped_scores": "q=96,64 k=128,64",
    "gpt2_c_attn": "x=2,48,80 weight=80,240 bias=240",
    "bert_pooled": "hidden_states=8,48,80 w=128,80 b=128",
    "bert_mlm_decoder": "x=96,80 w=512,80 bias=512",
    "cait_layer_scale": "x=2,48,80 w=128,80 b=128 gamma=128 shortcut=2,48,128",
    "beit_drop_path": "x=2,48,80 w=128,80 b=128 keep_mask=2,1,1 shortcut=2,48,128",
    "swin_v2_logit_mlp": "x=96,80 w=128,80 b=128",
    "dit_final_modulate": "x=2,48,80 w=128,80 b=128 shift=2,1,128 scale=2,1,128",
    "ddpm_loss_rows": "pred=96,80 w=128,80 b=128 noise=96,128",
    "edm_denoised": "h=2,48,80 w=128,80 b=128 sigma=2",
    "mamba_delta": "x=2,48,16 dt_proj=128,16 dt_bias=128",
    "mamba_discrete_A": "x=96,80 w=128,80 A_log=128:float32",
    "griffin_decay": "x=96,80 w=128,80 rec=96,128 log_lambda=128:float32",
    "mixtral_routing": "x=96,80 gate=64,80",
    "deepseek_scores_for_choice": "x=96,80 gate=64,80 correction=64:float32",
    "qwen_moe_expert_out": "h=96,80 w2=128,80 top_w=96,1 shared=96,128",
    "peft_lora_two_products": "x=96,80 w=128,80 lora_a=16,80 lora_b=128,16",
    "ia3_scaled": "x=96,80 w=128,80 b=128 l=128",
    "int8_linear": "x=96,80 qweight=128,80:int8 scale=128",
    "fp8_rowwise_linear": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn x_scale=96,1:float32 w_scale=128:float32 b=128",
    "dynamic_fp8_rowwise": "x=96,80 w=256,80",
    "int8_requantise": "x=96,80 w=128,80 scale=128:float32",
    "group_quant_int4_scales": "x=96,80 w=256,80",
    "lm_cross_entropy": "h=96,80 w=512,80 targets=96:int64",
    "lm_mean_loss": "h=96,80 w=512,80 targets=96:int64",
    "multilabel_bce": "h=96,80 w=128,80 labels=96,128",
    "clip_contrastive_terms": "a=96,80 b=128,80",
    "kl_to_reference": "h=96,80 w=512,80 ref_logp=96,512",
    "ppo_ratio_loss": "h=96,80 w=512,80 action=96:int64 lse=96:float32 old=96:float32 adv=96:float32",
    "simclr_similarity": "anchor=96,80 positive=96,80",
    "swiglu_input_grads": "dy=96,80 w=80,128 gate=96,128 up=96,128",
    "gelu_tanh_backward": "dy=96,80 w=80,128 h=96,128",
    "silu_backward_autograd": "dy=96,80 w=80,128 h=96,128",
    "linear_weight_grad": "dy=96,128 x=96,80",
    "layer_norm_dx": "dy=96,80 w=80,128 xhat=96,128 rstd=96:float32 gamma=128 c1=96:float32 c2=96:float32",
    "layer_norm_row_terms": "dy=96,80 w=80,128 xhat=96,128 gamma=128",
    "bernoulli_gate": "x=96,80 w=128,80",
    "gumbel_logits": "x=96,80 w=128,80",
    "channels_last_pointwise": "x=2,8,8,80 w=128,80 b=128",
    "rotary_interleaved_k": "x=96,80 w=256,80 freqs_cos=96,128:float32 freqs_sin=96,128:float32",
    "additive_mask_scores": "q=96,64 k=128,64 mask=96,128",
    "masked_key_scores": "q=2,48,64 k=128,64 key_mask=128",
    "causal_softmax_stats": "q=96,64 k=128,64",
    "retrieval_best": "q=96,80 docs=512,80",
    "squared_relu": "x=96,80 w=128,80 b=128",
    "bilinear_gate": "x=96,80 w=128,80 w2=128,80",
    "two_layer_mlp": "x=96,80 w1=128,80 w2=64,128",
}
"""Shapes of the arguments, as `coda-agent spec new --shape` takes them."""


# What refusals say to do instead, done.


def bert_pooled_next(first_token_tensor, w, b):
    return torch.tanh(F.linear(first_token_tensor, w, b))


def mixtral_routing_next(x, gate):
    router_logits = F.linear(x, gate).float()
    return router_logits, router_logits.logsumexp(-1)


def peft_lora_two_products_next(x, w, xa, lora_b):
    return x @ w.T + xa @ lora_b.T


def int8_linear_next(x, qweight, scale):
    return F.linear(x, qweight * scale[:, None])


def dynamic_fp8_rowwise_next(x, w):
    y = F.linear(x, w).float()
    return y, y.abs().amax(dim=-1)


def int8_requantise_next(x, w, scale):
    y = F.linear(x, w).float()
    return torch.clamp(torch.round(y / scale), -128, 127)


def lm_cross_entropy_next(h, w, targets):
    logits = F.linear(h, w).float()
    return logits.gather(-1, targets[:, None]).squeeze(-1), logits.logsumexp(-1)


def kl_to_reference_next(h, w):
    logits = F.linear(h, w).float()
    return logits, logits.logsumexp(-1)


def simclr_similarity_next(anchor, positive, temperature: float = 0.5):
    return anchor @ positive.T / temperature


def bernoulli_gate_next(x, w, seed, offset):
    probs = torch.sigmoid(x @ w.T)
    return (philox(seed, offset, *probs.shape, device=probs.device) < probs).to(x.dtype)


def gumbel_logits_next(x, w, seed, offset, tau: float = 1.0):
    logits = F.linear(x, w).float()
    u = philox(seed, offset, *logits.shape, device=logits.device).float()
    return (logits - torch.log(-torch.log(u + 1e-9) + 1e-9)) / tau


def masked_key_scores_next(q, k):
    return q @ k.T * 0.125


def causal_softmax_stats_next(q, k):
    s = (q @ k.T).float() * 0.125
    return s, s.max(dim=-1).values


def two_layer_mlp_next(x, w1):
    return F.relu(x @ w1.T)


NEXT = {
    "bert_pooled_next": "first_token_tensor=8,80 w=128,80 b=128",
    "mixtral_routing_next": "x=96,80 gate=64,80",
    "peft_lora_two_products_next": "x=96,80 w=128,80 xa=96,16 lora_b=128,16",
    "int8_linear_next": "x=96,80 qweight=128,80 scale=128",
    "dynamic_fp8_rowwise_next": "x=96,80 w=256,80",
    "int8_requantise_next": "x=96,80 w=128,80 scale=128:float32",
    "lm_cross_entropy_next": "h=96,80 w=512,80 targets=96:int64",
    "kl_to_reference_next": "h=96,80 w=512,80",
    "simclr_similarity_next": "anchor=96,80 positive=96,80",
    "bernoulli_gate_next": "x=96,80 w=128,80 seed= offset=",
    "gumbel_logits_next": "x=96,80 w=128,80 seed= offset=",
    "masked_key_scores_next": "q=2,48,64 k=128,64",
    "causal_softmax_stats_next": "q=96,64 k=128,64",
    "two_layer_mlp_next": "x=96,80 w1=128,80",
}
