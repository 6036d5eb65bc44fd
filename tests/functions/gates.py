"""Gated units and activations of feed-forward layers, as models have them; `EXAMPLES` has shapes."""

import math

import torch
import torch.nn.functional as F

from coda_agent.primitives.placed import philox


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


def gemma_mlp(x, weight):
    gate, up = (x @ weight.t()).chunk(2, dim=-1)
    return F.gelu(gate, approximate="tanh") * up


def gpt_oss_swiglu(x, weight, bias, alpha: float = 1.702, limit: float = 7.0):
    gate_up = F.linear(x, weight, bias)
    gate, up = gate_up[..., ::2], gate_up[..., 1::2]
    gate = gate.clamp(min=None, max=limit)
    up = up.clamp(min=-limit, max=limit)
    return (up + 1) * (gate * torch.sigmoid(gate * alpha))


def mamba_dt(x, w_dt, dt_bias):
    return F.softplus(x @ w_dt.T + dt_bias)


def rwkv_channel_mix(k, w_v, r):
    return torch.sigmoid(r) * F.linear(k, w_v)


def gated_attention(h, w_gate, attn):
    return attn * torch.sigmoid(h @ w_gate.T)


def dit_gated_residual(x, h, w, b, gate):
    return x + gate.unsqueeze(1) * F.linear(h, w, b)


def sd_geglu(hidden_states, weight, bias):
    hidden_states, gate = F.linear(hidden_states, weight, bias).chunk(2, dim=-1)
    return hidden_states * F.gelu(gate)


def mobilenet_block(x, weight, bias):
    return F.hardswish(F.linear(x, weight, bias))


def glu_conv(x, weight, bias):
    return F.glu(F.linear(x, weight, bias), dim=-1)


def swiglu_backward(dy, w_down, gate, up):
    dh = dy @ w_down
    sig = torch.sigmoid(gate)
    dup = dh * gate * sig
    dgate = dh * up * sig * (1 + gate * (1 - sig))
    return dgate, dup


def t5_gated_dense(x, wi_0, wi_1):
    hidden_gelu = F.gelu(x @ wi_0.T, approximate="tanh")
    hidden_linear = x @ wi_1.T
    return hidden_gelu * hidden_linear


def phi3_mlp(x, gate_up_proj):
    up_states = F.linear(x, gate_up_proj)
    gate, up_states = up_states.chunk(2, dim=-1)
    return up_states * F.silu(gate)


def flux_single_block_out(attn, mlp, w, b, gate, residual):
    hidden = torch.cat([attn, mlp], dim=-1)
    return residual + gate * F.linear(hidden, w, b)


def geglu_backward(dy, w, gate, up):
    dh = dy @ w
    with torch.no_grad():
        act = F.relu(gate)
    return dh * up * (gate > 0).to(dh.dtype), dh * act


def mamba2_dt(x, w, bias, dt_min: float = 0.001, dt_max: float = 0.1):
    return F.softplus(F.linear(x, w) + bias).clamp(dt_min, dt_max)


def rwkv_decay(x, w, base):
    return torch.exp(-torch.exp(base + (x @ w.T).float()))


def conformer_glu(x, w, b):
    value, gate = F.linear(x, w, b).chunk(2, dim=-1)
    return value * gate.sigmoid()


def llama_mlp_hidden(x, gate_proj, up_proj):
    return F.silu(F.linear(x, gate_proj)) * F.linear(x, up_proj)


def gpt2_mlp_gelu_new(x, w, b):
    h = x @ w + b
    return (
        0.5 * h * (1.0 + torch.tanh(math.sqrt(2.0 / math.pi) * (h + 0.044715 * torch.pow(h, 3.0))))
    )


def gpt2_mlp_out(x, w, b, residual):
    h = torch.addmm(b, x.view(-1, x.size(-1)), w).view(residual.shape)
    return residual + h


def dit_gate_msa(x, w, b, gate_msa, residual):
    return residual + gate_msa.unsqueeze(1) * F.linear(x, w, b)


def dit_timestep_mlp_in(t_freq, w, b):
    return F.silu(F.linear(t_freq, w, b))


def mamba_in_proj(u, in_proj):
    xz = F.linear(u, in_proj)
    x, z = xz.chunk(2, dim=-1)
    return x, F.silu(z)


