"""The suite of `fuse`: functions of one to three products of models.

Each is timed forward, and in both passes, at 4096 rows, with the widths of a real model, in
bfloat16. Gradients are those of all its arguments but tables and indices. Of its arguments
`x` is what the first product takes, w… are weights, (out, in), b… biases, and g… the factors of
norms. `skip` is the residual stream.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.evals.cases import Case, Contender, Setup, Suite, differentiated, operators_of

M, _BATCH, _HEAD, LIMIT = 4096, 4, 128, 0.1
_LETTERS = {"M": (M,), "B": (_BATCH,), "S": (_BATCH, M // _BATCH), "H": (_HEAD,)}
Shapes = Mapping[str, tuple[int, ...]]
CASES: list[Case] = []
PHASES = ("forward", "both")


_ABOUT = """Functions of one to three products with the widths of real models, at 4096 rows, forward
and in both passes. Ours is `fuse(function)`; `evals/functions.py` says what they compute."""


def suite(_: Path) -> Suite:
    """List the functions; means are taken by passes."""
    return Suite("fuse", _ABOUT, CASES, group=passes)


def timed(model: str, shapes: str) -> Callable[[Callable[..., Any]], Callable[..., Any]]:
    """Make a case of the function below, its arguments shaped by `shapes`."""

    def register(function: Callable[..., Any]) -> Callable[..., Any]:
        names = inspect.signature(function).parameters
        sizes = [_shape(text) for text in shapes.split()]
        extents = dict(zip(names, sizes, strict=True))
        for phase in PHASES:
            make = partial(_setup, function, model, extents, phase)
            name = function.__name__ + " both passes" * (phase == "both")
            CASES.append(Case(name, ("ours", "eager", "compile"), make))
        return function

    return register


def _shape(text: str) -> tuple[int, ...]:
    """Read a shape such as `S,3072`, where letters stand for `_LETTERS`."""
    return tuple(x for d in text.split(",") for x in _LETTERS.get(d) or (int(d),))


def passes(case: str) -> str:
    """Name the passes of a case, by which means are taken together."""
    return "both passes" if case.endswith(" both passes") else "forward"


def _setup(
    function: Callable[..., Any], model: str, shapes: Shapes, phase: str, device: str, shrink: int
) -> Setup:
    from coda_agent.fuse import fuse

    torch.manual_seed(0)
    small = {n: tuple(_shrunk(x, shrink) for x in shape) for n, shape in shapes.items()}
    values = {name: _drawn(name, shape, small, device) for name, shape in small.items()}
    wide = {n: x.float() if x.is_floating_point() else x for n, x in values.items()}
    for name, x in (*values.items(), *wide.items()):
        x.requires_grad_(phase == "both" and x.is_floating_point() and name not in ("cos", "sin"))

    def by(way: Callable[..., Any]) -> Callable[[Mapping[str, Tensor]], tuple[Tensor, ...]]:
        def call(t: Mapping[str, Tensor]) -> tuple[Tensor, ...]:
            found = way(*t.values())
            return found if isinstance(found, tuple) else (found,)

        return call if phase == "both" else torch.no_grad()(call)

    def ours() -> Contender:
        call = differentiated(by(fuse(function, dynamic=False)), values, phase)

        def note() -> str:
            count = operators_of(lambda: call(0)).get("coda_agent::kernel", 0)
            return f"widths of {model}; {count} kernels"

        return Contender(call, note=note)

    def other(compiled: bool) -> Contender:
        way = torch.compile(function, dynamic=False) if compiled else function
        return Contender(differentiated(by(way), values, phase))

    makers = {"ours": ours, "eager": partial(other, False), "compile": partial(other, True)}
    return Setup(makers, differentiated(by(function), wide, phase)(0), LIMIT)


def _shrunk(x: int, by: int) -> int:
    """Divide an extent wider than a head, in multiples of that."""
    return x if x <= _HEAD or by == 1 else -(-x // by // _HEAD) * _HEAD


def _drawn(name: str, shape: tuple[int, ...], shapes: Shapes, device: str) -> Tensor:
    if name == "target":
        return torch.randint(0, shapes["w"][0], shape, device=device)
    if name in ("cos", "sin"):
        rows, width = shape
        turns = 10000.0 ** (-torch.arange(0, width, 2, device=device) / width)
        angle = torch.arange(rows, device=device)[:, None] * turns
        return getattr(torch.cat((angle, angle), -1), name)().bfloat16()
    if name.startswith("g"):
        return (torch.rand(shape, device=device) + 0.5).bfloat16()
    spread = shape[-1] ** -0.5 if name[0] in "wb" else 1.0
    return (torch.randn(shape, device=device) * spread).bfloat16()


@timed("Whisper-large", "M,1280 5120,1280 5120")
def gelu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b))


@timed("SigLIP-so400m", "M,1152 4304,1152 4304")
def gelu_tanh(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(x, w, b), approximate="tanh")


@timed("Minitron-4B", "M,3072 9216,3072")
def relu_squared(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)).square()


@timed("Mamba-2.8B", "M,160 5120,160 5120")
def softplus(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.softplus(F.linear(x, w) + b)


@timed("Llama-3-8B", "M,4096 4096,4096 M,4096")
def residual(x: Tensor, w: Tensor, skip: Tensor) -> Tensor:
    return skip + F.linear(x, w)


@timed("DINOv2-large", "M,4096 1024,4096 1024 1024 M,1024")
def layer_scale(x: Tensor, w: Tensor, b: Tensor, g: Tensor, skip: Tensor) -> Tensor:
    return skip + g * F.linear(x, w, b)


@timed("FLUX.1", "S,3072 3072,3072 3072 B,3072 S,3072")
def gated_residual(x: Tensor, w: Tensor, b: Tensor, mix: Tensor, skip: Tensor) -> Tensor:
    return skip + mix[:, None] * F.linear(x, w, b)


@timed("Mistral-7B", "M,4096 14336,4096 14336,4096")
def swiglu(x: Tensor, w_gate: Tensor, w_up: Tensor) -> Tensor:
    return F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)


@timed("Parakeet-1.1B", "M,1024 2048,1024 2048")
def glu(x: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.glu(F.linear(x, w, b))


@timed("Qwen2.5-7B", "M,3584 18944,3584 18944,3584")
def swiglu_amax(x: Tensor, w_gate: Tensor, w_up: Tensor) -> tuple[Tensor, Tensor]:
    y = F.silu(F.linear(x, w_gate)) * F.linear(x, w_up)
    return y, y.abs().amax(-1)


def _rotated(y: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = y.unflatten(-1, (-1, cos.shape[-1]))
    left, right = y.chunk(2, -1)
    return y * cos[:, None] + torch.cat((-right, left), -1) * sin[:, None]


@timed("Llama-3-8B", "M,4096 4096,4096 1024,4096 1024,4096 M,H M,H")
def qkv_rope(
    x: Tensor, w_q: Tensor, w_k: Tensor, w_v: Tensor, cos: Tensor, sin: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    q, k, v = F.linear(x, w_q), F.linear(x, w_k), F.linear(x, w_v)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v


@timed("Qwen2.5-7B", "M,3584 3584,3584 3584 512,3584 512 512,3584 512 M,H M,H")
def qkv_bias_rope(
    x: Tensor, w_q: Tensor, b_q: Tensor, w_k: Tensor, b_k: Tensor, w_v: Tensor, b_v: Tensor,
    cos: Tensor, sin: Tensor,
) -> tuple[Tensor, Tensor, Tensor]:  # fmt: skip
    q, k, v = F.linear(x, w_q, b_q), F.linear(x, w_k, b_k), F.linear(x, w_v, b_v)
    return _rotated(q, cos, sin), _rotated(k, cos, sin), v


@timed("Qwen3-8B", "M,4096 4096,4096 H M,H M,H")
def q_norm_rope(x: Tensor, w: Tensor, g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    q = F.linear(x, w).unflatten(-1, (-1, len(g)))
    return _rotated(F.rms_norm(q, (len(g),), g, 1e-6).flatten(1), cos, sin)


@timed("Mistral-7B", "M,4096 4096,4096 16,4096 4096,16")
def lora(x: Tensor, w: Tensor, w_down: Tensor, w_up: Tensor) -> Tensor:
    return F.linear(x, w) + 2.0 * F.linear(F.linear(x, w_down), w_up)


@timed("Gemma-2-2B", "M,2304 256000,2304")
def softcap(x: Tensor, w: Tensor) -> Tensor:
    return 30.0 * torch.tanh(F.linear(x, w) / 30.0)


@timed("Llama-3-8B", "M,4096 128256,4096 M")
def cross_entropy(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(x, w).float(), target)


@timed("TinyLlama", "M,2048 32000,2048 M")
def log_probability(x: Tensor, w: Tensor, target: Tensor) -> Tensor:
    found = torch.log_softmax(F.linear(x, w).float(), -1)
    return found.gather(-1, target[:, None]).squeeze(-1)


@timed("DeepSeek-V3", "M,7168 256,7168 256")
def router(x: Tensor, w: Tensor, b: Tensor) -> tuple[Tensor, Tensor]:
    scores = torch.sigmoid(F.linear(x, w).float())
    return scores, scores + b


@timed("Llama-3-8B", "M,4096 14336,4096 14336,4096 4096,14336 M,4096")
def swiglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, skip: Tensor) -> Tensor:
    return skip + F.linear(F.silu(F.linear(x, w_gate)) * F.linear(x, w_up), w_down)


@timed("Gemma-2-9B", "M,3584 14336,3584 14336,3584 3584,14336 M,3584")
def geglu_mlp(x: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor, skip: Tensor) -> Tensor:
    gate = F.gelu(F.linear(x, w_gate), approximate="tanh")
    return skip + F.linear(gate * F.linear(x, w_up), w_down)


@timed("GPT-2-XL", "M,1600 6400,1600 6400 1600,6400 1600 M,1600")
def gelu_mlp(
    x: Tensor, w_up: Tensor, b_up: Tensor, w_down: Tensor, b_down: Tensor, skip: Tensor
) -> Tensor:
    return skip + F.linear(F.gelu(F.linear(x, w_up, b_up)), w_down, b_down)


@timed("Mistral-7B", "M,4096 4096,4096 M,4096 4096 6144,4096")
def norm_projection(
    x: Tensor, w_o: Tensor, skip: Tensor, g: Tensor, w: Tensor
) -> tuple[Tensor, ...]:
    h = skip + F.linear(x, w_o)
    return h, F.linear(F.rms_norm(h, g.shape, g, 1e-5), w)


@timed("TinyLlama", "M,2048 2048,2048 M,2048 2048 5632,2048 5632,2048 2048,5632")
def norm_swiglu_mlp(
    x: Tensor, w_o: Tensor, skip: Tensor, g: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor
) -> Tensor:
    h = skip + F.linear(x, w_o)
    return swiglu_mlp(F.rms_norm(h, g.shape, g, 1e-5), w_gate, w_up, w_down, h)


@timed("ViT-large", "M,1024 1024,1024 1024 M,1024 1024 1024 4096,1024 4096")
def layer_norm_gelu(
    x: Tensor, w_o: Tensor, b_o: Tensor, skip: Tensor, g: Tensor, b: Tensor, w: Tensor, b_up: Tensor
) -> tuple[Tensor, Tensor]:
    h = skip + F.linear(x, w_o, b_o)
    return h, gelu(F.layer_norm(h, g.shape, g, b, 1e-6), w, b_up)


@timed("DiT-XL", "S,1152 1152,1152 1152 B,1152 S,1152 B,1152 B,1152 4608,1152 4608")
def modulated_gelu(
    x: Tensor, w_o: Tensor, b_o: Tensor, mix: Tensor, skip: Tensor, scale: Tensor, shift: Tensor,
    w: Tensor, b: Tensor,
) -> tuple[Tensor, Tensor]:  # fmt: skip
    h = gated_residual(x, w_o, b_o, mix, skip)
    n = F.layer_norm(h, h.shape[-1:], None, None, 1e-6)
    return h, gelu_tanh(n * (1 + scale[:, None]) + shift[:, None], w, b)


@timed("Gemma-2-9B", "M,4096 3584,4096 3584 M,3584")
def post_norm(x: Tensor, w: Tensor, g: Tensor, skip: Tensor) -> Tensor:
    y = F.linear(x, w).float()
    y = y * torch.rsqrt(y.square().mean(-1, keepdim=True) + 1e-6)
    return skip + (y * (1.0 + g.float())).to(skip.dtype)


@timed("DeepSeek-V3", "M,7168 1536,7168 1536 24576,1536")
def latent(x: Tensor, w_down: Tensor, g: Tensor, w_up: Tensor) -> Tensor:
    return F.linear(F.rms_norm(F.linear(x, w_down), g.shape, g, 1e-6), w_up)


@timed("Pythia-6.9B", "M,4096 4096,4096 4096 M,4096 16384,4096 16384 4096,16384 4096 M,4096")
def parallel_mlp(
    x: Tensor, w_o: Tensor, b_o: Tensor, n: Tensor, w_up: Tensor, b_up: Tensor, w_down: Tensor,
    b_down: Tensor, skip: Tensor,
) -> Tensor:  # fmt: skip
    return gelu_mlp(n, w_up, b_up, w_down, b_down, skip) + F.linear(x, w_o, b_o)


@timed("ModernBERT-large", "M,1024 1024,1024 1024 1024 50368,1024 50368")
def masked_head(
    x: Tensor, w: Tensor, g: Tensor, b: Tensor, w_head: Tensor, b_head: Tensor
) -> Tensor:
    y = F.layer_norm(F.gelu(F.linear(x, w)), g.shape, g, b, 1e-5)
    return F.linear(y, w_head, b_head)


@timed("RWKV-6-3B", "M,2560 M,2560 2560,2560 8960,2560 2560,8960")
def channel_mix(x: Tensor, y: Tensor, w_gate: Tensor, w_up: Tensor, w_down: Tensor) -> Tensor:
    return torch.sigmoid(F.linear(y, w_gate)) * F.linear(relu_squared(x, w_up), w_down)
