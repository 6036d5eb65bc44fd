"""Products with other tails, as models have them; `EXAMPLES` has shapes."""

import math

import torch
import torch.nn.functional as F

from coda_agent.primitives.placed import philox


def bert_intermediate(hidden_states, weight, bias):
    return F.gelu(F.linear(hidden_states, weight, bias))


def nemotron_up(x, weight):
    return F.relu(x @ weight.T).square()


def clip_quick_gelu(x, weight, bias):
    x = F.linear(x, weight, bias)
    return x * torch.sigmoid(1.702 * x)


def vit_patch_embed(patches, weight, bias, pos_embed):
    return F.linear(patches, weight, bias) + pos_embed


def vq_distances(z, codebook, zz, cc):
    d = zz[:, None] + cc[None, :] - 2.0 * (z @ codebook.T).float()
    return d, d.amin(dim=-1)


def relu_backward_and_bias(dy, w, h):
    dh = (dy @ w) * (h > 0)
    return dh, dh.float().sum(dim=0)


def accumulate_weight_gradient(main_grad, dy, x):
    return main_grad + (dy.t() @ x).float()


def nanogpt_fc(x, w, b):
    return F.gelu(F.linear(x, w, b), approximate="tanh")


def flash_probabilities(q, k, m):
    p = torch.exp((q @ k.T).float() - m.unsqueeze(1))
    return p.to(q.dtype), p.sum(dim=1)


def convnext_pw1(x, w, b):
    return F.gelu(F.linear(x, w, b))


def convnext_pw2(x, h, w, b, gamma):
    return x + gamma * F.linear(h, w, b)


def relu6_conv(x, w, b):
    return F.relu6(F.linear(x, w, b))


def squeeze_excite(x, s, w, b):
    return x * F.hardsigmoid(F.linear(s, w, b))


def yolo_mish(x, w, b):
    return F.mish(x @ w + b)


def gelu_backward(dy, w, h):
    h = h.float()
    cdf = 0.5 * (1.0 + torch.erf(h * 0.7071067811865476))
    pdf = torch.exp(-0.5 * h**2) * 0.3989422804014327
    return ((dy @ w).float() * (cdf + h * pdf)).to(dy.dtype)


def input_and_bias_gradient(dy, w):
    dx = dy @ w
    return dx, dx.sum(0)


def weight_gradient_into(grad, dy, x):
    return torch.addmm(grad, dy.t(), x)


def selu_layer(x, w, b):
    return F.selu(F.linear(x, w, b))


def prelu_layer(x, w, a):
    y = x @ w.T
    return torch.where(y >= 0, y, a * y)


def gemma_tied_logits(embedded, table):
    logits = embedded @ table.T
    return 30.0 * torch.tanh(logits.float() / 30.0)


def t5_dense_relu(hidden_states, wi):
    return F.linear(hidden_states, wi).relu()


def t5_tied_logits(hidden, embed, model_dim: int = 80):
    hidden = hidden * (model_dim**-0.5)
    return F.linear(hidden, embed)


def vit_embed_positions(x, w, b, pos):
    return F.linear(x, w, b) + pos


def fake_quant_4bit(x, w, step: float = 0.1):
    y = x @ w.T
    q = torch.round(y / step).clamp(-8, 7)
    return q * step


def tanh_layer_backward(dy, w, y):
    grad = dy.mm(w)
    grad = grad * (1 - y.pow(2))
    return grad, grad.sum(dim=0)


def linear_weight_grad_batched(dy, x):
    return torch.einsum("bso,bsi->oi", dy, x)


def flash_ds(p, dout, v, delta):
    dp = dout @ v.T
    return p * (dp - delta[:, None])


def prelu_module(x, w, a):
    return F.prelu(F.linear(x, w), a)


def prelu_shared(x, w, b, a):
    y = F.linear(x, w, b)
    return torch.maximum(y, torch.zeros_like(y)) + a * torch.minimum(y, torch.zeros_like(y))


def conv1x1_nchw(x, w, b):
    return F.relu(F.conv2d(x, w, b))


