"""The attribution of a kernel's time on a Hopper GPU: its parts compile, run, and come to its time."""

from pathlib import Path

import pytest

from coda_agent.agent.explain import program_of
from coda_agent.agent.workbench.attribution import attributed
from coda_agent.specs import load_spec
from tests.agent.test_evidence import timed

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

ROOT = Path(__file__).parents[2]


@pytest.mark.parametrize("name", ["gemm_swiglu", "gemm_residual_partial_rmsnorm"])
def test_a_kernel_is_made_of_its_parts(name: str) -> None:
    spec = load_spec(ROOT / "specs" / f"{name}.md")
    program = program_of(spec, (ROOT / "generated" / name / "kernel.py").read_text())
    cell = timed(1.0).model_copy(update={"sizes": {"M": 4096, "N": 4096, "K": 4096}})
    line, *_ = attributed(spec, program, cell).splitlines()
    whole, made = line.split(" us = ")
    product = int(made.removeprefix("product ").split()[0])
    assert made.endswith("; floor 1")
    # 2 x 4096^3 flops take 140 us at the datasheet's rate of an H100.
    assert 140 < product <= int(whole) < 400
