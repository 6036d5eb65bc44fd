"""Error measures and diagnoses, on faults made by hand."""

from __future__ import annotations

import math

import pytest
import torch

from coda_agent.agent.judge.compare import Errors, bound, diagnose, measure, within


@pytest.fixture
def truth() -> torch.Tensor:
    return torch.randn(200, 144, dtype=torch.float64, generator=torch.Generator().manual_seed(7))


def test_no_error_is_zero(truth: torch.Tensor) -> None:
    assert measure(truth, truth) == Errors(0.0, 0.0)


def test_norm_error_is_relative_to_the_truth(truth: torch.Tensor) -> None:
    assert measure(truth * 1.01, truth).norm == pytest.approx(0.01)


def test_a_fault_in_one_corner_shows_in_the_tile_and_not_in_the_norm(truth: torch.Tensor) -> None:
    wrong = truth.clone()
    wrong[192:, 128:] += 0.5  # the ragged last tile: 8 x 16 elements
    errors = measure(wrong, truth)
    scale = float(truth.square().mean().sqrt())
    assert errors.tile == pytest.approx(0.5 / scale, rel=1e-6)
    assert errors.norm == pytest.approx(0.5 / scale * math.sqrt(8 * 16 / truth.numel()), rel=1e-6)


def test_one_dimensional_outputs(truth: torch.Tensor) -> None:
    v = truth[:, 0]
    assert measure(v * 2, v).norm == pytest.approx(1.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_element_is_an_error_without_bound(truth: torch.Tensor, bad: float) -> None:
    wrong = truth.clone()
    wrong[3, 4] = bad
    assert measure(wrong, truth).norm == float("inf")
    assert measure(truth, wrong).norm == float("inf")
    assert measure(wrong, wrong).norm == 0.0


def test_the_bound_is_a_multiple_of_pytorch_and_never_below_the_floor() -> None:
    assert bound(Errors(0.01, 0.02), "bfloat16", 2.0) == Errors(0.02, 0.04)
    assert bound(Errors(0.0, 0.0), "bfloat16", 2.0) == Errors(2**-8, 2**-7)
    assert within(Errors(0.02, 0.04), Errors(0.02, 0.04))
    assert not within(Errors(0.02, 0.05), Errors(0.02, 0.04))


def test_diagnoses(truth: torch.Tensor) -> None:
    assert "times 0.5" in diagnose(truth * 0.5, truth)[0]
    swapped = truth.reshape(200, 72, 2).flip(-1).reshape(200, 144)
    assert "swapped" in diagnose(swapped, truth)[0]
    unwritten = truth.clone()
    unwritten[:100] = float("nan")
    assert "50.0% of it is NaN or was never written" in diagnose(unwritten, truth)[0]
    bias = torch.randn(144, dtype=torch.float64)
    assert "constant in each column" in diagnose(truth + bias, truth)[0]
    assert "constant in each row" in diagnose(truth + bias[:100].repeat(2)[:, None], truth)[0]
    wrong = truth.clone()
    wrong[5, 6] += 100
    pattern, where = diagnose(wrong, truth)
    assert pattern == "no simple pattern"
    assert (where["row"], where["column"]) == (5, 6)
    assert where["got"] == pytest.approx(where["expected"] + 100)
