"""Train a small Llama by kernels, and the same by PyTorch.

    python examples/train_model.py --steps 20

On a Hopper GPU it is a model of 170 million parameters; elsewhere a tiny one, whose kernels are
interpreted. It needs transformers.
"""

from __future__ import annotations

import argparse
import time
import warnings
from importlib.resources import files
from typing import Any

import torch
from transformers import LlamaConfig, LlamaForCausalLM

from coda_agent.fuse import apply_coda_kernels


def main() -> None:
    """Train both, and print their losses and times."""
    options = argparse.ArgumentParser(description="Train a small Llama by kernels and by PyTorch.")
    options.add_argument("--steps", type=int, default=20)
    options.add_argument("--fp8", action="store_true", help="multiply in FP8 in the forward pass")
    given = options.parse_args()
    on_gpu = torch.cuda.is_available() and torch.cuda.get_device_capability()[0] == 9
    warnings.filterwarnings("ignore", message="coda-agent: no Hopper")
    width, layers, rows, length = (2048, 4, 8, 1024) if on_gpu else (64, 1, 2, 64)
    config = LlamaConfig(
        vocab_size=256, hidden_size=width, intermediate_size=width * 11 // 4 // 16 * 16,
        num_hidden_layers=layers, num_attention_heads=width // 32, num_key_value_heads=2,
        use_cache=False,
    )  # fmt: skip
    text = b"".join(p.read_bytes() for p in files("coda_agent.specs").iterdir() if p.is_file())
    tokens = torch.frombuffer(bytearray(text), dtype=torch.uint8).long()
    for name in ("PyTorch", "kernels"):
        torch.manual_seed(0)
        model: Any = LlamaForCausalLM(config).to("cuda" if on_gpu else "cpu", torch.bfloat16)
        report = apply_coda_kernels(model.train(), fp8=given.fp8) if name == "kernels" else None
        optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
        losses, began = list[float](), 0.0
        for step in range(given.steps):
            began = time.perf_counter() if step == 1 else began  # the first one compiles
            places = torch.randint(len(tokens) - length, (rows, 1)) + torch.arange(length)
            ids = tokens[places].to(model.device)
            loss = model(input_ids=ids, labels=ids).loss
            loss.backward()
            optimizer.step()
            optimizer.zero_grad()
            losses.append(loss.item())
        each = (time.perf_counter() - began) / max(given.steps - 1, 1)
        print(f"{name}: loss {losses[0]:.4f} to {losses[-1]:.4f}, {1e3 * each:.1f} ms a step")
        if report is not None:
            print(report)


if __name__ == "__main__":
    main()
