"""The suite of models: layers of transformers at few tokens and many.

- A case is two layers without embeddings and head: attention, MLP, norms and residuals, in bf16.
  Those of a DiT-B see images of 256 patches whole, and a condition scales, shifts and gates them.
- For inference all compiled contenders have PyTorch's mode "reduce-overhead", hence CUDA graphs,
  and frozen weights, which are packed and turned once. For training they have neither.
- `compile` and `compile, mask folded` are as in `training.py`.
"""

from __future__ import annotations

import copy
import re
from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._inductor import config

from coda_agent.agent.judge.clocks import DeviceClock
from coda_agent.evals.cases import Case, Contender, Setup, Suite
from coda_agent.evals.training import Work, fold_mask, parts, sizes_of
from coda_agent.fuse.backend import coda

TOKENS, LAYERS, LIMIT = (32, 128, 512, 8192), 2, 0.05
IMAGES, PATCHES = 64, 256
PHASES = "inference", "training"
NAMES = "ours", "eager", "compile", "compile, mask folded"
FEW = *NAMES[:2], NAMES[-1]
_ATTENTION = re.compile("flash|fmha|attention|sdpa")
_ABOUT = """Two layers of a model of transformers', with attention, one sequence, bfloat16; or of a
DiT-B, with images of 256 patches, each with a condition, which have no mask to fold. Compiled
contenders have the mode "reduce-overhead" and frozen weights for inference, and neither for
training, which is forward and backward. `compile` is the model under torch.compile, whose attention
gets a mask; `compile, mask folded` has causal attention instead. Ours is the backend `coda`. A
family is another model, of which two have experts and two are encoders, which have no mask to
fold. Before 6add74fa at most 7 ms of a host's time were hidden: warm cells of eager PyTorch, and of
training at few tokens, may hold some of it."""


WORKS = {
    "TinyLlama-1.1B": Work(
        "LlamaModel",
        sizes_of(2048, LAYERS, 32, 256, num_key_value_heads=4, intermediate_size=5632),
        {},
    ),
    "Qwen2.5-7B": Work(
        "Qwen2Model",
        sizes_of(3584, LAYERS, 28, 256, num_key_value_heads=4, intermediate_size=18944),
        {},
    ),
    "Phi-4": Work(  # one weight has queries, keys and values, another gate and up
        "Phi3Model",
        sizes_of(5120, LAYERS, 40, 256, num_key_value_heads=10, intermediate_size=17920),
        {"pad_token_id": 0},
    ),
}
_MORE = {"inference": 512, "training": 2048}
"""The tokens of what follows, one number in each phase."""
_TWO = {"num_experts_per_tok": 2}
_WORDS = dict.fromkeys(
    ("pad_token_id", "bos_token_id", "eos_token_id", "cls_token_id", "sep_token_id"), 0
)


def _family(kind: str, width: int, heads: int, inner: int, kv: int = 0, **options: Any) -> Work:
    name = "moe_intermediate_size" if "num_experts" in options else "intermediate_size"
    sizes = {name: inner, **({"num_key_value_heads": kv} if kv else {})}
    return Work(kind, sizes_of(width, LAYERS, heads, 256, **sizes), options)


FAMILIES = {
    "Pythia-2.8B": _family("GPTNeoXModel", 2560, 32, 10240),
    "Phi-2": _family("PhiModel", 2560, 32, 10240),
    "StarCoder2-3B": _family("Starcoder2Model", 3072, 24, 12288, kv=2, sliding_window=None),
    "Cohere-7B": _family("CohereModel", 4096, 32, 11008),
    "GLM-4-9B": _family("GlmModel", 4096, 32, 13696, kv=2, pad_token_id=0),
    "Nemotron-4B": _family("NemotronModel", 3072, 24, 9216, kv=8),
    "Mixtral-of-4": _family("MixtralModel", 2048, 16, 4096, kv=4, num_local_experts=4,
                            sliding_window=None, **_TWO),
    "Qwen3-MoE-of-8": _family("Qwen3MoeModel", 2048, 32, 768, kv=4, num_experts=8, **_TWO),
    "ModernBERT-large": _family("ModernBertModel", 1024, 16, 2624, **_WORDS),
    "RoBERTa-large": _family("RobertaModel", 1024, 16, 4096, max_position_embeddings=2050),
}  # fmt: skip


def suite(_: Path) -> Suite:
    """List each model's layers at each number of tokens."""
    cases = [
        Case(f"{name} {phase} {tokens}", NAMES, partial(_layers, work, phase, tokens))
        for name, work in WORKS.items() for phase in PHASES for tokens in TOKENS
    ] + [
        Case(f"family {name} {phase} {tokens}", FEW, partial(_layers, work, phase, tokens))
        for name, work in FAMILIES.items() for phase, tokens in _MORE.items()
    ] + [
        Case(f"DiT-B {phase} {IMAGES * PATCHES}", FEW, partial(_images, phase))
        for phase in PHASES
    ]  # fmt: skip
    return Suite("models", _ABOUT, cases, group=_group)


