"""Tests of evals/benchmarks.py: what the suites are, and that names tell cases apart."""

from __future__ import annotations

import pytest

from coda_agent.evals.benchmarks import SUITES, load
from coda_agent.evals.clocks import CLOCKS
from coda_agent.primitives.errors import CodaError
from tests.evals.small import ROOT

SIZES = {"kernels": 38, "paper": 30, "shapes": 960, "layers": 35, "fuse": 60, "gradients": 17,
         "host": 19, "models": 46, "numerics": 96}  # fmt: skip


@pytest.mark.parametrize("name", SUITES)
def test_a_suite_has_cases_with_contenders(name: str) -> None:
    suite = load(name, ROOT)
    names = [case.name for case in suite.cases]
    assert suite.name == name and len(names) == len({*names}) == SIZES[name]
    for case in suite.cases:
        assert case.contenders[0] == "ours" and len({*case.contenders}) == len(case.contenders)
        assert {*case.regimes} <= {*CLOCKS} and suite.group(case.name)
    assert {*suite.regimes} <= {*CLOCKS}


def test_an_unknown_suite_is_named() -> None:
    with pytest.raises(CodaError, match=r"no suite 'none' \(known: fuse, gradients, host, kernels"):
        load("none", ROOT)


def test_cases_of_layers_have_their_means_by_phase() -> None:
    group = load("layers", ROOT).group
    assert group("block Llama-3-8B fp8 forward") == "block fp8 forward"
    assert group("head 4096 both") == "head both" and group("train-1b fp8") == "train-1b fp8"