def mamba_gated_output(x, w_z, y):
    z = F.linear(x, w_z)
    return y * F.silu(z)


def noisy_topk_logits(x, gate, noise, noise_scale):
    clean = F.linear(x, gate)
    return clean + noise * (F.softplus(noise_scale) + 1e-2)


def conv1x1_bn_swish(x, w, b, mean, var, g, beta):
    y = F.linear(x, w, b).float()
    y = (y - mean) / torch.sqrt(var + 1e-3) * g + beta
    return (y * torch.sigmoid(y)).to(x.dtype)


def glu_conformer(x, w, b):
    return F.glu(F.linear(x, w, b), dim=-1)


def gru_update(x, w, b, h_prev):
    z = torch.sigmoid(F.linear(x, w, b))
    return (1 - z) * h_prev


def lstm_cell(x, w, b, c):
    i, f, g, o = F.linear(x, w, b).chunk(4, dim=1)
    c_new = torch.sigmoid(f) * c + torch.sigmoid(i) * torch.tanh(g)
    return torch.sigmoid(o) * torch.tanh(c_new), c_new


def lstm_cell_next(x, w, b):
    return F.linear(x, w, b)


def swin_v2_logit_mlp(x, w, b):
    return 16 * torch.sigmoid(F.linear(x, w, b))


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


def swiglu_input_grads(dy, w, gate, up):
    dh = dy @ w
    s = torch.sigmoid(gate.float())
    silu = gate * s
    d_up = dh * silu
    d_gate = dh * up * (s + silu * (1 - s))
    return d_gate.to(dy.dtype), d_up.to(dy.dtype)


def silu_backward_autograd(dy, w, h):
    grad = dy @ w
    return torch.ops.aten.silu_backward(grad, h)


def bernoulli_gate(x, w):
    probs = torch.sigmoid(x @ w.T)
    return torch.bernoulli(probs)


def bilinear_gate(x, w, w2):
    return (x @ w.T) * (x @ w2.T)


def two_layer_mlp(x, w1, w2):
    return F.relu(x @ w1.T) @ w2.T


def bernoulli_gate_next(x, w, seed, offset):
    probs = torch.sigmoid(x @ w.T)
    return (philox(seed, offset, *probs.shape, device=probs.device) < probs).to(x.dtype)


def two_layer_mlp_next(x, w1):
    return F.relu(x @ w1.T)


def mamba2_in_proj(u, in_proj):
    z, xbc = F.linear(u, in_proj).chunk(2, dim=-1)
    return z * torch.sigmoid(z), xbc


def mamba2_decay(u, w_dt, dt_bias, A_log):
    dt = F.softplus(F.linear(u, w_dt).float() + dt_bias)
    dA = torch.exp(-dt * A_log.exp())
    return dt, dA


def flux_single_linear1(x_mod, w, b):
    qkv, mlp = torch.split(F.linear(x_mod, w, b), [384, 512], dim=-1)
    return qkv, F.gelu(mlp, approximate="tanh")


def flux_single_linear2(attn, mlp, w, b, gate, x):
    output = F.linear(torch.cat((attn, mlp), 2), w, b)
    return x + gate * output


def t5_gated_gelu(x, wi_0, wi_1):
    hidden_gelu = 0.5 * F.linear(x, wi_0)
    hidden_linear = F.linear(x, wi_1)
    return hidden_gelu * (1.0 + torch.erf(hidden_gelu * math.sqrt(2.0))) * hidden_linear


def swiglu_mlp_backward(dy, w_down, gate, up):
    dh = (dy @ w_down).float()
    gate, up = gate.float(), up.float()
    sig = torch.sigmoid(gate)
    dgate = dh * up * sig * (1 + gate * (1 - sig))
    dup = dh * gate * sig
    return dgate.to(dy.dtype), dup.to(dy.dtype)


