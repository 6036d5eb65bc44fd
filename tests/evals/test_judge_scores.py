"""The judge's scores: the suite, a sample of it killed, right programs passed, records resumed."""

from __future__ import annotations

import functools
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.cli import judging
from coda_agent.agent.judge import numerics
from coda_agent.agent.judge.compile_gate import check_signature
from coda_agent.demos import demos
from coda_agent.evals.judge import corpus, scores
from coda_agent.evals.judge.edits import REWRITES, all_rewritten, faulty
from coda_agent.evals.judge.mutants import differs, mutants
from coda_agent.generated.kernel import Kernel, load_kernel
from coda_agent.primitives.interpret import interpret
from coda_agent.specs import draw_inputs

ROOT = Path(__file__).parents[2]
SEED = 5


@pytest.fixture(scope="module")
def kernels() -> list[Kernel]:
    folders = sorted((ROOT / "generated").glob("*/evidence.json"))
    return [load_kernel(file.parent) for file in folders]


# The judge as `coda-agent score-judge` scores it: cases are drawn once for all mutants of a kernel.
gate = functools.partial(judging._numerics, "cpu", judging._Cases())
JUDGE = scores.Judge("test", "cpu", {"cores": 1}, check_signature, gate, numerics.run_interpreter)


def test_the_suite_is_large_and_follows_from_its_seed(kernels: list[Kernel]) -> None:
    suite = scores.suite(kernels, seed=SEED)
    assert len(suite) >= 250
    assert len({m.kernel for m in suite}) == len(kernels) >= 18
    again = scores.suite(kernels, seed=SEED)
    assert [m.name for m in suite] == [m.name for m in again]
    assert [m.name for m in suite] != [m.name for m in scores.suite(kernels, seed=SEED + 1)]
    assert min(Counter(m.lowered for m in suite).values()) >= 100


def test_a_sample_takes_every_fault_once_before_any_twice(kernels: list[Kernel]) -> None:
    everything = {m.operator for m in scores.suite(kernels, seed=SEED)}
    sample = scores.suite(kernels, seed=SEED, count=len(everything))
    assert {m.operator for m in sample} == everything


def test_a_stratified_sample_is_killed_and_mostly_diagnosed(kernels: list[Kernel]) -> None:
    small = [
        k
        for k in kernels
        if k.spec.name in ("gemm_rmsnorm_swiglu", "gemm_residual_partial_rmsnorm")
    ]
    by_name = {k.spec.name: k for k in small}
    sample = [m for m in scores.suite(small, seed=SEED, count=26) if "memo" not in m.operator]
    cells = {m.name: scores.trial(JUDGE, by_name[m.kernel], m, seed=SEED) for m in sample}
    assert [name for name, c in cells.items() if c["layer"] == "survived"] == []
    assert {c["layer"] for c in cells.values()} >= {"numerics", "signature"}
    named = [c["fault"] in c["expected"] for c in cells.values() if "fault" in c]
    assert len(named) >= 10 and sum(named) >= 0.8 * len(named)


def test_a_mutant_that_changes_nothing_is_found_equivalent(kernels: list[Kernel]) -> None:
    """Storing e4m3 saturates at 448, so a clamp at a larger number does the same."""
    (kernel,) = (k for k in kernels if k.spec.name == "gemm_fp8_swiglu_quantised")
    program = kernel.programs[kernel.spec.variant()]
    run = numerics.run_interpreter
    for mutant in mutants(kernel.spec, program, seed=0):
        if mutant.operator in ("change a constant", "swap a pair", "miss the last rows"):
            real = differs(mutant, program, kernel.spec, run, "cpu")
            assert real is (mutant.operator != "change a constant"), mutant.name