def vqvae_nearest(z, codebook, z2, e2):
    d = z2.unsqueeze(1) + e2 - 2 * torch.matmul(z, codebook.t())
    return torch.argmin(d, dim=1)


def bert_self_output_next(hidden, w, b, inp):
    h = (F.linear(hidden, w, b) + inp).float()
    return h.to(hidden.dtype), h.mean(-1), (h * h).mean(-1)


def conv1x1_nchw_next(x, w, b):
    return F.relu(F.linear(x, w, b))


def vqvae_nearest_next(z, codebook, z2, e2):
    return z2.unsqueeze(1) + e2 - 2 * torch.matmul(z, codebook.t())


def bert_pooled(hidden_states, w, b):
    first_token_tensor = hidden_states[:, 0]
    return torch.tanh(F.linear(first_token_tensor, w, b))


def bert_mlm_decoder(x, w, bias):
    return torch.matmul(x, w.t()) + bias


def edm_denoised(h, w, b, sigma):
    return F.linear(h, w, b) * sigma.view(-1, 1, 1)


def ia3_scaled(x, w, b, l):
    return F.linear(x, w, b) * l.flatten()


def group_quant_int4_scales(x, w):
    y = F.linear(x, w).float()
    g = y.reshape(-1, 2, 128)
    scale = g.abs().amax(-1, keepdim=True) / 7.0
    return (torch.round(g / scale).clamp(-8, 7) * scale).reshape(y.shape)


def gelu_tanh_backward(dy, w, h):
    h = h.float()
    inner = 0.7978845608 * (h + 0.044715 * h**3)
    t = torch.tanh(inner)
    dg = 0.5 * (1 + t) + 0.5 * h * (1 - t * t) * 0.7978845608 * (1 + 3 * 0.044715 * h * h)
    return ((dy @ w).float() * dg).to(dy.dtype)


def linear_weight_grad(dy, x):
    return dy.t() @ x


def gumbel_logits(x, w, tau: float = 1.0):
    logits = F.linear(x, w).float()
    u = torch.rand_like(logits)
    return (logits - torch.log(-torch.log(u + 1e-9) + 1e-9)) / tau


def channels_last_pointwise(x, w, b):
    return F.hardtanh(F.linear(x, w, b), 0.0, 6.0)


def retrieval_best(q, docs):
    sim = q @ docs.T
    return sim.amax(dim=1)


def squared_relu(x, w, b):
    return torch.square(F.relu(F.linear(x, w, b)))


def bert_pooled_next(first_token_tensor, w, b):
    return torch.tanh(F.linear(first_token_tensor, w, b))


def gumbel_logits_next(x, w, seed, offset, tau: float = 1.0):
    logits = F.linear(x, w).float()
    u = philox(seed, offset, *logits.shape, device=logits.device).float()
    return (logits - torch.log(-torch.log(u + 1e-9) + 1e-9)) / tau


def gemma3_embed_logits(hidden, embed, final_logit_softcapping: float = 30.0):
    logits = F.linear(hidden, embed)
    logits = logits / final_logit_softcapping
    logits = torch.tanh(logits)
    return logits * final_logit_softcapping


def flux_final_layer(x, w, b, out_scale: float = 0.3611, out_shift: float = 0.1159):
    return F.linear(x, w, b) * out_scale + out_shift


def gpt2_conv1d(x, weight, bias):
    nf = weight.shape[1]
    size_out = (*x.size()[:-1], nf)
    x = torch.addmm(bias, x.view(-1, x.size(-1)), weight)
    return x.view(size_out)


def awq_channel_scaled(x, w, scales, bias):
    return F.linear(x, w) / scales + bias


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


