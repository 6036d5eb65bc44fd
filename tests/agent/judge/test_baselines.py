"""What a kernel is timed against is compiled once for each shape."""

from __future__ import annotations

import functools
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.baselines import prepare
from coda_agent.runtime.loading import load_kernel
from coda_agent.specs import draw_inputs

GENERATED = Path(__file__).parents[3] / "generated"


def test_a_baseline_is_compiled_for_more_shapes_than_torch_would_by_itself(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    spec = load_kernel(GENERATED / "gemm_rmsnorm").spec
    many = tuple({"M": m, "N": 64, "K": 32} for m in range(8, 20))
    spec = spec.model_copy(update={"bench_shapes": many})
    graphs: list[Any] = []
    sizes: list[Any] = []
    compiled = functools.partial(torch.compile, backend=lambda g, _: graphs.append(g) or g.forward)
    monkeypatch.setattr(torch, "compile", compiled)

    def drawn(*given: Any, **more: Any) -> Any:
        sizes.append(given[1])
        return draw_inputs(*given, **{**more, "device": "cpu"})

    monkeypatch.setattr("coda_agent.agent.judge.baselines.draw_inputs", drawn)
    prepare(spec, ["bfloat16"])
    assert len(graphs) == 12 and sizes == list(many)
    prepare(spec, ["bfloat16"])
    assert len(graphs) == 12
    prepare(spec.model_copy(update={"bench_shapes": many[:1]}), ["float16"])
    assert len(graphs) == 13 and sizes[-1] == many[0]
