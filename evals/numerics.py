"""The suite of numerics: GEMM, RMSNorm, GEMM in Llama-3 8B (Figure 6).

- A layer has a norm between two products in two places: between attention's output projection and
  gate and up, and between the down projection and QKV of the next layer. At the end there is one
  between the down projection and the vocabulary.
- Errors are those of the second product, against float32 on the same bf16 values. PyTorch's bf16
  path is mm, add, F.rms_norm, mm.
- Weights are drawn with a standard deviation of 0.02. What enters has the marks of trained models:
  γ is around 0.4, the residual stream grows over the depth from 0.05 to 1.6, and four of its
  channels are 30 times the others.
"""

from __future__ import annotations

from functools import partial
from pathlib import Path
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.evals.cases import Absent, Case, Contender, Setup, Suite

TOKENS, LAYERS, HIDDEN, FFN, QKV, VOCABULARY = 2048, 32, 4096, 14336, 4096 + 2 * 1024, 128256
BLOCK, EPS, LIMIT = 128, 1e-5, 0.01
# First product's K, second product's N, the kernel of the second product.
SITES: dict[str, tuple[int, int, str]] = {
    "output projection, norm, gate and up": (HIDDEN, 2 * FFN, "gemm_rmsnorm_swiglu"),
    "down projection, norm, QKV": (FFN, QKV, "gemm_rmsnorm_rope"),
    "down projection, norm, vocabulary": (FFN, VOCABULARY, "gemm_rmsnorm_partial_cross_entropy"),
}


_ABOUT = """The error of GEMM – RMSNorm – GEMM on the layers of Llama-3 8B, 2048 tokens, against
float32 on the same bf16 values. `eager` is `mm`, `add`, `F.rms_norm`, `mm`. Values are drawn to
resemble a trained model's (`evals/numerics.py`)."""


def suite(_: Path) -> Suite:
    """List the sites in each layer, which are not timed; means are taken over layers."""
    contenders = "ours", "eager", "quack"
    cases = [
        Case(f"{site} {layer}", contenders, partial(_setup, site, layer), ())
        for site in SITES
        for layer in range(LAYERS)
    ]
    return Suite("numerics", _ABOUT, cases, group=lambda case: case.rpartition(" ")[0])


def _path(x: Tensor, w1: Tensor, residual: Tensor, gamma: Tensor, w2: Tensor) -> Tensor:
    h = torch.mm(x, w1.t()) + residual
    return torch.mm(F.rms_norm(h, (len(gamma),), gamma, EPS), w2.t())


def _setup(site: str, layer: int, device: str, shrink: int) -> Setup:
    from coda_agent import generated
    from coda_agent.primitives.auxiliary import rstd

    inner, outer, second = SITES[site]
    m, k, d, n = (x // shrink for x in (TOKENS, inner, HIDDEN, outer))
    generator = torch.Generator(device).manual_seed(1000 * [*SITES].index(site) + layer)

    def normal(*shape: int, std: float) -> Tensor:
        drawn = torch.randn(*shape, device=device, generator=generator)
        return drawn.mul_(std).bfloat16()

    x = normal(m, k, std=0.2 if inner == HIDDEN else 0.1)
    w1, w2 = normal(d, k, std=0.02), normal(n, d, std=0.02)
    gamma = (0.4 + normal(d, std=0.1)).clamp(min=0.01)
    residual = normal(m, d, std=0.05 + 1.55 * layer / (LAYERS - 1))
    residual[:, torch.randperm(d, device=device, generator=generator)[:4]] *= 30
    more: dict[str, Tensor] = {}
    if second == "gemm_rmsnorm_rope":
        more = {"cs": normal(m, n, std=1.0)}
    elif second.endswith("cross_entropy"):
        more = {"y": torch.randint(n, (m,), device=device, generator=generator)}

    def ours() -> Tensor:
        first: Any = generated.gemm_residual_partial_rmsnorm
        _, scaled, partials = first(x, w1, residual, gamma, block_size=BLOCK)
        r = rstd(partials, n=d, block=BLOCK, eps=EPS)
        return getattr(generated, second)(scaled, w2, r=r, **more)[0]

    def quack() -> Tensor:
        if device != "cuda":
            raise Absent("needs a GPU")
        from quack.gemm_interface import gemm, gemm_add
        from quack.rmsnorm import rmsnorm

        h = gemm_add(x, w1.t(), residual, tuned=False)
        product: Any = gemm(rmsnorm(h, gamma, eps=EPS), w2.t(), tuned=False)
        return product

    ways = {"ours": ours, "eager": partial(_path, x, w1, residual, gamma, w2), "quack": quack}
    makers = {name: lambda way=way: Contender(lambda _: {"y": way()}) for name, way in ways.items()}
    truth = _path(*(t.float() for t in (x, w1, residual, gamma, w2)))
    return Setup(makers, {"y": truth}, LIMIT)