EXAMPLES = {
    "bert_intermediate": "hidden_states=2,48,80 weight=128,80 bias=128",
    "nemotron_up": "x=96,80 weight=128,80",
    "clip_quick_gelu": "x=2,48,80 weight=128,80 bias=128",
    "vit_patch_embed": "patches=2,48,80 weight=128,80 bias=128 pos_embed=48,128",
    "vq_distances": "z=96,80 codebook=128,80 zz=96:float32 cc=128:float32",
    "relu_backward_and_bias": "dy=96,80 w=80,128 h=96,128",
    "accumulate_weight_gradient": "main_grad=96,128:float32 dy=80,96 x=80,128",
    "nanogpt_fc": "x=2,48,80 w=128,80 b=128",
    "flash_probabilities": "q=96,80 k=128,80 m=96:float32",
    "convnext_pw1": "x=2,7,9,80 w=128,80 b=128",
    "convnext_pw2": "x=2,7,9,128 h=2,7,9,80 w=128,80 b=128 gamma=128",
    "relu6_conv": "x=2,48,80 w=128,80 b=128",
    "squeeze_excite": "x=96,128 s=96,80 w=128,80 b=128",
    "yolo_mish": "x=96,80 w=80,128 b=128",
    "gelu_backward": "dy=96,80 w=80,128 h=96,128",
    "input_and_bias_gradient": "dy=96,80 w=80,128",
    "weight_gradient_into": "grad=96,128 dy=80,96 x=80,128",
    "selu_layer": "x=96,80 w=128,80 b=128",
    "prelu_layer": "x=96,80 w=128,80 a=128",
    "gemma_tied_logits": "embedded=96,80 table=512,80",
    "t5_dense_relu": "hidden_states=2,48,80 wi=256,80",
    "t5_tied_logits": "hidden=96,80 embed=512,80",
    "vit_embed_positions": "x=2,48,80 w=128,80 b=128 pos=1,48,128",
    "fake_quant_4bit": "x=96,80 w=128,80",
    "tanh_layer_backward": "dy=96,80 w=80,128 y=96,128",
    "linear_weight_grad_batched": "dy=2,48,128 x=2,48,80",
    "flash_ds": "p=96,128 dout=96,80 v=128,80 delta=96:float32",
    "prelu_module": "x=96,80 w=128,80 a=128",
    "prelu_shared": "x=96,80 w=128,80 b=128 a=",
    "conv1x1_nchw": "x=2,80,8,8 w=128,80,1,1 b=128",
    "vqvae_nearest": "z=96,80 codebook=512,80 z2=96:float32 e2=512:float32",
    "bert_self_output_next": "hidden=2,48,80 w=128,80 b=128 inp=2,48,128",
    "conv1x1_nchw_next": "x=2,8,8,80 w=128,80 b=128",
    "vqvae_nearest_next": "z=96,80 codebook=512,80 z2=96:float32 e2=512:float32",
    "bert_pooled": "hidden_states=8,48,80 w=128,80 b=128",
    "bert_mlm_decoder": "x=96,80 w=512,80 bias=512",
    "edm_denoised": "h=2,48,80 w=128,80 b=128 sigma=2",
    "ia3_scaled": "x=96,80 w=128,80 b=128 l=128",
    "group_quant_int4_scales": "x=96,80 w=256,80",
    "gelu_tanh_backward": "dy=96,80 w=80,128 h=96,128",
    "linear_weight_grad": "dy=96,128 x=96,80",
    "gumbel_logits": "x=96,80 w=128,80",
    "channels_last_pointwise": "x=2,8,8,80 w=128,80 b=128",
    "retrieval_best": "q=96,80 docs=512,80",
    "squared_relu": "x=96,80 w=128,80 b=128",
    "bert_pooled_next": "first_token_tensor=8,80 w=128,80 b=128",
    "gumbel_logits_next": "x=96,80 w=128,80 seed= offset=",
    "gemma3_embed_logits": "hidden=96,80 embed=512,80",
    "flux_final_layer": "x=2,48,80 w=64,80 b=64",
    "gpt2_conv1d": "x=2,48,80 weight=80,240 bias=240",
    "awq_channel_scaled": "x=96,80 w=128,80 scales=128 bias=128",
    "gelu_backward_exact": "dy=96,80 w=80,128 pre=96,128",
    "relu_squared_backward": "dy=96,80 w=80,128 h=96,128",
    "weight_grad_flat": "grad_output=2,48,128 x=2,48,80",
    "weight_grad_accumulate": "dy=96,128 x=96,80 main_grad=128,80:float32",
}
