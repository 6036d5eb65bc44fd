"""Tests of evals/judge/mutants.py: the suite of mutants, and what is equivalent."""

from __future__ import annotations

from collections import Counter

from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.edits import Edit
from coda_agent.evals.judge.mutants import Mutant, equivalent, mutants, suite

SEED = 5


def test_the_suite_is_large_and_follows_from_its_seed(kernels: list[Subject]) -> None:
    found = suite(kernels, seed=SEED)
    assert len(found) >= 250
    assert len({m.right.spec.name for m in found}) == len(kernels) >= 18
    names = [m.name for m in found]
    assert names == [m.name for m in suite(kernels, seed=SEED)]
    assert names != [m.name for m in suite(kernels, seed=SEED + 1)]
    assert min(Counter(m.lowered for m in found).values()) >= 100


def test_a_sample_takes_every_fault_once_before_any_twice(kernels: list[Subject]) -> None:
    everything = {m.operator for m in suite(kernels, seed=SEED)}
    sample = suite(kernels, seed=SEED, count=len(everything))
    assert {m.operator for m in sample} == everything


def test_a_mutant_that_changes_nothing_is_found_equivalent(kernels: list[Subject]) -> None:
    """Storing e4m3 saturates at 448, so a clamp at a larger number does the same."""
    (right,) = (r for r in kernels if r.spec.name == "gemm_fp8_swiglu_quantised")
    operators = {"change a constant": True, "swap a pair": False}
    found = [m for m in mutants(right, seed=0) if m.operator in operators]
    assert {m.operator: equivalent(m, "cpu") for m in found} == operators


def test_what_is_below_a_sixteenth_of_a_rounding_is_equivalent(
    demonstrated: dict[str, Subject],
) -> None:
    right = demonstrated["bias_relu"]
    for factor, same in ((1 + 2.0**-14, True), (1 + 2.0**-10, False)):
        index = right.program.graph.outputs["O_relu"]
        program = Edit("", "", changes={index: lambda v, args, c=factor: v * c}).apply(
            right.program
        )
        assert program is not None
        assert equivalent(Mutant(right, "", "", (), program), "cpu") is same
