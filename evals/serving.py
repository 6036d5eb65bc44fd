"""The suite of models: layers of transformers' models at few tokens and many, for inference and
training.

- A case is two layers without embeddings and head: attention, MLP, norms and residuals, in bf16.
- For inference all compiled contenders have PyTorch's mode "reduce-overhead", hence CUDA graphs,
  and frozen weights, which are packed and turned once. For training they have neither.
- `compile` and `compile, mask folded` are as in `training.py`.
"""

from __future__ import annotations

import copy
import importlib
import re
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from torch._inductor import config

from coda_agent.agent.judge.clocks import DeviceClock
from coda_agent.evals.cases import Absent, Case, Contender, Setup, Suite
from coda_agent.evals.training import Work, fold_mask, parts
from coda_agent.fuse.backend import coda

TOKENS, LAYERS, LIMIT = (32, 128, 512, 8192), 2, 0.05
PHASES = "inference", "training"
_ATTENTION = re.compile("flash|fmha|attention|sdpa")
_ABOUT = """Two layers of a model of transformers', with attention, one sequence, bfloat16. Compiled
contenders have the mode "reduce-overhead" and frozen weights for inference, and neither for
training, which is forward and backward. `compile` is the model under torch.compile, whose attention
gets a mask; `compile, mask folded` has causal attention instead. Ours is the backend `coda`."""


def _sizes(width: int, heads: int, kv: int, inner: int) -> dict[str, int]:
    return {"hidden_size": width, "num_hidden_layers": LAYERS, "num_attention_heads": heads,
            "num_key_value_heads": kv, "intermediate_size": inner, "vocab_size": 256}  # fmt: skip


WORKS = {
    "TinyLlama-1.1B": Work("llama", "LlamaModel", _sizes(2048, 32, 4, 5632), {}),
    "Qwen2.5-7B": Work("qwen2", "Qwen2Model", _sizes(3584, 28, 4, 18944), {}),
}


def suite(_: Path) -> Suite:
    """List layers of each model at each number of tokens; means are taken over models."""
    names = "ours", "eager", "compile", "compile, mask folded"
    cases = [
        Case(f"{name} {phase} {tokens}", names, partial(_layers, work, phase, tokens))
        for name, work in WORKS.items() for phase in PHASES for tokens in TOKENS
    ]  # fmt: skip
    return Suite("models", _ABOUT, cases, group=lambda case: case.partition(" ")[2])


def _layers(work: Work, phase: str, tokens: int, device: str, shrink: int) -> Setup:
    work = replace(work, batch=1, length=tokens).shrunk(shrink)
    model, training = _made(work, device), phase == "training"
    shape = 1, work.length, work.sizes["hidden_size"]
    x, slope = (torch.randn(shape, device=device, dtype=torch.bfloat16) for _ in range(2))

    def outputs(run: Callable[..., Any], x: Tensor, model: Any) -> dict[str, Tensor]:
        if not training:
            with torch.no_grad():
                return {"out": run(x)}
        x = x.detach().requires_grad_()
        out = run(x)
        out.backward(slope.to(out.dtype))
        weight = model.layers[0].mlp.up_proj.weight
        found = {"out": out.detach(), "x": x.grad, "up": weight.grad}
        for p in model.parameters():
            p.grad = None
        return found

    def made(name: str) -> Contender:
        own = copy.deepcopy(model, {id(p): p for p in model.parameters()})
        if "folded" in name:
            fold_mask(own)
        run = way = partial(_hidden, own)
        if name != "eager":
            mode = None if training else "reduce-overhead"
            backend: Any = coda if name == "ours" else "inductor"
            run = torch.compile(way, dynamic=False, mode=mode, backend=backend)
        call = partial(outputs, run, x, own)

        def first() -> dict[str, Tensor]:
            with config.patch(freezing=not training):
                found = call()
            return {name: value.clone() for name, value in found.items()}

        replays = device != "cpu" and not training
        return Contender(lambda _: call(), first, lambda: (_replayed if replays else parts)(call))

    wide = copy.deepcopy(model).float()
    truth = outputs(partial(_hidden, wide), x.float(), wide)
    names = ("ours", "eager", "compile", "compile, mask folded")
    return Setup({n: partial(made, n) for n in names}, truth, LIMIT)


def _replayed(call: Callable[[], Any]) -> str:
    """Name the kernels of attention that a graph of CUDA ran, and count all."""
    names = [span.name for span in DeviceClock().trace(call)]
    attention = sorted({name[:60] for name in names if _ATTENTION.search(name)})
    return f"attention: {', '.join(attention) or 'none is named so'}; {len(names)} kernels"


def _hidden(model: Any, x: Tensor) -> Tensor:
    return model(inputs_embeds=x, use_cache=False).last_hidden_state


def _made(work: Work, device: str) -> Any:
    """Make a model's layers.

    Raises:
        Absent: transformers is not installed.
    """
    try:
        home: Any = importlib.import_module(
            f"transformers.models.{work.family}.modeling_{work.family}"
        )
    except ImportError:
        raise Absent("transformers is not installed") from None
    made = getattr(home, work.kind)
    torch.manual_seed(0)
    with torch.device(device):
        positions = {"max_position_embeddings": work.length}
        return made(made.config_class(**work.sizes, **positions)).bfloat16().eval()
