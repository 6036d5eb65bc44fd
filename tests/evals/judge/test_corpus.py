"""Tests of evals/judge/corpus.py: right programs are not refused."""

from __future__ import annotations

import dataclasses
from pathlib import Path

import pytest
import torch

from coda_agent.evals.judge import corpus, scores
from coda_agent.evals.judge.corpus import Subject
from coda_agent.primitives.operation import OPS

SEED = 5
JUDGE = scores.Judge(Path(), "cpu")


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
