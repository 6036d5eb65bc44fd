"""Partials of several reductions folded in one launch, by Triton's interpreter."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.primitives import fold
from coda_agent.runtime.target import _tool

# Triton reads the variable when it is imported. The interpreter has no dependent launches.
SCRIPT = """
import os
os.environ["TRITON_INTERPRET"] = "1"
import torch
from coda_agent.primitives import fold

fold.gdc_wait = lambda: None
torch.manual_seed(0)
raws = [
    torch.rand(77, 3), torch.rand(5, 140).mT, torch.randn(20, 300), torch.randn(8, 20),
    torch.randn(8, 20), torch.rand(9, 4), torch.full((4, 3), float("-inf")),
]
ways = [
    ("add", 0.5, 0.0), ("max", 1.0, 0.0), ("logsumexp", 1.0, 0.0), ("min", 1.0, 0.0),
    ("max", 1.0, 0.0), ("rstd", 0.25, 1e-3), ("logsumexp", 1.0, 0.0),
]

def folded(raws, ways):
    outs = [torch.full(t.shape[:1], float("nan")) for t in raws]
    grid, rest = fold.prepared(raws, ways)
    fold._fold[grid](tuple(raws), tuple(outs), *rest)
    return outs

for raw, (combine, weight, eps), found in zip(raws, ways, folded(raws, ways), strict=True):
    raw64 = raw.double()
    want = {
        "add": raw64.sum(-1) * weight, "max": raw64.amax(-1), "min": raw64.amin(-1),
        "logsumexp": raw64.logsumexp(-1), "rstd": (raw64.sum(-1) * weight + eps).rsqrt(),
    }[combine]
    torch.testing.assert_close(found.double(), want, rtol=1e-5, atol=1e-5)
    assert torch.equal(found, folded([raw], [(combine, weight, eps)])[0])
print("all folded")
"""


def test_folds_joined_are_those_alone() -> None:
    run = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True
    )
    assert run.stdout.strip() == "all folded", run.stderr[-2000:]


def test_buffers_are_asked_for_as_torch_takes_them(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[tuple[type, type]] = []

    def empty(shape: Any, strides: Any, dtype: torch.dtype) -> torch.Tensor:
        asked.append((type(shape), type(strides)))
        return torch.empty_strided(shape, strides, dtype=dtype, device="meta")

    monkeypatch.setattr(fold, "allocator", lambda _: empty)
    raws = [torch.empty(77, 3, device="meta"), torch.empty(5, 300, device="meta").mT]
    outs = fold.folding(raws, [("add", 0.5, 0.0), ("max", 1.0, 0.0)])(raws)
    assert [t.shape for t in outs] == [(77,), (300,)]
    assert asked == [(tuple, tuple)] * 2  # a torch.Size is refused on a GPU


@pytest.mark.parametrize("partials", [14, 20, 28, 40])
def test_most_rows_are_loaded_before_one_is_summed(partials: int, tmp_path: Path) -> None:
    """All of them by Triton 3.6 and 3.9; 3.7, which torch 2.13 has, loads 14 of 16 before."""
    raw, out = (torch.empty(shape, device="meta") for shape in ((512, partials), (512,)))
    grid, rest = fold.prepared([raw], [("add", 1.0, 0.0)])
    with fold._absent():
        kernel = fold._fold.warmup((raw,), (out,), *rest, grid=grid, launch_pdl=True)
    cubin = tmp_path / "fold.cubin"
    cubin.write_bytes(kernel.asm["cubin"])
    order = re.findall("LDG|SHFL", _tool("nvdisasm", "-c", str(cubin)))
    assert order.index("SHFL") >= 0.8 * order.count("LDG")
