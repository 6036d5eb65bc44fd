"""The numerics gate on compiled kernels: accepted ones pass, and what touches memory it should not,
or reads what it should not, is refused."""

import secrets
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.numerics import check_numerics
from coda_agent.agent.judge.oracle import make_cases
from coda_agent.agent.judge.records import NumericsReport, Outcome
from coda_agent.agent.judge.runners import run_kernel
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.launch import Arguments, launcher
from coda_agent.specs import Spec, load_spec

pytestmark = pytest.mark.gpu

GENERATED = Path(__file__).parents[2] / "generated"
NAMES = ["gemm_residual_partial_rmsnorm", "gemm_rmsnorm_swiglu"]
CONFIGS = [TileConfig(128, 128, 2, 1, True), TileConfig(128, 192, 2, 1, True)]
Results = dict[str, torch.Tensor]


def accepted(name: str) -> tuple[Spec, Program]:
    programs = read_programs((GENERATED / name / "kernel.py").read_text())
    return load_spec(GENERATED / name / "spec.md"), programs[name]


def check(name: str, run: Any = None) -> Outcome[NumericsReport]:
    spec, program = accepted(name)
    tiles = {(name, "bfloat16"): (*CONFIGS,)}
    return check_numerics(
        Variant.of_all(spec, {name: program}),
        tiles,
        device="cuda",
        progress=lambda *_: None,
        seed=secrets.randbits(62),
        run=run,
    )


@pytest.mark.parametrize("name", NAMES)
def test_accepted_kernels_pass_every_case(name: str) -> None:
    report = check(name)
    assert not report.findings and report.report and not report.report.refused_tiles
    worst = report.report.worst[f"{name} bfloat16"]
    assert 0 < worst.ratio < 1 and 0 < worst.element <= 1


@pytest.mark.parametrize("name", NAMES)
def test_layouts_aliases_and_exact_values_are_among_the_cases(name: str) -> None:
    spec, _ = accepted(name)
    cases = {c.label: c for c in make_cases(spec, {}, "bfloat16", "cuda", 1)}
    assert {"transposed operands", "A and B are one tensor", "NaN in A", "Inf in A"} <= set(cases)
    assert "D" in cases["integers"].exact


@pytest.mark.parametrize("name", NAMES)
def test_what_is_kept_for_an_address_is_refused(name: str) -> None:
    kept: dict[Any, Results] = {}

    def run(spec: Spec, program: Program, inputs: Any, config: TileConfig, dtypes: Any) -> Results:
        key = inputs["A"].data_ptr(), tuple(inputs["A"].shape)
        if key not in kept:
            kept[key] = run_kernel(spec, program, inputs, config, dtypes)
        return {o: t.clone() for o, t in kept[key].items()}

    assert "former contents" in check(name, run).findings[0].message


@pytest.mark.parametrize(("offset", "side"), [(-1, "before"), (77 * 272, "after")])
@pytest.mark.parametrize("name", NAMES)
def test_a_write_outside_an_output_is_refused(
    name: str, offset: int, side: str, request: pytest.FixtureRequest
) -> None:
    spec, program = accepted(name)
    real = launcher.get()

    def launch(given: Arguments, **run: bool) -> None:
        real(given, **run)
        out = given.outputs["D"]
        out.as_strided((1,), (1,), out.storage_offset() + offset).fill_(1.0)

    case = next(c for c in make_cases(spec, {}, "bfloat16", "cuda", 1) if c.sizes["M"] == 77)
    dtypes = {o: getattr(torch, spec.dtype_of(o, {"T": "bfloat16"})) for o in spec.outputs}
    run_kernel(spec, program, case.inputs, CONFIGS[0], dtypes)
    request.addfinalizer(partial(launcher.reset, launcher.set(launch)))
    with pytest.raises(LaunchError, match=f"writes to memory {side} its output D"):
        run_kernel(spec, program, case.inputs, CONFIGS[0], dtypes)
