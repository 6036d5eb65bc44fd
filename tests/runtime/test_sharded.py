"""Kernels on the tensors of two ranks, as docs/several-gpus.md shows it: whole tensors' results."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.generated import gemm_swiglu
from coda_agent.primitives.errors import LaunchError
from tests.ranks import on_two_ranks

PAGE = Path(__file__).parents[2] / "docs" / "several-gpus.md"


def test_sharded_columns() -> None:
    on_two_ranks(_columns)


def _columns(mesh: Any) -> None:
    from torch.distributed.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor

    known = {"gemm_swiglu": gemm_swiglu, "DTensor": DTensor, "Partial": Partial, "Shard": Shard}
    exec(re.findall(r"```python no-run\n(.*?)```", PAGE.read_text("utf-8"), re.DOTALL)[-1], known)
    function: Any = known["swiglu_by_columns"]
    generator = torch.Generator("cpu").manual_seed(0)
    a, b = (torch.randn(*s, generator=generator).bfloat16() / 3 for s in ((2, 16, 32), (64, 32)))
    whole: Any = [t.clone().requires_grad_() for t in (a, b)]
    expected = gemm_swiglu(*whole)
    torch.stack([t.float().square().sum() for t in expected]).sum().backward()
    for call in (function, torch.compile(function, backend="aot_eager", fullgraph=True)):
        placed: Any = [(a, Replicate()), (b, Shard(0))]
        parts: Any = [distribute_tensor(t, mesh, [p]).detach() for t, p in placed]
        for t in parts:
            t.requires_grad_()
        found = call(*parts)
        for t, wanted in zip(found, expected, strict=True):
            assert t.placements == (Shard(2),) and torch.equal(t.full_tensor(), wanted)
        torch.stack([t.full_tensor().float().square().sum() for t in found]).sum().backward()
        assert torch.equal(parts[1].grad.full_tensor(), whole[1].grad)
        # What is whole gets a gradient of each rank, rounded and then summed.
        error = (parts[0].grad.full_tensor() - whole[0].grad).float().norm()
        assert error < 0.01 * whole[0].grad.float().norm()
    with pytest.raises(LaunchError, match="input 'A' is a DTensor, expected a rank's tensor"):
        gemm_swiglu(*parts)
