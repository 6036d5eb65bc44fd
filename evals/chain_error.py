"""The numerical error of GEMM - RMSNorm - GEMM on layers of Llama-3 8B (the paper's Figure 6).

- A layer has a norm between two products in two places: between attention's output projection and
  gate and up, and between the down projection and QKV of the next layer. At the end there is one
  between the down projection and the vocabulary.
- Errors are ‖y - y₃₂‖ / ‖y₃₂‖ of the second product, with y₃₂ in float32 on the same bf16 values.
  They are given over the error of PyTorch's bf16 path: mm, add, F.rms_norm, mm.
- No checkpoint is used: weights are drawn with a standard deviation of 0.02. What enters has the
  marks of trained models. γ is around 0.4. The magnitude of the residual stream grows over the
  depth, from 0.05 to 1.6, and four of its channels are 30 times the others.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from statistics import geometric_mean
from typing import Any

import torch
import torch.nn.functional as F

from coda_agent.evals import pages, svg
from coda_agent.generated.kernel import load_kernel
from coda_agent.primitives.auxiliary import rstd
from coda_agent.primitives.errors import CodaError

TOKENS, LAYERS, HIDDEN, FFN, QKV, VOCABULARY = 2048, 32, 4096, 14336, 4096 + 2 * 1024, 128256
BLOCK, EPS = 128, 1e-5
# First product's K, second product's N, the kernel of the second product.
SITES: dict[str, tuple[int, int, str]] = {
    "output projection, norm, gate and up": (HIDDEN, 2 * FFN, "gemm_rmsnorm_swiglu"),
    "down projection, norm, QKV": (FFN, QKV, "gemm_rmsnorm_rope"),
    "down projection, norm, vocabulary": (FFN, VOCABULARY, "gemm_rmsnorm_partial_cross_entropy"),
}


def measure(
    root: Path, *, machine: Mapping[str, Any], device: str, shrink: int = 1, layers: int = LAYERS
) -> Path:
    """Measure the errors at every site and layer; the record, evals/results/numerics.json. Tests
    `shrink` every extent. Device "cpu" interprets, and leaves quack out.

    Raises:
        WorkspaceError: a kernel of the chain is not accepted yet.
    """
    names = ["gemm_residual_partial_rmsnorm", *(kernel for *_, kernel in SITES.values())]
    kernels = {name: load_kernel(root / "generated" / name) for name in names}
    cells: dict[str, dict[str, Any]] = {}
    for site in SITES:
        for layer in range(layers):
            errors = _layer(kernels, site, layer, layers, device, shrink)
            rounded = {name: float(f"{value:.4g}") for name, value in errors.items()}
            cells[f"{site} {layer}"] = {"site": site, "layer": layer, **rounded}
    path = root / "evals" / "results" / "numerics.json"
    pages.write_record(
        path, {"tokens": TOKENS // shrink, "layers": layers, "machine": machine}, cells
    )
    return path


def _layer(
    kernels: Mapping[str, Any], site: str, layer: int, layers: int, device: str, shrink: int
) -> dict[str, float]:
    inner, outer, second = SITES[site]
    m, k, d, n = (x // shrink for x in (TOKENS, inner, HIDDEN, outer))
    generator = torch.Generator(device).manual_seed(1000 * [*SITES].index(site) + layer)

    def normal(*shape: int, std: float) -> torch.Tensor:
        drawn = torch.randn(*shape, device=device, generator=generator)
        return drawn.mul_(std).bfloat16()

    x = normal(m, k, std=0.2 if inner == HIDDEN else 0.1)
    w1, w2 = normal(d, k, std=0.02), normal(n, d, std=0.02)
    gamma = (0.4 + normal(d, std=0.1)).clamp(min=0.01)
    residual = normal(m, d, std=0.05 + 1.55 * layer / max(layers - 1, 1))
    residual[:, torch.randperm(d, device=device, generator=generator)[:4]] *= 30

    def path(x: torch.Tensor, w1: Any, residual: Any, gamma: Any, w2: Any) -> torch.Tensor:
        h = torch.mm(x, w1.t()) + residual
        return torch.mm(F.rms_norm(h, (d,), gamma, EPS), w2.t())

    truth = path(*(t.float() for t in (x, w1, residual, gamma, w2)))

    def error(y: Any) -> float:
        return float((y.float() - truth).norm() / truth.norm())

    errors = {"torch": error(path(x, w1, residual, gamma, w2))}
    first = kernels["gemm_residual_partial_rmsnorm"]
    _, scaled, partials = first(x, w1, residual, gamma, block_size=BLOCK)
    r = rstd(partials, n=d, block=BLOCK, eps=EPS)
    more = {}
    if second == "gemm_rmsnorm_rope":
        more = {"cs": normal(m, n, std=1.0)}
    elif second.endswith("cross_entropy"):
        more = {"y": torch.randint(n, (m,), device=device, generator=generator)}
    y = kernels[second](scaled, w2, r=r, **more)[0]
    errors["ours"] = error(y)
    if device == "cuda":
        from quack.gemm_interface import gemm, gemm_add
        from quack.rmsnorm import rmsnorm

        h = gemm_add(x, w1.t(), residual, tuned=False)
        y = gemm(rmsnorm(h, gamma, eps=EPS), w2.t(), tuned=False)
        errors["quack"] = error(y)
    return errors


def write_page(root: Path) -> list[Path]:
    """Write docs/numerics.md and .svg of a workspace; the record, the page, the chart.

    Raises:
        CodaError: no record.
    """
    file = root / "evals" / "results" / "numerics.json"
    if not file.is_file():
        raise CodaError("there is no numerical record", hint="`coda-agent bench --numerics`")
    record = json.loads(file.read_text("utf-8"))
    cells = list(record["cells"].values())
    names = [n for n in ("ours", "quack") if n in cells[0]]
    rows = [["", "PyTorch", *(h for n in names for h in (f"{n}, of PyTorch's", "range"))]]
    panels: dict[str, dict[str, dict[str, float]]] = {}
    for site in SITES:
        layers = [cell for cell in cells if cell["site"] == site]
        rows.append([site, f"{geometric_mean(layer['torch'] for layer in layers):.2e}"])
        ratios = {n: [layer[n] / layer["torch"] for layer in layers] for n in names}
        for values in ratios.values():
            rows[-1] += [f"{geometric_mean(values):.3f}", f"{min(values):.3f}–{max(values):.3f}"]
        panels[f"{site}, by layer"] = {
            str(layer["layer"]): {n: ratios[n][i] for n in names} for i, layer in enumerate(layers)
        }
    page = pages.write(
        root / "docs" / "numerics.md", "chain_error.md", record=record, rows=rows,
        kernels=[kernel for *_, kernel in SITES.values()],
    )  # fmt: skip
    chart = page.with_suffix(".svg")
    title = "Error of GEMM - RMSNorm - GEMM over that of PyTorch's bf16 path"
    chart.write_text(svg.bars(title, panels, base=0.0), encoding="utf-8")
    return [file, page, chart]
