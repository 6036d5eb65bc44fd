"""Diagnoses of faults made by hand, on outputs of every shape; the reference is written here."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.diagnosis import FAULTS, Diagnosis, diagnose
from coda_agent.agent.judge.wrong_output import Origin, WrongOutput
from coda_agent.primitives.errors import SpecError

M, N, K = 200, 144, 136
TILE = (64, 32)
Fault = Callable[[dict[str, Any]], torch.Tensor]


def draw(seed: int = 3) -> dict[str, torch.Tensor]:
    g = torch.Generator().manual_seed(seed)
    a, b = torch.randn(M, K, generator=g), torch.randn(N, K, generator=g) / K**0.5
    r = torch.rand(M, generator=g) + 0.5
    bias = torch.randn(N, generator=g)
    c = torch.randn(M, N, generator=g)
    return {"A": a.bfloat16(), "B": b.bfloat16(), "C": c.bfloat16(), "r": r, "bias": bias}


def full(x: Mapping[str, Any]) -> torch.Tensor:
    """silu((A Bᵀ) · r + bias) + C"""
    return torch.nn.functional.silu(x["A"] @ x["B"].mT * x["r"][:, None] + x["bias"]) + x["C"]


def half(x: Mapping[str, Any]) -> torch.Tensor:
    d = x["A"] @ x["B"].mT * x["r"][:, None] + x["bias"]
    return torch.nn.functional.silu(d[:, 0::2]) * d[:, 1::2]


def wide(x: Mapping[str, Any]) -> torch.Tensor:
    d = x["A"] @ x["B"].mT
    return torch.stack((d * x["r"][:, None], d + x["C"]), -1).flatten(-2)


def row_mean(x: Mapping[str, Any]) -> torch.Tensor:
    return (x["A"] @ x["B"].mT + x["C"]).square().mean(-1)


def column_sum(x: Mapping[str, Any]) -> torch.Tensor:
    return (x["A"] @ x["B"].mT * x["C"] * x["r"][:, None]).sum(0)


def run(
    function: Callable[[Mapping[str, Any]], torch.Tensor],
    fault: Callable[[dict[str, torch.Tensor]], torch.Tensor],
    again: torch.Tensor | None = None,
) -> Diagnosis:
    inputs = draw()

    def reference(values: Mapping[str, Any]) -> torch.Tensor:
        try:
            return function({x: v.double() for x, v in values.items()})
        except RuntimeError as error:
            raise SpecError(str(error)) from error

    truth = reference(inputs)
    out = fault({x: v.double() for x, v in inputs.items()})
    out = out.float() if out.ndim == 1 else out.bfloat16()
    again = out if again is None else again
    return diagnose(WrongOutput(out, truth, Origin(inputs, ("A", "B"), reference), TILE), again)


def without_tail(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    return {**x, "A": x["A"][:, :128], "B": x["B"][:, :128]}


def shifted_tiles(x: torch.Tensor) -> torch.Tensor:
    return torch.cat((x[:, :32], x[:, :-32]), 1)


def rounded(x: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    product = (x["A"] @ x["B"].mT).bfloat16().double()
    return {**x, "A": product, "B": torch.eye(N, dtype=torch.float64)}


CASES: list[tuple[str, Callable[..., torch.Tensor], Fault]] = [
    ("constant_factor", full, lambda x: full(x) * 1.02),
    ("constant_factor", wide, lambda x: -wide(x)),
    ("constant_factor", full, lambda x: full({**x, "r": -x["r"]})),
    ("constant_factor", full, lambda x: full({**x, "A": x["A"] * 0.9})),
    ("swapped_pair", half, lambda x: half(x).unflatten(1, (-1, 2)).flip(-1).flatten(1)),
    ("swapped_pair", half, lambda x: half({**x, "B": x["B"][torch.arange(N) ^ 1], "bias": x["bias"][torch.arange(N) ^ 1]})),
    ("shifted_pair", wide, lambda x: wide(x).roll(2, 1)),
    ("shifted_pair", full, lambda x: full({**x, "bias": x["bias"].roll(1)})),
    ("shifted_tile", full, lambda x: shifted_tiles(full(x))),
    ("missing_operand", full, lambda x: full({**x, "C": x["C"] * 0})),
    ("missing_operand", half, lambda x: half({**x, "r": x["r"] * 0 + 1})),
    ("missing_operand", row_mean, lambda x: row_mean({**x, "C": x["C"] * 0})),
    ("doubled_operand", full, lambda x: full({**x, "bias": 2 * x["bias"]})),
    ("doubled_operand", column_sum, lambda x: column_sum({**x, "r": x["r"] ** 2})),
    ("wrong_broadcast", full, lambda x: full({**x, "bias": x["bias"][torch.arange(M) % N, None]})),
    ("k_tail", full, lambda x: full(without_tail(x))),
    ("k_tail", column_sum, lambda x: column_sum(without_tail(x))),
    ("early_rounding", wide, lambda x: wide(rounded(x))),
    ("rounded_statistics", row_mean, lambda x: row_mean(rounded(x))),
    ("wrong_statistics", row_mean, lambda x: row_mean(x) * N),
    ("wrong_statistics", row_mean, lambda x: (x["A"] @ x["B"].mT + x["C"]).amax(-1)),
    ("wrong_function", full, lambda x: torch.relu(x["A"] @ x["B"].mT * x["r"][:, None] + x["bias"]) * x["C"]),
]  # fmt: skip


@pytest.mark.parametrize(("fault", "function", "made"), CASES)
def test_the_fault_that_was_made_is_named(
    fault: str, function: Callable[..., torch.Tensor], made: Fault
) -> None:
    found = run(function, made)
    assert (found.fault, found.where["fault"]) == (fault, fault), found
    assert found.fault in FAULTS


def test_a_region_that_was_never_written_is_named_with_its_place() -> None:
    def fault(x: dict[str, torch.Tensor]) -> torch.Tensor:
        out = full(x)
        out[192:, 64:] = float("nan")
        return out

    found = run(full, fault)
    assert found.fault == "unwritten"
    assert "rows 192 to 199, columns 64 to 143" in found.text
    assert (found.where["row"], found.where["column"]) == (192, 64)
    assert found.where["at_tile"] == [3, 2]


def test_a_stale_tile_is_named_with_its_place() -> None:
    def fault(x: dict[str, torch.Tensor]) -> torch.Tensor:
        out = full(x)
        out[64:128, 32:64] = torch.randn(64, 32, dtype=torch.float64)
        return out

    found = run(full, fault)
    assert found.fault == "unwritten"
    assert "rows 64 to 127, columns 32 to 63" in found.text


def test_nan_for_an_infinity_is_named() -> None:
    inputs = draw()
    truth = full({x: v.double() for x, v in inputs.items()})
    truth[3] = -math.inf
    out = truth.clone()
    out[3] = math.nan
    text, mask = WrongOutput(out, truth, Origin(inputs, ("A", "B"), full), TILE).beyond()
    assert text.endswith("(rows 3 to 3, columns 0 to 143) is NaN where an infinity is due")
    assert mask.sum() == truth.shape[1]


def test_nan_of_the_program_itself_was_written() -> None:
    inputs = draw()
    exact = {x: v.double() for x, v in inputs.items()}
    origin, truth = Origin(inputs, ("A", "B"), full), full(exact)
    for value, said in ((math.nan, "NaN"), (math.inf, "infinite")):
        out = truth.clone()
        out[3] = value
        seen = diagnose(WrongOutput(out, truth, origin, TILE), out)
        assert seen.fault == "not_finite"
        assert seen.text.endswith(
            f"(rows 3 to 3, columns 0 to 143) is {said} where a number is due"
        )
        assert seen.where["row"] == 3


@pytest.mark.parametrize(("stored", "fault"), [(False, "wrong_function"), (True, "k_tail")])
def test_a_mistake_predicts_what_is_right_and_a_kernel_may_err_in_places(
    stored: bool, fault: str
) -> None:
    inputs = draw()
    exact = {x: v.double() for x, v in inputs.items()}
    truth = full(exact)
    out = torch.cat((full(without_tail(exact))[:100], truth[100:]))
    out = out.bfloat16() if stored else out
    origin = Origin(inputs, ("A", "B"), lambda x: full({n: v.double() for n, v in x.items()}))
    assert diagnose(WrongOutput(out, truth, origin, TILE), out).fault == fault


def test_two_runs_that_differ_are_a_race() -> None:
    again = full({x: v.double() for x, v in draw().items()}).bfloat16()
    again[3, 4] += 1
    found = run(full, lambda x: full(x) * 1.5, again=again)
    assert found.fault == "race"


def test_the_worst_element_and_its_parity_are_told() -> None:
    def fault(x: dict[str, torch.Tensor]) -> torch.Tensor:
        out = wide(x)
        out[:, 1::2] *= -1
        out[5, 7] += 100
        return out

    found = run(wide, fault)
    assert (found.where["row"], found.where["column"], found.where["parity"]) == (5, 7, "odd")
    # Width 2N: a tile is twice as wide.
    assert found.where["at_tile"] == [0, 0]
    assert found.where["got"] == pytest.approx(100 - found.where["expected"], rel=1e-2)


def test_a_vector_by_column_says_column() -> None:
    def fault(x: dict[str, torch.Tensor]) -> torch.Tensor:
        out = column_sum(x)
        out[70] = float("nan")
        return out

    where = run(column_sum, fault).where
    assert where["column"] == 70 and "row" not in where
    assert where["at_tile"] == [2]


def test_a_factor_is_told() -> None:
    assert "times 1.02" in run(full, lambda x: full(x) * 1.02).text
    assert "C enters times -0.5" in run(full, lambda x: full({**x, "C": x["C"] * -0.5})).text


def test_the_columns_of_k_that_were_skipped_are_told() -> None:
    found = run(full, lambda x: full(without_tail(x)))
    assert found.text == "columns 128 to 135 of A and B are skipped"


def test_nan_that_does_not_arrive_is_no_missing_write() -> None:
    def spoilt(x: Mapping[str, Any]) -> torch.Tensor:
        out = full(x)
        out[2] = float("nan")
        return out

    found = run(spoilt, lambda x: spoilt(x).nan_to_num())
    assert found.fault == "wrong_function" and "does not reach it" in found.text


def test_what_differs_in_few_elements_alone_is_not_explained_by_anything() -> None:
    """The median difference is 0 then: cut at three times that, nothing is left to explain."""
    inputs = draw()
    truth = full({x: v.double() for x, v in inputs.items()})
    out = truth.clone()
    out[3, 4] *= 1 + 2.0**-9
    origin = Origin(inputs, ("A", "B"), lambda x: full({n: v.double() for n, v in x.items()}))
    seen = diagnose(WrongOutput(out, truth, origin, TILE), out)
    assert seen.fault != "swapped_pair" and "swapped" not in seen.text
    assert (seen.where["row"], seen.where["column"]) == (3, 4)


def test_the_worst_element_is_the_one_that_exceeds_what_is_allowed_there() -> None:
    """Not the largest number, whose rounding is larger than the fault."""
    inputs = draw()
    truth = full({x: v.double() for x, v in inputs.items()})
    allowed = truth.abs() * 2.0**-8 + 2.0**-8
    out = truth + 0.5 * allowed
    row, column = divmod(int(truth.abs().argmin()), N)
    out[row, column] = truth[row, column] + 1.5 * allowed[row, column]
    origin = Origin(inputs, ("A", "B"), lambda x: full({n: v.double() for n, v in x.items()}))
    stored = out.bfloat16()
    seen = diagnose(WrongOutput(stored, truth, origin, TILE, allowed), stored)
    assert (seen.where["row"], seen.where["column"]) == (row, column)
