"""Tests of agent/judge/places.py: what is right at the check shapes alone is refused."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest

from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.agent.judge.places import constants, moved, place_cases, uniform, witnesses
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec
from tests.written import spec

_SHAPES = "bench_shapes: [{M: 2048, N: 2048, K: 1024}]\ncheck_shapes: [{M: 33, N: 48, K: 16}]\n"


def spec_of(body: str, outputs: Mapping[str, str], more: Mapping[str, str] | None = None) -> Spec:
    return spec(
        f"z = (A @ B.T).float(); r = r[:, None]; {body}",
        {"r": "{shape: [M], dtype: float32, draw: {uniform: [0.5, 1.5]}}", **(more or {})},
        dict(outputs),
        name="k",
        header=f"types: {{T: [bfloat16]}}\n{_SHAPES}",
    )


def scaled() -> Spec:
    return spec_of("return {'O': (z * r).to(torch.bfloat16)}", {"O": "{shape: [M, N]}"})


def programs(expression: str, output: str = "O=Tile", more: str = "") -> Any:
    from coda_agent.primitives import __all__ as vocabulary

    names = ", ".join(sorted({*vocabulary} - {"Program"}))
    name = output.partition("=")[0]
    return read_programs(
        f"from coda_agent.primitives import {names}\n"
        f"@epilogue({output})\ndef k(acc, r: ColVector{more}):\n    return {{'{name}': {expression}}}\n"
    )


def faults(made: Spec, expression: str, output: str = "O=Tile", more: str = "") -> list[str]:
    return [f.message for f in check_meaning(made, programs(expression, output, more), seed=2)]


ROW, COLUMN = "row_index(acc)", "column_index(acc)"


@pytest.mark.parametrize(
    "expression",
    [
        f"where(greater_equal({COLUMN}, 8000.0), 0.0, acc * r)",
        f"where(greater_equal({ROW}, 600.0), acc, acc * r)",
        f"where(greater_equal({ROW} * 0.0001, 1.0), 0.0, acc * r)",
        f"where(greater_equal({COLUMN}, 5000.0), where(greater_equal({ROW}, 5000.0), 0.0, acc * r), acc * r)",
        f"where(greater_equal({COLUMN}, 200000.0), 0.0, acc * r)",
        f"acc * r + maximum({ROW} - 4096.0, 0.0)",
        # Places that no constant stands for: one element, twenty, one tile, and tiles by a product.
        f"where(equal(fmod({ROW}, 1024.0), 1023.0) * equal(fmod({COLUMN}, 512.0), 511.0), acc, acc * r)",
        f"acc * r * where(equal(fmod({COLUMN}, 512.0), 511.0) * equal(floor({ROW} / 20.0), 20.0), 2.0, 1.0)",
        f"where(equal(floor({ROW} / 128.0), 3.0) * equal(floor({COLUMN} / 128.0), 5.0), acc, acc * r)",
        f"where(equal(floor({ROW} / 128.0) * floor({COLUMN} / 128.0), 35.0), acc, acc * r)",
        f"where(equal(floor({ROW} / 10000.0), 40.0), 0.0, acc * r)",
    ],
)
@pytest.mark.one_in(2)
def test_a_program_that_is_wrong_further_out_is_refused(expression: str) -> None:
    (message,) = faults(scaled(), expression)
    assert "O is another function of the inputs" in message


FAR = "from row 4096 and column 0 on"


@pytest.mark.parametrize(
    ("body", "right", "wrong", "case"),
    [
        ("z * r", "acc * r", "minimum(acc * r, 40.0)", "(A times 64, "),
        ("z * r", "acc * r", "where(equal(acc, acc), acc * r, 0.5)", "(NaN in A, "),
        ("torch.round(z) * r", "round_even(acc) * r", "floor(acc + 0.5) * r", "where inputs are"),
    ],
)
@pytest.mark.one_in(3)
def test_values_beyond_the_usual_are_looked_at_further_out(
    body: str, right: str, wrong: str, case: str
) -> None:
    """From row 4096 on a bound, a number for NaN, another half."""
    made = spec_of(f"return {{'O': ({body}).to(torch.bfloat16)}}", {"O": "{shape: [M, N]}"})
    there = f"where(greater(4096.0, {ROW}), {right}, {{}})"
    (message,) = faults(made, there.format(wrong))
    assert case in message and FAR in message
    assert faults(made, there.format(right)) == []


def test_nan_is_not_left_out_where_a_factor_is_what_the_program_compares_it_with() -> None:
    (message,) = faults(scaled(), "where(equal(r, 0.75), 0.0, acc * r)")
    assert message.startswith("O is another function of the inputs (numbers that the program")
    made = spec_of("return {'O': (z * (r - 0.75)).to(torch.bfloat16)}", {"O": "{shape: [M, N]}"})
    (message,) = faults(made, "where(equal(r, 0.75), 0.0, acc * (r - 0.75))")
    assert "where NaN is due (NaN in A, numbers that the program compares)" in message


def test_a_sum_of_the_first_columns_is_refused() -> None:
    made = spec_of("return {'s': (z * r).sum(-1)}", {"s": "{shape: [M], dtype: float32}"})
    assert faults(made, "acc * r", "s=RowSum") == []
    held = f"where(greater_equal({COLUMN}, 1024.0), 0.0, acc * r)"
    assert len(faults(made, held, "s=RowSum")) == 1


def test_a_distance_that_is_held_is_refused() -> None:
    """The reference goes by places itself, so tall and wide shapes show it."""
    made = spec_of(
        "i, j = torch.arange(z.shape[0])[:, None], torch.arange(z.shape[1]); "
        "return {'O': (z + r * (i - j).abs()).to(torch.bfloat16)}",
        {"O": "{shape: [M, N]}"},
    )
    assert not uniform(made, {})
    assert faults(made, f"acc + r * absolute({ROW} - {COLUMN})") == []
    assert len(faults(made, f"acc + r * minimum(absolute({ROW} - {COLUMN}), 1024.0)")) == 1


def test_a_window_is_looked_at_along_the_diagonal() -> None:
    """Tall and wide shapes have no element near the diagonal that is far from the origin."""
    made = spec_of(
        "i, j = torch.arange(z.shape[0])[:, None], torch.arange(z.shape[1]); "
        "return {'O': (z * r * ((i - j).abs() < 64)).to(torch.bfloat16)}",
        {"O": "{shape: [M, N]}"},
    )
    assert not uniform(made, {}) and uniform(made, {}, diagonally=True)
    window = f"acc * r * greater({{}}, absolute({ROW} - {COLUMN}))"
    assert faults(made, window.format("64.0")) == []
    later = f"where(greater_equal({ROW}, 2048.0), 63.0, 64.0)"
    (message,) = faults(made, window.format(later))
    assert "from row 2048 and column 2048 on" in message


def test_thirds_of_a_fixed_number_of_columns_are_no_window() -> None:
    """The first third and the last are alike, and 256 columns apart."""
    made = spec(
        "a, b, c = (A @ B.T).float().split([128, 128, 128], -1); "
        "return {'O': torch.cat((a, 1 + b, c), -1).to(torch.bfloat16)}",
        name="k",
        header="types: {T: [bfloat16]}\ndims: {M: {}, N: {only: 384}, K: {multiple_of: 8}}\n"
        "check_shapes: [{M: 33, N: 384, K: 16}]\n",
    )
    assert not uniform(made, {}, diagonally=True)


def test_columns_of_a_spec_with_targets_are_looked_at_further_out() -> None:
    made = spec_of(
        "return {'s': (z * r).sum(-1), 't': z.gather(1, y[:, None].long())[:, 0]}",
        {"s": "{shape: [M], dtype: float32}", "t": "{shape: [M], dtype: float32}"},
        {"y": "{shape: [M], dtype: int64}"},
    )
    assert uniform(made, {})
    heading, operands = "s=RowSum, t=RowGather", ", y: ColIndex"
    assert faults(made, "acc * r, 't': gather(acc, y)", heading, operands) == []
    held = f"where(greater_equal({COLUMN}, 200000.0), 0.0, acc * r), 't': gather(acc, y)"
    assert len(faults(made, held, heading, operands)) == 1


def test_places_that_change_nothing_pass() -> None:
    made = scaled()
    assert uniform(made, {})
    assert faults(made, f"acc * r + 0.0 * {ROW}") == []
    assert faults(made, f"where(greater_equal({ROW}, 0.0), acc * r, 0.0)") == []


def test_random_numbers_that_the_reference_does_not_draw_are_refused() -> None:
    rare = "where(greater(1.2e-7, philox_uniform(acc, 7, 0)), acc, acc * r)"
    (message,) = faults(scaled(), rare)
    assert (
        "it draws random numbers, and the reference is the same function in every place" in message
    )
    made = spec_of(
        "from coda_agent.primitives.placed import philox; "
        "kept = philox(7.0, 0.0, *z.shape, device=z.device).to(z.dtype) >= 0.5; "
        "return {'O': (z * r * kept).to(torch.bfloat16)}",
        {"O": "{shape: [M, N]}"},
    )
    assert faults(made, "acc * r * greater_equal(philox_uniform(acc, 7, 0), 0.5)") == []


def test_cases_reach_every_constant_and_the_bench_shapes() -> None:
    (program,) = programs(f"where(greater_equal({COLUMN}, 9000.0), acc, acc * r)").values()
    assert constants(program.graph) == [9000]
    cases = list(place_cases(scaled(), program, {}))
    assert max(c.sizes["N"] for c in cases) >= 9000 and max(c.sizes["M"] for c in cases) >= 2048
    assert any("from row 0 and column 8960" in c.label for c in cases)
    assert witnesses(program.graph) == [(0, 0), (0, 9000)]
    (plain,) = programs("acc * r").values()
    assert list(place_cases(scaled(), plain, {})) == []


def test_a_moved_program_computes_what_stands_there() -> None:
    import torch

    from coda_agent.primitives.interpret import interpret

    (program,) = programs(f"acc * 0.0 * r + {ROW} * 100.0 + {COLUMN}").values()
    a = torch.ones(2, 8, dtype=torch.float64)
    options: Any = {"dtypes": {}, "compute": torch.float64}
    out = interpret(
        moved(program, 5, 30), a, a[:, :8].repeat(2, 1), {"r": torch.ones(2)}, **options
    )
    assert out["O"].tolist() == [[530.0, 531.0, 532.0, 533.0], [630.0, 631.0, 632.0, 633.0]]


AT_A_NUMBER = {
    "a slice": ("y = torch.cat((z[:, :4096] * 0.1, z[:, 4096:]), 1)", "acc * 0.1"),
    "rows": ("y = torch.cat((z[:600] * 0.1, z[600:]), 0)", "acc * 0.1"),
    "a computed number": ("y = torch.cat((z[:, :8 * 512] * 0.1, z[:, 8 * 512:]), 1)", "acc * 0.1"),
    "far columns": (
        "y = torch.where(torch.arange(z.shape[1]) < 9001, z, -3.0)",
        "acc",
    ),
}


@pytest.mark.parametrize("name", AT_A_NUMBER)
def test_a_program_without_the_references_places_is_refused(name: str) -> None:
    body, expression = AT_A_NUMBER[name]
    made = spec_of(f"{body}; return {{'O': (y * r).to(torch.bfloat16)}}", {"O": "{shape: [M, N]}"})
    (message,) = faults(made, f"{expression} * r")
    assert "is another function of the inputs (" in message


def test_a_program_with_the_references_far_places_passes() -> None:
    for axis, index in (("1", COLUMN), ("0", ROW)):
        body = f"i = torch.arange(z.shape[{axis}]).reshape({'1, -1' if axis == '1' else '-1, 1'})"
        body += "; return {'O': (torch.where(i < 9001, z, -3.0) * r).to(torch.bfloat16)}"
        made = spec_of(body, {"O": "{shape: [M, N]}"})
        assert not uniform(made, {})
        assert faults(made, f"where(greater(9001.0, {index}), acc, -3.0) * r") == []
        (message,) = faults(made, f"where(greater(9000.0, {index}), acc, -3.0) * r")
        assert "is another function" in message
