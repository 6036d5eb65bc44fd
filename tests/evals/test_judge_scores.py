"""The judge's scores: the suite, a sample of it killed, right programs passed, records resumed."""

from __future__ import annotations

import dataclasses
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.meaning import replayed
from coda_agent.demos import demos
from coda_agent.evals.judge import corpus, report, scores
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.edits import REWRITES, Edit, faulty
from coda_agent.evals.judge.mutants import Mutant, equivalent, mutants, suite
from coda_agent.generated.kernel import load_kernel
from coda_agent.primitives.operation import OPS
from coda_agent.specs import draw_inputs

ROOT = Path(__file__).parents[2]
SEED = 5
JUDGE = scores.Judge(ROOT, "cpu")


@pytest.fixture(scope="module")
def variants() -> list[Subject]:
    folders = sorted((ROOT / "generated").glob("*/evidence.json"))
    return corpus.kernels(load_kernel(file.parent) for file in folders)


@pytest.fixture(scope="module")
def kernels(variants: list[Subject]) -> list[Subject]:
    return [right for right in variants if right.is_default]


@pytest.fixture(scope="module")
def demonstrated() -> dict[str, Subject]:
    right, left_out = corpus.demonstrations(demos())
    # Tables, whose dims no kind of operand gives; a rounding that a spec in bfloat16 cannot mean.
    tables = ["gated_samples", "placed_tokens", "turned_halves"]
    assert left_out == ["rope_by_head", "stored_squares", *tables]
    return {r.name.removeprefix("demonstration "): r for r in right}


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


@pytest.mark.sampled(0.5)
def test_a_stratified_sample_is_killed_and_mostly_diagnosed(
    kernels: list[Subject], demonstrated: dict[str, Subject]
) -> None:
    small = [r for r in kernels if r.spec.name == "gemm_rmsnorm_swiglu"]
    small += [demonstrated["gelu_backward"], demonstrated["gated_statistics"]]
    sample = [m for m in suite(small, seed=SEED, count=22) if "memo" not in m.operator]
    cells = {m.name: scores.trial(JUDGE, m, seed=SEED) for m in sample}
    assert [name for name, c in cells.items() if c["layer"] == "survived"] == []
    assert {c["layer"] for c in cells.values()} >= {"numerics", "signature"}
    named = [c["fault"] in c["expected"] for c in cells.values() if "fault" in c]
    assert len(named) >= 10 and sum(named) >= 0.8 * len(named)


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


def test_operations_of_numbers_alone_are_numbers(demonstrated: dict[str, Subject]) -> None:
    """√(x² + 4) without x² is 2."""
    right = demonstrated["squareplus"]
    dropped = [
        program
        for edit in faulty(right.program)
        if edit.operator == "drop a term" and (program := edit.apply(right.program))
    ]
    assert any(2.0 in {n.value for n in p.graph.nodes if n.op == "const"} for p in dropped)


def test_rewrites_equal_their_original_in_float64_and_faults_do_not(kernels: list[Subject]) -> None:
    applied = set()
    for right in kernels:
        spec = right.spec
        inputs: Any = draw_inputs(spec, spec.check_shapes[1], spec.default_types(), seed=2)
        truth = replayed(spec, right.program, inputs)
        for other in corpus.rewrites(right):
            applied.add(other.name.removeprefix(f"{right.name}: "))
            assert other.program.digest != right.program.digest
            for o, value in replayed(spec, other.program, inputs).items():
                torch.testing.assert_close(value, truth[o], rtol=1e-9, atol=1e-9, msg=other.name)
        for edit in faulty(right.program):
            if edit.operator in ("scale a value", "scale an output", "repeat a factor"):
                edited = edit.apply(right.program)
                assert edited is not None
                wrong = replayed(spec, edited, inputs)
                assert any(not torch.allclose(wrong[o], truth[o]) for o in truth), edit
    assert applied == set(REWRITES) - {"quotients as products"}  # no accepted kernel divides


def test_right_programs_are_not_refused(variants: list[Subject], kernels: list[Subject]) -> None:
    right = {r.name: r for k in kernels for r in corpus.rewrites(k)}
    assert len(variants) + len(right) >= 60
    one = right["gemm_residual_partial_rmsnorm: factors distributed over sums"]
    assert JUDGE.numerics(one, JUDGE.run, SEED) is None


