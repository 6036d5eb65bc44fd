"""8-bit operands, scales and stores, as models have them; `EXAMPLES` has shapes."""

import torch
import torch.nn.functional as F


def fp8_linear(x, w, scale_x, scale_w):
    return ((x.float() @ w.float().T) * scale_x[:, None] * scale_w[None, :]).to(torch.bfloat16)


def fp8_quantised_gelu(x, w, scale):
    h = F.gelu(x @ w.T, approximate="tanh").float()
    amax = h.abs().amax(dim=-1)
    return (h * scale).clamp(-448.0, 448.0).to(torch.float8_e4m3fn), amax


def int8_weight_only(x, w_int8, scales):
    return F.linear(x, w_int8.to(x.dtype)) * scales


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


def fp8_relu_no_casts(x, w):
    return torch.relu(x @ w.T)


def static_fp8_gelu(x, w, inv_scale):
    y = F.gelu(F.linear(x, w)).float()
    return (y * inv_scale).clamp(-448, 448).to(torch.float8_e4m3fn)


def fp8_relu_no_casts_next(x, w):
    return torch.relu(x.float() @ w.float().T)


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


def int8_linear_next(x, qweight, scale):
    return F.linear(x, qweight * scale[:, None])


def dynamic_fp8_rowwise_next(x, w):
    y = F.linear(x, w).float()
    return y, y.abs().amax(dim=-1)


def int8_requantise_next(x, w, scale):
    y = F.linear(x, w).float()
    return torch.clamp(torch.round(y / scale), -128, 127)


def fp8_delayed_scaling(x, w, scale_x, scale_w, scale_out):
    y = x.float() @ w.float().t() * (scale_x * scale_w)
    amax = y.abs().amax(-1)
    y8 = (y * scale_out).clamp(-448.0, 448.0).to(torch.float8_e4m3fn)
    return y8, amax


def fp8_grad_output(dy8, w8, scale_dy, scale_w, act):
    dx = dy8.float() @ w8.float() * scale_dy * scale_w
    return (dx * (act > 0)).to(torch.bfloat16)


def smoothquant_fake_int8(x, w, b, step):
    y = F.linear(x, w, b).float()
    return torch.round(y / step).clamp(-128, 127) * step


def kv_cache_quantised(x, w, k_scale):
    k = F.linear(x, w)
    return (k / k_scale).to(torch.float8_e4m3fn)


EXAMPLES = {
    "fp8_linear": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn scale_x=96:float32 scale_w=128:float32",
    "fp8_quantised_gelu": "x=96,80 w=128,80 scale=:float32",
    "int8_weight_only": "x=96,80 w_int8=128,80:int8 scales=128",
    "fp8_scaled_mm": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn scale_a= scale_b=",
    "fp8_blockwise_output": "x=96,80 w=256,80",
    "kv_cache_fp8": "x=2,48,80 w=128,80 scale=",
    "fp8_relu_no_casts": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn",
    "static_fp8_gelu": "x=96,80 w=128,80 inv_scale=",
    "fp8_relu_no_casts_next": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn",
    "int8_linear": "x=96,80 qweight=128,80:int8 scale=128",
    "fp8_rowwise_linear": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn x_scale=96,1:float32 w_scale=128:float32 b=128",
    "dynamic_fp8_rowwise": "x=96,80 w=256,80",
    "int8_requantise": "x=96,80 w=128,80 scale=128:float32",
    "int8_linear_next": "x=96,80 qweight=128,80 scale=128",
    "dynamic_fp8_rowwise_next": "x=96,80 w=256,80",
    "int8_requantise_next": "x=96,80 w=128,80 scale=128:float32",
    "fp8_delayed_scaling": "x=96,80:float8_e4m3fn w=128,80:float8_e4m3fn scale_x= scale_w= scale_out=",
    "fp8_grad_output": "dy8=96,80:float8_e4m3fn w8=80,128:float8_e4m3fn scale_dy= scale_w= act=96,128",
    "smoothquant_fake_int8": "x=96,80 w=128,80 b=128 step=128:float32",
    "kv_cache_quantised": "x=2,48,80 w=128,80 k_scale=",
}
