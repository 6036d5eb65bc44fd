"""Kernels with their gradients beside their references: at reduced size, interpreted, by a clock
that is no clock."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from coda_agent import generated
from coda_agent.evals.gradient_cases import CASES
from coda_agent.evals.layer_speed import measure, write_page
from coda_agent.generated.gradients import differentiable
from coda_agent.specs import reference
from tests.evals.test_fuse_cases import Clock

SMALL = ["gemm_swiglu", "gemm_rmsnorm_partial_cross_entropy", "gemm_bias_act silu row"]


def run(root: Path, **options: Any) -> list[str]:
    said = list[str]()
    machine = {"gpu": {"name": "NVIDIA H200"}, "packages": {}}
    measure(root, "gradients", clock=Clock(), machine=machine, rounds=10, device="cpu", shrink=64,
            say=said.append, **options)  # fmt: skip
    return said


@pytest.mark.filterwarnings("ignore:coda-agent. no Hopper")
def test_gradients_are_as_near_to_float64_as_pytorch_s(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    make, called = reference.reference_callable, list[str]()

    def counted(spec: Any, *args: Any, **options: Any) -> Any:
        run = make(spec, *args, **options)
        return lambda **values: [called.append(spec.name), run(**values)][1]

    monkeypatch.setattr(reference, "reference_callable", counted)
    said = run(tmp_path, cases=SMALL)
    assert [line.split(":")[0] for line in said] == SMALL
    (path,) = (tmp_path / "evals" / "results").glob("gradients-*.json")
    cells = json.loads(path.read_text())["cells"]
    for name in SMALL:
        assert cells[name]["both"]["over"]["eager"]["ratio"] == 1.5
        assert (
            0 < cells[name]["errors"]["ours"] <= 2
        )  # r's gradient reads an output that is rounded
    # Once ready, once for errors, once in float64, once by the clock, whatever its outputs are.
    assert [called.count(name.split()[0]) for name in SMALL] == [4, 4, 4]
    assert run(tmp_path, cases=SMALL) == [f"{case}: in the record" for case in SMALL]
    text = write_page(tmp_path, "gradients")[1].read_text()
    assert "| gemm_swiglu | both | 10 | 1.500 (1.500–1.500) |  |" in text


def test_every_accepted_kernel_with_gradients_takes_part() -> None:
    kernels = [getattr(generated, name) for name in dir(generated) if name.startswith("gemm_")]
    expected = {
        " ".join((k.spec.name, *static.values()))
        for k in kernels
        if "float8" not in k.spec.inputs[k.spec.gemm[0]].dtype
        for static in k.spec.bindings()
        if not k.spec.updated(static) and differentiable(k.variants[tuple(static.values())])
    }
    assert {*CASES} == expected