def test_rewrites_equal_their_original_in_float64_and_faults_do_not(kernels: list[Kernel]) -> None:
    applied = set()
    for kernel in kernels:
        spec, program = kernel.spec, kernel.programs[kernel.spec.variant()]
        inputs: Any = draw_inputs(spec, spec.check_shapes[1], spec.default_types(), seed=2)
        place = spec.in_place
        held = {place.output: inputs[place.input]} if place else {}

        def values(program: Any, spec: Any = spec, inputs: Any = inputs, held: Any = held) -> Any:
            a, b = (inputs[name] for name in spec.gemm)
            dtypes = dict.fromkeys(program.outputs, torch.float64)
            every = {**inputs, **held}
            return interpret(program, a, b, every, dtypes=dtypes, compute=torch.float64)

        right = values(program)
        for name, other in all_rewritten(program):
            applied.add(name)
            assert other.digest != program.digest
            for o, value in values(other).items():
                torch.testing.assert_close(value, right[o], rtol=1e-9, atol=1e-9, msg=f"{name} {o}")
        for edit in faulty(program):
            if edit.operator in ("scale a value", "scale an output", "repeat a factor"):
                edited = edit.apply(program)
                assert edited is not None
                wrong = values(edited)
                assert any(not torch.allclose(wrong[o], right[o]) for o in right), edit
    assert applied == set(REWRITES) - {"quotients as products"}  # no accepted kernel divides


def test_right_programs_are_not_refused(kernels: list[Kernel]) -> None:
    right = {r.name: r for r in corpus.kernels(kernels)}
    assert len(right) >= 60
    name = "gemm_residual_partial_rmsnorm: factors distributed over sums"
    assert gate(right[name].spec, right[name].programs, right[name].variant, None, SEED) is None


def test_every_demonstration_has_a_spec_but_those_that_need_a_table() -> None:
    right, left_out = corpus.demonstrations(demos())
    assert len(right) >= 30
    assert "rope_by_head" in left_out
    accumulated = next(r for r in right if r.name == "demonstration accumulate_gradient")
    assert accumulated.spec.updated() == {"dW": "dW_held"}


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    done: list[str] = []

    def job(name: str, stop: bool = False) -> dict[str, Any]:
        if stop:
            raise KeyboardInterrupt
        done.append(name)
        return {"seconds": [1.0, 2.0, 4.0]}

    def run(stop: bool) -> dict[str, Any]:
        record = scores._Record(tmp_path, "judge-latency-cpu", JUDGE, {"load": [0.5]})
        jobs = {"one": lambda: job("one"), "two": lambda: job("two", stop)}
        return record.run(jobs, lambda *_: None)

    with pytest.raises(KeyboardInterrupt):
        run(True)
    record = run(False)
    assert done == ["one", "two"]
    assert set(record["cells"]) == {"one", "two"}
    page = scores.write_page(tmp_path).read_text("utf-8")
    assert "median\n2.00 s, from 1.00 to 4.00 s" in page


def test_the_page_counts_layers_survivors_and_names() -> None:
    def cell(layer: str, operator: str = "memo by corners", **more: Any) -> dict[str, Any]:
        return {"operator": operator, "lowered": True, "layer": layer, **more}

    right = {"expected": ["k_tail"], "fault": "k_tail"}
    either = {"expected": ["missing_operand", "constant_factor"], "fault": "constant_factor"}
    wrong = {"expected": ["k_tail"], "fault": "race"}
    cells = {
        "a": cell("numerics", "skip", **right),
        "b": cell("numerics", "skip", **wrong),
        "c": cell("numerics", "drop", **either),
        "d": cell("signature"),
        "e": cell("equivalent"),
        "f": cell("survived"),
    }
    record = {"cells": cells, "seed": 1, "date": "2026-01-02"}
    text = scores.mutants_text("cpu", record)
    assert "4 of 5 mutants killed, 80.0%. 1 more" in text
    assert "- f: it keeps results by" in text
    said = scores.diagnosis_text("cpu", record)
    assert "for 2 of 3,\n66.7%" in said
    assert "| k tail | 2 | 0.50 | 1.00 | race 1 |" in said
    assert "| missing operand | 1 | 1.00 | 1.00 |  |" in said


def test_exploits_and_timing_are_shown_where_their_records_are(tmp_path: Path) -> None:
    (tmp_path / "tests" / "exploits").mkdir(parents=True)
    (tmp_path / "tests" / "exploits" / "catalogue.toml").write_text(
        '[[exploit]]\nrow = 11\nname = "a cache"\nstatus = "stopped"\nlayer = "static"\n'
    )
    (tmp_path / "evals" / "results").mkdir(parents=True)
    (tmp_path / "evals" / "results" / "judge-timing-h200.json").write_text(
        '{"kernel": "k", "compared": 200, "different": 1, "date": "2026-01-02", "cells": {}}'
    )
    page = scores.write_page(tmp_path).read_text("utf-8")
    assert "| 11 | a cache | stopped | static |  |" in page
    assert "1 of 200 comparisons" in page
