"""Logits, losses and routers, as models have them; `EXAMPLES` has shapes."""

import torch
import torch.nn.functional as F


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


def resnet_conv1x1(x, weight, running_mean, running_var, g, b):
    y = torch.einsum("bpk,nk->bpn", x, weight).flatten(0, 1)
    y = F.batch_norm(y, running_mean, running_var, g, b, training=False, eps=1e-5)
    return F.relu(y)


def clip_logits(image_features, text_features, logit_scale):
    return logit_scale.exp() * image_features @ text_features.t()


def siglip_loss(img, txt, t, b, labels):
    logits = img @ txt.T * t + b
    return -F.logsigmoid(labels * logits).sum(dim=-1)


def logprob_terms(h, head, labels):
    logits = F.linear(h, head).float()
    return logits.gather(-1, labels.unsqueeze(-1)).squeeze(-1), logits.logsumexp(-1)


def dpo_token_logprob(h, head, labels, lse):
    logits = F.linear(h, head).float()
    return logits.gather(-1, labels[:, None])[:, 0] - lse


def distillation_kl(h, head, teacher, lse):
    logq = F.linear(h, head).float() - lse[:, None]
    return (teacher * (torch.log(teacher) - logq)).sum(-1)


def token_entropy(h, head, lse):
    logp = F.linear(h, head).float() - lse[:, None]
    return -torch.sum(torch.exp(logp) * logp, dim=-1)


def mixtral_weighted_expert(h, w2, weights):
    return (h @ w2.t()) * weights.unsqueeze(-1)


def info_nce(a, b, temperature: float = 0.07):
    logits = (a @ b.t()).float() / temperature
    return logits, torch.logsumexp(logits, dim=1)


def mae_loss(h, w, b, target):
    pred = F.linear(h, w, b)
    return F.mse_loss(pred.float(), target.float(), reduction="none").mean(dim=-1)


def smooth_l1_rows(h, w, target):
    return F.smooth_l1_loss((h @ w.T).float(), target.float(), reduction="none").sum(dim=-1)


def top_expert(x, gate):
    return F.softmax((x @ gate.T).float(), dim=-1).max(dim=-1).values


def switch_router_jitter(x, gate, eps: float = 0.01):
    noise = torch.rand_like(x) * 2 * eps + (1 - eps)
    return F.linear(x * noise, gate).float()


def st_moe_z_loss(x, gate):
    router_logits = F.linear(x, gate).float()
    log_z = torch.logsumexp(router_logits, dim=-1)
    return router_logits, log_z**2


def huber_rows(h, w, target):
    return F.huber_loss(F.linear(h, w).float(), target.float(), reduction="none", delta=0.5).mean(
        -1
    )


def reward_scalar(h, w, b):
    return F.linear(h, w, b).squeeze(-1)


def switch_router_jitter_next(x, gate):
    return F.linear(x, gate).float()


def st_moe_z_loss_next(x, gate):
    router_logits = F.linear(x, gate).float()
    log_z = torch.logsumexp(router_logits, dim=-1)
    return router_logits, log_z


def reward_scalar_next(h, w, b):
    return F.linear(h, w, b).squeeze(-1)


def ddpm_loss_rows(pred, w, b, noise):
    eps = F.linear(pred, w, b)
    return ((eps - noise) ** 2).mean(dim=1)


def mixtral_routing(x, gate, top_k: int = 2):
    router_logits = F.linear(x, gate)
    routing_weights = F.softmax(router_logits, dim=1, dtype=torch.float)
    weights, _ = torch.topk(routing_weights, top_k, dim=-1)
    return weights / weights.sum(dim=-1, keepdim=True)


def qwen_moe_expert_out(h, w2, top_w, shared):
    return shared + top_w * F.linear(h, w2)


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


def causal_softmax_stats(q, k):
    s = (q @ k.T).float() * 0.125
    m = s.max(dim=-1).values
    l = torch.exp(s - m[:, None]).sum(-1)
    return s, m, l


def lm_cross_entropy_next(h, w, targets):
    logits = F.linear(h, w).float()
    return logits.gather(-1, targets[:, None]).squeeze(-1), logits.logsumexp(-1)


def simclr_similarity_next(anchor, positive, temperature: float = 0.5):
    return anchor @ positive.T / temperature


def causal_softmax_stats_next(q, k):
    s = (q @ k.T).float() * 0.125
    return s, s.max(dim=-1).values


def qwen3_moe_router(hidden_states, gate):
    _, _, hidden_dim = hidden_states.shape
    hidden_states = hidden_states.view(-1, hidden_dim)
    router_logits = F.linear(hidden_states, gate)
    return router_logits


def deepseek_expert_accumulate(h, w_down, topk_weight, out):
    return out + (h @ w_down.T) * topk_weight[:, None]


def siglip_patch_embed(patches, w, b, position_embeddings):
    x = F.linear(patches, w, b)
    return x + position_embeddings.unsqueeze(0)