def _group(case: str) -> str:
    *name, phase, tokens = case.split()
    return f"{phase} {tokens}{', families' * (name[0] == 'family')}"


def _layers(work: Work, phase: str, tokens: int, device: str, shrink: int) -> Setup:
    work = replace(work, batch=1, length=tokens).shrunk(shrink)
    shape = 1, work.length, work.sizes["hidden_size"]
    kind, sizes = work.configured()
    torch.manual_seed(0)
    with torch.device(device):
        model = kind(sizes).bfloat16().eval()
    model.config.use_cache = False
    return _setup(model, shape, phase, device)


def _images(phase: str, device: str, shrink: int) -> Setup:
    images, width, heads = (max(2, x // shrink) for x in (IMAGES, 768, 12))
    torch.manual_seed(0)
    width = 16 * heads if shrink > 1 else width
    with torch.device(device):
        model = Diffusion(images, width, heads).bfloat16()
    return _setup(model, (images, PATCHES // shrink, width), phase, device)


def _setup(model: Any, shape: tuple[int, ...], phase: str, device: str) -> Setup:
    training = phase == "training"
    x, slope = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))

    def outputs(run: Callable[..., Any], x: Tensor, model: Any) -> dict[str, Tensor]:
        if not training:
            with torch.no_grad():
                return {"out": run(x)}
        x = x.detach().requires_grad_()
        out = run(x)
        out.backward(slope.to(out.dtype))
        weight = next(p.grad for p in model.parameters() if p.grad is not None)
        found = {"out": out.detach(), "x": x.grad, "weight": weight}
        for p in model.parameters():
            p.grad = None
        return found

    def made(name: str) -> Contender:
        own = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        if "folded" in name and not isinstance(own, Diffusion):
            fold_mask(own)
        run = partial(_hidden, own)
        if name != "eager":
            mode = None if training else "reduce-overhead"
            backend: str | Callable[..., object] = coda if name == "ours" else "inductor"
            run = torch.compile(run, dynamic=False, mode=mode, backend=backend)
        call = partial(outputs, run, x, own)

        def first() -> dict[str, Tensor]:
            with config.patch(freezing=not training):
                found = call()
            return {name: value.clone() for name, value in found.items()}

        replays = device != "cpu" and not training
        return Contender(lambda _: call(), first, lambda: (_replayed if replays else parts)(call))

    wide = copy.deepcopy(model).float()
    truth = outputs(partial(_hidden, wide), x.float(), wide)
    return Setup({n: partial(made, n) for n in NAMES}, truth, LIMIT)


def _replayed(call: Callable[[], Any]) -> str:
    """Name the attention kernels that a CUDA graph ran; count all."""
    names = [span.name for span in DeviceClock().trace(call)]
    found = [name for name in names if _ATTENTION.search(name) and not name.startswith("triton")]
    attention = sorted({name[:60] for name in found})
    return f"attention: {', '.join(attention) or 'none is named so'}; {len(names)} kernels"


class Diffusion(nn.Module):
    """Layers of a diffusion transformer; each image's condition is a parameter.

    Args:
        width: Of the stream.
        heads: Of attention.
    """

    def __init__(self, images: int, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.condition = nn.Parameter(torch.randn(images, 1, width))
        sizes = {"qkv": (1, 3), "out": (1, 1), "up": (1, 4), "down": (4, 1), "ada": (1, 6)}
        self.layers = nn.ModuleList(
            nn.ModuleDict({x: nn.Linear(a * width, b * width) for x, (a, b) in sizes.items()})
            for _ in range(LAYERS)
        )

    def forward(self, x: Tensor) -> Tensor:
        norm = partial(F.layer_norm, normalized_shape=x.shape[-1:], eps=1e-6)
        for layer in cast("Iterable[nn.ModuleDict]", self.layers):
            scales = layer["ada"](F.silu(self.condition)).chunk(6, -1)
            scale, shift, gate, scale_mlp, shift_mlp, gate_mlp = scales
            qkv = layer["qkv"](norm(x) * (1 + scale) + shift).unflatten(-1, (3, self.heads, -1))
            seen = F.scaled_dot_product_attention(*qkv.permute(2, 0, 3, 1, 4))
            x = x + gate * layer["out"](seen.transpose(1, 2).flatten(2))
            inner = layer["up"](norm(x) * (1 + scale_mlp) + shift_mlp)
            x = x + gate_mlp * layer["down"](F.gelu(inner, approximate="tanh"))
        return x


def _hidden(model: Any, x: Tensor) -> Tensor:
    if isinstance(model, Diffusion):
        return model(x)
    return model(inputs_embeds=x).last_hidden_state