def test_elu_keeps_its_digits_near_0_whatever_exp_errs(
    demonstrated: dict[str, Subject], monkeypatch: pytest.MonkeyPatch
) -> None:
    """On the GPU exp errs by up to 2⁻²² of its result, upwards for some arguments, downwards for
    others."""

    def approximate(x: torch.Tensor) -> torch.Tensor:
        if x.dtype is torch.float64:
            return x.exp()  # a program's meaning errs nothing
        bits = x.double().view(torch.int64) >> 29
        sign = (bits * 2654435761 >> 7 & 1) * 2 - 1
        return (x.double().exp() * (1 + sign * 2.0**-22)).to(x.dtype)

    monkeypatch.setitem(OPS, "exp", dataclasses.replace(OPS["exp"], torch=approximate))
    right = demonstrated["elu"]
    assert JUDGE.numerics(right, JUDGE.run, SEED) is None


def test_turns_are_drawn_as_positive_as_they_are(demonstrated: dict[str, Subject]) -> None:
    """Drawn as a number and its negative, position 131072 turned by both parts of a frequency 0."""
    rope = demonstrated["rope"]
    assert rope.spec.inputs["t"].draw.kind == "uniform"
    assert JUDGE.numerics(rope, JUDGE.run, 2258249325) is None


def test_every_demonstration_has_a_spec(demonstrated: dict[str, Subject]) -> None:
    assert len(demonstrated) >= 30
    assert demonstrated["accumulate_gradient"].spec.updated() == {"dW": "dW_held"}


def test_an_interrupted_run_goes_on_where_it_stopped(tmp_path: Path) -> None:
    done: list[str] = []

    def job(name: str, stop: bool = False) -> dict[str, Any]:
        if stop:
            raise KeyboardInterrupt
        done.append(name)
        return {"seconds": [{"whole": s, "compile": s / 2} for s in (1.0, 2.0, 4.0)]}

    def run(stop: bool) -> dict[str, Any]:
        jobs = {"one": lambda: job("one"), "two": lambda: job("two", stop)}
        head = {"load": [0.5]}
        return scores.recorded(scores.Judge(tmp_path, "cpu"), "latency", head, jobs)

    with pytest.raises(KeyboardInterrupt):
        run(True)
    record = run(False)
    assert done == ["one", "two"]
    assert set(record["cells"]) == {"one", "two"}
    page = report.write_page(tmp_path).read_text("utf-8")
    assert "took 2.00 s in the median, from 1.00 to 4.00 s" in page
    assert "| one | 2.00 | 1.00 | 4.00 | 1.00 |" in page


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
    machine = {"device": "cpu", "packages": {"torch": "2.13.0"}}
    record = {"cells": cells, "seed": 1, "date": "2026-01-02", "machine": machine}
    text = report.text("mutants", "cpu", record)
    assert "Seed 1, 2026-01-02, cpu, torch 2.13.0." in text
    assert "killed 4 of 5, 80.0%. Survivors: f: not explained." in text
    said = report.text("diagnosis", "cpu", record)
    assert "for 2 of 3, 66.7%" in said
    assert "| k tail | 2 | 0.50 | 1.00 | race 1 |" in said
    assert "| missing operand | 1 | 1.00 | 1.00 |  |" in said
    held_out = report.text(
        "held-out", "cpu", {**record, "cells": {f"p: {k}": c for k, c in cells.items()}}
    )
    assert "the 1 programs" in held_out and "was made for 2 of 3, 66.7%." in held_out
    assert "Survivors: p: f: not explained." in held_out


def test_exploits_and_timing_are_shown_where_their_records_are(tmp_path: Path) -> None:
    (tmp_path / "tests" / "exploits").mkdir(parents=True)
    (tmp_path / "tests" / "exploits" / "catalogue.toml").write_text(
        '[[row]]\nrow = 11\nname = "a cache"\nstatus = "stopped"\nlayer = "static"\n'
    )
    (tmp_path / "evals" / "results").mkdir(parents=True)
    (tmp_path / "evals" / "results" / "judge-timing-h200.json").write_text(
        '{"kernel": "k", "compared": 200, "different": 1, "date": "2026-01-02", "cells": {},'
        ' "machine": {"gpu": {"name": "NVIDIA H200", "driver_version": "580"}}}'
    )
    page = report.write_page(tmp_path).read_text("utf-8")
    assert "| 11 | a cache | stopped | static |  |" in page
    assert (
        "different in 1 of 200 comparisons.\n\nMeasured 2026-01-02, NVIDIA H200, driver 580."
        in page
    )
