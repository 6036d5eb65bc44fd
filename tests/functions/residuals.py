"""Residuals, dropout, adapters and modulation, as models have them; `EXAMPLES` has shapes."""

import torch
import torch.nn.functional as F

from coda_agent.primitives.placed import philox


def gptj_parallel_residual(hidden, w_out, b_out, attn_output, residual):
    return F.linear(hidden, w_out, b_out) + attn_output + residual


def residual_and_variance(x, w, residual):
    h = F.linear(x, w) + residual
    return h, h.float().pow(2).mean(dim=-1, keepdim=True)


def lora_linear(x, weight, xa, lora_B, scaling: float = 2.0):
    return F.linear(x, weight) + scaling * F.linear(xa, lora_B)


def dit_modulated(x, w, b, shift, scale):
    x = F.linear(x, w, b)
    return x * (1 + scale.unsqueeze(1)) + shift.unsqueeze(1)


def layer_scale_drop_path(x, h, w, b, gamma, keep):
    return x + keep[:, None] * gamma * F.linear(h, w, b)


def dropout_residual(h, w, residual, u, p: float = 0.1):
    y = F.linear(h, w)
    y = torch.where(u > p, y / (1 - p), torch.zeros_like(y))
    return residual + y


def residual_dropout_eval(x, h, w, b):
    return x + F.dropout(F.linear(h, w, b), 0.1, training=False)


def dit_adaln_modulation(c, w, b):
    return F.linear(c, w, b).chunk(6, dim=1)


def peft_lora_update(result, xa, lora_B, scaling: float = 0.5):
    return torch.addmm(result, xa, lora_B.t(), alpha=scaling)


def t5_ff_clamped(h, wo, residual):
    out = residual + F.linear(h.to(wo.dtype), wo)
    return out.clamp(min=-64000, max=64000)


def dit_modulation_six(c, w, b):
    shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp = F.linear(
        F.silu(c), w, b
    ).chunk(6, dim=1)
    return shift_msa, scale_msa, gate_msa, shift_mlp, scale_mlp, gate_mlp


def adapter_down(x, down, b):
    return F.leaky_relu(F.linear(x, down, b), 0.2)


def dropout_residual_train(x, w, b, p: float = 0.1):
    return F.dropout(F.linear(x, w, b), p=p, training=True)


def dropout_residual_train_next(x, w, b, seed, offset, p: float = 0.1):
    y = F.linear(x, w, b)
    u = philox(seed, offset, *y.shape, device=y.device)
    return y * (u >= p) / (1 - p)


def cait_layer_scale(x, w, b, gamma, shortcut):
    return shortcut + gamma * F.linear(x, w, b)


def beit_drop_path(x, w, b, keep_mask, shortcut, keep_prob: float = 0.9):
    return shortcut + F.linear(x, w, b).div(keep_prob) * keep_mask


def dit_final_modulate(x, w, b, shift, scale):
    return F.linear(x, w, b) * (1 + scale) + shift


def peft_lora_two_products(x, w, lora_a, lora_b):
    return x @ w.T + (x @ lora_a.T) @ lora_b.T


def peft_lora_two_products_next(x, w, xa, lora_b):
    return x @ w.T + xa @ lora_b.T


def dit_modulation_three(c, w, b):
    shift, scale, gate = F.linear(c, w, b).chunk(3, dim=-1)
    return shift, 1 + scale, gate


def lora_merged_forward(x, weight, lora_A_out, lora_B, bias, lora_alpha: int = 16, r: int = 8):
    result = F.linear(x, weight, bias=bias)
    return result + F.linear(lora_A_out, lora_B) * (lora_alpha / r)


def lora_down(x, lora_A, scaling: float = 0.25):
    return (x @ lora_A.T) * scaling


def bias_gelu_dropout_backward(dy, w, mask, pre, p: float = 0.1):
    dh = (dy @ w) * mask / (1 - p)
    return torch.ops.aten.gelu_backward(dh, pre, approximate="tanh")


def dit_modulation_three_next(c, w, b):
    shift, scale, gate = F.linear(c, w, b).split([128, 128, 128], dim=-1)
    return shift, 1 + scale, gate


EXAMPLES = {
    "gptj_parallel_residual": "hidden=96,80 w_out=128,80 b_out=128 attn_output=96,128 residual=96,128",
    "residual_and_variance": "x=96,80 w=128,80 residual=96,128",
    "lora_linear": "x=96,80 weight=128,80 xa=96,16 lora_B=128,16",
    "dit_modulated": "x=2,48,80 w=128,80 b=128 shift=2,128 scale=2,128",
    "layer_scale_drop_path": "x=96,128 h=96,80 w=128,80 b=128 gamma=128 keep=96",
    "dropout_residual": "h=96,80 w=128,80 residual=96,128 u=96,128:float32",
    "residual_dropout_eval": "x=2,48,128 h=2,48,80 w=128,80 b=128",
    "dit_adaln_modulation": "c=96,80 w=768,80 b=768",
    "peft_lora_update": "result=96,128 xa=96,16 lora_B=128,16",
    "t5_ff_clamped": "h=2,48,80 wo=128,80 residual=2,48,128",
    "dit_modulation_six": "c=64,80 w=768,80 b=768",
    "adapter_down": "x=2,48,80 down=16,80 b=16",
    "dropout_residual_train": "x=96,80 w=128,80 b=128",
    "dropout_residual_train_next": "x=96,80 w=128,80 b=128 seed= offset=",
    "cait_layer_scale": "x=2,48,80 w=128,80 b=128 gamma=128 shortcut=2,48,128",
    "beit_drop_path": "x=2,48,80 w=128,80 b=128 keep_mask=2,1,1 shortcut=2,48,128",
    "dit_final_modulate": "x=2,48,80 w=128,80 b=128 shift=2,1,128 scale=2,1,128",
    "peft_lora_two_products": "x=96,80 w=128,80 lora_a=16,80 lora_b=128,16",
    "peft_lora_two_products_next": "x=96,80 w=128,80 xa=96,16 lora_b=128,16",
    "dit_modulation_three": "c=64,80 w=384,80 b=384",
    "lora_merged_forward": "x=96,80 weight=128,80 lora_A_out=96,16 lora_B=128,16 bias=128",
    "lora_down": "x=2,48,80 lora_A=16,80",
    "bias_gelu_dropout_backward": "dy=96,80 w=80,128 mask=96,128 pre=96,128",
    "dit_modulation_three_next": "c=64,80 w=384,80 b=384",
}
