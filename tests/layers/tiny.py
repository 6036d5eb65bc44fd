"""Tiny models of transformers, away from where a fresh one hides an error: its attention is flat, and
its norms are ones."""

from __future__ import annotations

import copy
from typing import Any

import torch
from torch import Tensor
from transformers import AutoConfig, AutoModelForCausalLM

SIZES: dict[str, Any] = {
    "vocab_size": 256,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 128,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
IDS = torch.randint(3, 256, (2, 24), generator=torch.Generator().manual_seed(1))


def tiny(kind: str = "llama", **options: Any) -> Any:
    """Return a small bfloat16 model of a family, in eval."""
    config = AutoConfig.for_model(kind, **{**SIZES, **options})
    config._attn_implementation = "eager"
    torch.manual_seed(0)
    return spread(AutoModelForCausalLM.from_config(config)).bfloat16().eval()


@torch.no_grad()
def spread(model: Any) -> Any:
    """Scale a fresh model's parameters so that each counts."""
    for name, p in model.named_parameters():
        if "embed" in name:
            p.mul_(30)
        elif p.ndim > 1:
            p.mul_(8)
        else:
            p.uniform_(0.5, 1.5)
    return model


def results(model: Any, **options: Any) -> dict[str, Tensor]:
    """Return logits in eval, the loss and all gradients in training, in float64."""
    options = {"use_cache": False, **options}
    with torch.no_grad():
        logits = model.eval()(IDS, **options).logits
    model.zero_grad()
    torch.manual_seed(3)
    loss = model.train()(IDS, labels=IDS, **options).loss
    loss.backward()
    grads = {n: p.grad for n, p in model.named_parameters() if p.grad is not None}
    return {n: t.detach().double() for n, t in {"logits": logits, "loss": loss, **grads}.items()}


def distance(one: dict[str, Tensor], other: dict[str, Tensor]) -> dict[str, float]:
    """Return how far results lie from others: logits, the loss and all gradients together, as parts
    of the others' norms."""
    assert one.keys() == other.keys()
    grads = other.keys() - {"logits", "loss"}
    gap = sum(((one[n] - other[n]) ** 2).sum().item() for n in grads)
    norm = sum((other[n] ** 2).sum().item() for n in grads)
    parts = {n: ((one[n] - other[n]).norm() / other[n].norm()).item() for n in ("logits", "loss")}
    return {**parts, "gradients": (gap / norm) ** 0.5 if norm else 0.0}


def as_near(ours: dict[str, Tensor], own: dict[str, Tensor], exact: dict[str, Tensor]) -> bool:
    """Return whether results are as near to the exact ones as the model's own."""
    far, near = distance(ours, exact), distance(own, exact)
    slack = {"logits": 1e-3, "loss": 5e-3, "gradients": 1e-3}
    return all(far[n] <= 1.5 * near[n] + slack[n] for n in slack)


def exact(model: Any, **options: Any) -> dict[str, Tensor]:
    """Return `results` of the same model in float32."""
    return results(copy.deepcopy(model).float(), **options)