def siglip_pair_loss(img, txt, logit_scale, logit_bias):
    logits = img @ txt.t() * logit_scale.exp() + logit_bias
    n = torch.arange(logits.shape[0], device=logits.device)
    m = torch.arange(logits.shape[1], device=logits.device)
    labels = 2.0 * (n[:, None] == m[None, :]) - 1.0
    return -F.logsigmoid(labels * logits.float()).sum(-1)


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


def softmax_ds(dout, v, p, delta, scale: float = 0.125):
    return (p.float() * ((dout @ v.T).float() - delta.unsqueeze(-1)) * scale).to(dout.dtype)


def lm_loss_per_token_next(h, lm_head, labels):
    logits = F.linear(h, lm_head).float()
    return torch.logsumexp(logits, -1), logits.gather(-1, labels[:, None])[:, 0]


EXAMPLES = {
    "moe_expert_output": "h=96,80 w_down=128,80 routing_weights=96",
    "deepseek_router": "x=96,80 gate_weight=128,80 bias=128:float32",
    "mixtral_top1_gap": "x=96,80 gate_weight=16,80",
    "token_loss": "hidden_states=96,80 lm_head=128,80 labels=96:int64",
    "palm_z_loss": "hidden_states=96,80 lm_head=128,80",
    "resnet_conv1x1": "x=2,48,80 weight=128,80 running_mean=128:float32 running_var=128:float32 g=128:float32 b=128:float32",
    "clip_logits": "image_features=96,80 text_features=128,80 logit_scale=:float32",
    "siglip_loss": "img=96,80 txt=128,80 t=:float32 b=:float32 labels=96,128",
    "logprob_terms": "h=96,80 head=128,80 labels=96:int64",
    "dpo_token_logprob": "h=96,80 head=128,80 labels=96:int64 lse=96:float32",
    "distillation_kl": "h=96,80 head=128,80 teacher=96,128:float32 lse=96:float32",
    "token_entropy": "h=96,80 head=128,80 lse=96:float32",
    "mixtral_weighted_expert": "h=96,80 w2=128,80 weights=96",
    "info_nce": "a=96,80 b=128,80",
    "mae_loss": "h=2,48,80 w=128,80 b=128 target=2,48,128",
    "smooth_l1_rows": "h=96,80 w=128,80 target=96,128",
    "top_expert": "x=96,80 gate=128,80",
    "switch_router_jitter": "x=96,80 gate=64,80",
    "st_moe_z_loss": "x=96,80 gate=64,80",
    "huber_rows": "h=96,80 w=128,80 target=96,128",
    "reward_scalar": "h=96,80 w=1,80 b=1",
    "switch_router_jitter_next": "x=96,80 gate=64,80",
    "st_moe_z_loss_next": "x=96,80 gate=64,80",
    "reward_scalar_next": "h=96,80 w=16,80 b=16",
    "ddpm_loss_rows": "pred=96,80 w=128,80 b=128 noise=96,128",
    "mixtral_routing": "x=96,80 gate=64,80",
    "qwen_moe_expert_out": "h=96,80 w2=128,80 top_w=96,1 shared=96,128",
    "lm_cross_entropy": "h=96,80 w=512,80 targets=96:int64",
    "lm_mean_loss": "h=96,80 w=512,80 targets=96:int64",
    "multilabel_bce": "h=96,80 w=128,80 labels=96,128",
    "clip_contrastive_terms": "a=96,80 b=128,80",
    "kl_to_reference": "h=96,80 w=512,80 ref_logp=96,512",
    "ppo_ratio_loss": "h=96,80 w=512,80 action=96:int64 lse=96:float32 old=96:float32 adv=96:float32",
    "simclr_similarity": "anchor=96,80 positive=96,80",
    "causal_softmax_stats": "q=96,64 k=128,64",
    "lm_cross_entropy_next": "h=96,80 w=512,80 targets=96:int64",
    "simclr_similarity_next": "anchor=96,80 positive=96,80",
    "causal_softmax_stats_next": "q=96,64 k=128,64",
    "qwen3_moe_router": "hidden_states=2,48,80 gate=64,80",
    "deepseek_expert_accumulate": "h=96,80 w_down=128,80 topk_weight=96 out=96,128",
    "siglip_patch_embed": "patches=2,48,80 w=128,80 b=128 position_embeddings=48,128",
    "siglip_pair_loss": "img=96,80 txt=128,80 logit_scale= logit_bias=",
    "lm_loss_per_token": "h=96,80 lm_head=512,80 labels=96:int64",
    "dpo_logp": "h=96,80 lm_head=512,80 labels=96:int64",
    "distill_mse": "h=96,80 w=128,80 teacher=96,128",
    "focal_loss_rows": "h=96,80 w=64,80 b=64 targets=96,64",
    "router_load": "x=96,80 gate=64,80",
    "softmax_ds": "dout=96,64 v=128,64 p=96,128 delta=96:float32",
    "lm_loss_per_token_next": "h=96,80 lm_head=512,80 labels=96:int64",
}
