"""Tests of evals/gradients.py: gradients of kernels, against float64."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent import generated
from coda_agent.evals.cases import Case
from coda_agent.evals.gradients import KERNELS, suite
from tests.evals.small import ROOT, measured


def test_every_kernel_of_16_bits_is_there_in_each_form_that_overwrites_nothing() -> None:
    known = {path.parent.name for path in ROOT.glob("generated/*/kernel.py")}
    expected = set[tuple[object, ...]]()
    for name in (n for n in known if "fp8" not in n):
        spec = getattr(generated, name).spec
        expected |= {(name, *b.values()) for b in spec.bindings() if not spec.updated(b)}
    assert {(name, *static.values()) for name, static in KERNELS} == expected


@pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
@pytest.mark.parametrize("case", suite(ROOT).cases, ids=lambda case: case.name)
def test_gradients_are_as_right_as_pytorchs(tmp_path: Path, case: Case) -> None:
    cells = {key[1]: cell for key, cell in measured(tmp_path, 32, case).items()}
    assert 0 < (cells["ours"].error_ratio or 0) <= 1.2 and not cells["eager"].absent
