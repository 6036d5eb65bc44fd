"""Error measures and bounds, on faults made by hand and on drawn ones."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from coda_agent.agent.judge.compare import Errors, allowance, bound, measure, within

FEW = settings(max_examples=15)

DTYPES = [torch.bfloat16, torch.float16, torch.float32, torch.float8_e4m3fn]
SHAPES = st.tuples(st.integers(1, 70), st.integers(1, 90))


def draw(seed: int, *shape: int, std: float = 1.0) -> torch.Tensor:
    generator = torch.Generator().manual_seed(seed)
    return std * torch.randn(*shape, dtype=torch.float64, generator=generator)


@pytest.fixture
def truth() -> torch.Tensor:
    return draw(7, 200, 144)


def test_no_error_is_zero(truth: torch.Tensor) -> None:
    assert measure(truth, truth, torch.zeros_like(truth)) == Errors(0.0, 0.0, 0.0)


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
    assert measure(v * 2, v, v.abs() / 3).element == pytest.approx(3.0)


@pytest.mark.parametrize("bad", [float("nan"), float("inf"), -float("inf")])
def test_a_non_finite_element_is_an_error_without_bound(truth: torch.Tensor, bad: float) -> None:
    wrong = truth.clone()
    wrong[3, 4] = bad
    assert measure(wrong, truth).norm == float("inf")
    assert measure(truth, wrong).norm == float("inf")
    assert measure(wrong, wrong).norm == 0.0


def test_the_bound_is_a_multiple_of_pytorch_and_never_below_the_floor() -> None:
    assert bound(Errors(0.01, 0.02), "bfloat16", 2.0) == Errors(0.02, 0.04, 1.0)
    assert bound(Errors(0.0, 0.0), "bfloat16", 2.0) == Errors(2**-8, 2**-7, 1.0)
    assert within(Errors(0.02, 0.04, 1.0), Errors(0.02, 0.04, 1.0))
    assert not within(Errors(0.02, 0.05, 1.0), Errors(0.02, 0.04, 1.0))
    assert not within(Errors(0.02, 0.04, 1.1), Errors(0.02, 0.04, 1.0))


@FEW
@given(st.integers(0, 2**30), SHAPES, st.floats(-60, 60))
def test_errors_do_not_depend_on_the_scale(seed: int, shape: tuple[int, int], power: float) -> None:
    truth, noise, scale = draw(seed, *shape), draw(seed + 1, *shape, std=0.01), 2.0**power
    allowed = 0.02 * truth.abs()
    small = measure(truth + noise, truth, allowed)
    large = measure(scale * (truth + noise), scale * truth, scale * allowed)
    for name in ("norm", "tile", "element"):
        assert getattr(large, name) == pytest.approx(getattr(small, name), rel=1e-6), name


@FEW
@given(st.integers(0, 2**30), SHAPES)
def test_norm_and_element_do_not_depend_on_the_order(seed: int, shape: tuple[int, int]) -> None:
    truth, noise = draw(seed, *shape), draw(seed + 1, *shape, std=0.01)
    order = torch.randperm(shape[0], generator=torch.Generator().manual_seed(seed))
    allowed = 0.02 * truth.abs()
    straight = measure(truth + noise, truth, allowed)
    mixed = measure((truth + noise)[order], truth[order], allowed[order])
    assert mixed.norm == pytest.approx(straight.norm, rel=1e-12)
    assert mixed.element == straight.element


@FEW
@given(st.integers(0, 2**30), SHAPES, st.sampled_from(DTYPES), st.floats(-8, 4), st.booleans())
def test_one_rounding_is_always_allowed(
    seed: int, shape: tuple[int, int], dtype: torch.dtype, power: float, flat: bool
) -> None:
    truth = draw(seed, *shape, std=2.0**power)
    truth = (truth[:, 0] if flat else truth).clamp(-448, 448)
    allowed = allowance(truth, dtype, [])
    assert measure(truth.to(dtype), truth, allowed).element <= 1.0


@FEW
@given(
    st.integers(0, 2**30),
    SHAPES,
    st.sampled_from(DTYPES),
    st.floats(1.001, 1e6),
    st.sampled_from([-1, 1]),
    st.data(),
)
def test_a_single_element_beyond_its_allowance_is_always_caught(
    seed: int,
    shape: tuple[int, int],
    dtype: torch.dtype,
    excess: float,
    sign: int,
    data: Any,
) -> None:
    truth = draw(seed, *shape)
    allowed = allowance(truth, dtype, [truth * (1 + draw(seed + 1, *shape, std=2.0**-20))])
    at = data.draw(st.tuples(*(st.integers(0, extent - 1) for extent in shape)))
    wrong = truth.clone()
    wrong[at] += sign * excess * allowed[at]
    errors = measure(wrong, truth, allowed)
    assert errors.element == pytest.approx(excess, rel=1e-3)
    assert not within(errors, Errors(math.inf, math.inf, 1.0))


@FEW
@given(st.integers(0, 2**30), SHAPES)
def test_neighbours_share_the_largest_disturbance(seed: int, shape: tuple[int, int]) -> None:
    truth = torch.zeros(shape, dtype=torch.float64)
    run = draw(seed, *shape)
    allowed = allowance(truth, torch.bfloat16, [0.1 * run, run])
    assert (allowed >= 16 * run.abs()).all()
    assert float(allowed.max()) == pytest.approx(16 * float(run.abs().max()) * (1 + 2**-8))


def test_one_wrong_element_of_a_million_passes_norm_and_tile_and_not_the_element() -> None:
    truth = draw(3, 512, 2048)
    out = truth.bfloat16()
    allowed = allowance(truth, torch.bfloat16, [truth * (1 + 2**-20)])
    limit = bound(measure(out, truth), "bfloat16", 2.0)
    assert within(measure(out, truth, allowed), limit)
    out[500, 2001] += 0.25
    errors = measure(out, truth, allowed)
    assert errors.norm < limit.norm and errors.tile < limit.tile
    assert errors.element > 10


def test_an_output_added_to_in_place_may_round_twice() -> None:
    start, addend = draw(1, 64, 64).bfloat16(), draw(2, 64, 64)
    truth = start.double() + addend
    out = (start.double() + addend.bfloat16().double()).bfloat16()
    assert measure(out, truth, allowance(truth, torch.bfloat16, [])).element > 1
    assert measure(out, truth, allowance(truth, torch.bfloat16, [], start)).element <= 1
