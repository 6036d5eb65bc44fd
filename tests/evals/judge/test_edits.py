"""Tests of evals/judge/edits.py: rewrites mean the same, and faults do not."""

from __future__ import annotations

from typing import Any

import torch

from coda_agent.agent.judge.meaning import replayed
from coda_agent.evals.judge import corpus
from coda_agent.evals.judge.corpus import Subject
from coda_agent.evals.judge.edits import REWRITES, faulty
from coda_agent.specs import draw_inputs


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