EXAMPLES = {
    "llama_gate_up": "x=2,48,80 w_gate=128,80 w_up=128,80",
    "llama_gate_up_fused": "x=2,48,80 w_gate_up=256,80",
    "gpt2_mlp_up": "x=96,80 weight=80,128 bias=128",
    "gemma_mlp": "x=96,80 weight=256,80",
    "gpt_oss_swiglu": "x=96,80 weight=256,80 bias=256",
    "mamba_dt": "x=96,80 w_dt=128,80 dt_bias=128",
    "rwkv_channel_mix": "k=96,80 w_v=128,80 r=96,128",
    "gated_attention": "h=2,48,80 w_gate=128,80 attn=2,48,128",
    "dit_gated_residual": "x=2,48,128 h=2,48,80 w=128,80 b=128 gate=2,128",
    "sd_geglu": "hidden_states=2,48,80 weight=256,80 bias=256",
    "mobilenet_block": "x=96,80 weight=128,80 bias=128",
    "glu_conv": "x=2,48,80 weight=256,80 bias=256",
    "swiglu_backward": "dy=96,80 w_down=80,128 gate=96,128 up=96,128",
    "t5_gated_dense": "x=2,48,80 wi_0=128,80 wi_1=128,80",
    "phi3_mlp": "x=2,48,80 gate_up_proj=256,80",
    "flux_single_block_out": "attn=96,80 mlp=96,320 w=128,400 b=128 gate=128 residual=96,128",
    "geglu_backward": "dy=96,80 w=80,128 gate=96,128 up=96,128",
    "mamba2_dt": "x=2,48,80 w=128,80 bias=128",
    "rwkv_decay": "x=96,80 w=128,80 base=128:float32",
    "conformer_glu": "x=2,48,80 w=256,80 b=256",
    "llama_mlp_hidden": "x=96,80 gate_proj=256,80 up_proj=256,80",
    "gpt2_mlp_gelu_new": "x=2,48,80 w=80,320 b=320",
    "gpt2_mlp_out": "x=2,48,320 w=320,80 b=80 residual=2,48,80",
    "dit_gate_msa": "x=2,48,80 w=128,80 b=128 gate_msa=2,128 residual=2,48,128",
    "dit_timestep_mlp_in": "t_freq=64,80 w=128,80 b=128",
    "mamba_in_proj": "u=2,48,80 in_proj=512,80",
    "mamba_gated_output": "x=96,80 w_z=128,80 y=96,128",
    "noisy_topk_logits": "x=96,80 gate=64,80 noise=96,64 noise_scale=96,64",
    "conv1x1_bn_swish": "x=96,80 w=128,80 b=128 mean=128:float32 var=128:float32 g=128:float32 beta=128:float32",
    "glu_conformer": "x=96,80 w=256,80 b=256",
    "gru_update": "x=96,80 w=128,80 b=128 h_prev=96,128",
    "lstm_cell": "x=96,80 w=512,80 b=512 c=96,128",
    "lstm_cell_next": "x=96,80 w=512,80 b=512",
    "swin_v2_logit_mlp": "x=96,80 w=128,80 b=128",
    "mamba_delta": "x=2,48,16 dt_proj=128,16 dt_bias=128",
    "mamba_discrete_A": "x=96,80 w=128,80 A_log=128:float32",
    "griffin_decay": "x=96,80 w=128,80 rec=96,128 log_lambda=128:float32",
    "swiglu_input_grads": "dy=96,80 w=80,128 gate=96,128 up=96,128",
    "silu_backward_autograd": "dy=96,80 w=80,128 h=96,128",
    "bernoulli_gate": "x=96,80 w=128,80",
    "bilinear_gate": "x=96,80 w=128,80 w2=128,80",
    "two_layer_mlp": "x=96,80 w1=128,80 w2=64,128",
    "bernoulli_gate_next": "x=96,80 w=128,80 seed= offset=",
    "two_layer_mlp_next": "x=96,80 w1=128,80",
    "mamba2_in_proj": "u=2,48,80 in_proj=512,80",
    "mamba2_decay": "u=2,48,80 w_dt=32,80 dt_bias=32:float32 A_log=32:float32",
    "flux_single_linear1": "x_mod=2,48,128 w=896,128 b=896",
    "flux_single_linear2": "attn=2,48,80 mlp=2,48,320 w=128,400 b=128 gate=2,1,128 x=2,48,128",
    "t5_gated_gelu": "x=2,48,80 wi_0=256,80 wi_1=256,80",
    "swiglu_mlp_backward": "dy=96,80 w_down=80,128 gate=96,128 up=96,128",
}
