"""Tests of agent/judge/numerics.py: infinities that are planted, on a CPU."""

from __future__ import annotations

import pytest

from coda_agent.agent.judge.numerics import check_numerics
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives import __all__ as vocabulary
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import TileConfig
from coda_agent.specs import Spec
from tests.written import spec

_HEADER = "types: {T: [bfloat16]}\ncheck_shapes: [{M: 33, N: 48, K: 16}]\n"


def said(made: Spec, heading: str, *lines: str, near: dict[str, float] | None = None) -> str:
    """What the gate says of a program; empty where it admits it."""
    text = (
        f"from coda_agent.primitives import {', '.join({*vocabulary} - {'Program'})}\n"
        f"@epilogue({heading}\n" + "".join(f"    {line}\n" for line in lines)
    )
    tiles = {("k", "bfloat16"): (TileConfig(128, 128),)}
    found = check_numerics(
        Variant.of_all(made, read_programs(text)),
        tiles,
        device="cpu",
        progress=lambda *_: None,
        seed=1,
        approximated=near,
    )
    return found.findings[0].message if found.findings else ""


@pytest.mark.parametrize(
    ("count", "refused"),
    [
        ("1.0 - equal(acc, acc)", "Inf in A"),
        ("where(greater(absolute(acc), 3.4028234663852886e38), 1.0, 0.0)", "NaN in A"),
        ("1.0 - equal(acc - acc, 0.0)", ""),
        ("1.0 - greater_equal(3.4028234663852886e38, absolute(acc))", ""),
    ],
)
def test_a_count_of_what_is_not_finite_has_both(count: str, refused: str) -> None:
    """In few rows: disturbed runs made NaN of infinity, and 0 of NaN, which excused any count."""
    made = spec(
        "z = (A @ B.T).float(); return {'n': (~torch.isfinite(z)).float().sum(dim=-1)}",
        {}, {"n": "{shape: [M], dtype: float32}"}, name="k", header=_HEADER,
    )  # fmt: skip
    found = said(made, "n=RowSum)\ndef k(acc):", f"return {{'n': {count}}}")
    assert (f"n is wrong ({refused})" in found) if refused else not found


@pytest.mark.parametrize(
    ("finite", "refused"), [("equal(Z, Z)", True), ("equal(Z - Z, 0.0)", False)]
)
def test_infinities_in_operands(finite: str, refused: bool) -> None:
    made = spec(
        "return {'O': torch.where(torch.isfinite(Z.float()), (A @ B.T).float(), 0.0).to(A.dtype)}",
        {"Z": "[M, N]"}, name="k", header=_HEADER,
    )  # fmt: skip
    line = f"return {{'O': where({finite}, acc, 0.0)}}"
    found = said(made, "O=Tile)\ndef k(acc, Z: Tile):", line)
    assert ("O is wrong (Inf in the operands)" in found) == refused == bool(found)


def test_nan_of_a_program_is_not_said_to_be_unwritten() -> None:
    made = spec(
        "return {'O': torch.where(Z.float() > 0, (A @ B.T).float(), 0.0).to(A.dtype)}",
        {"Z": "[M, N]"}, name="k", header=_HEADER,
    )  # fmt: skip
    line = "return {'O': acc * greater(Z, 0.0)}"
    found = said(made, "O=Tile)\ndef k(acc, Z: Tile):", line)
    assert "O is wrong (NaN in A)" in found and found.endswith("is NaN where a number is due")


def test_nan_that_the_reference_makes_of_infinities_is_no_value() -> None:
    """PyTorch's softmax of inf and -inf is NaN; a sigmoid of their difference is 1."""
    made = spec(
        "z = (A @ B.T).float().unflatten(1, (-1, 2))\n"
        "return {'O': z.softmax(dim=-1).flatten(1).to(A.dtype)}",
        name="k", header=_HEADER,
    )  # fmt: skip
    body = "x, y = pairs(acc)", "return {'O': interleave(sigmoid(x - y), sigmoid(y - x))}"
    assert not said(made, "O=Tile)\ndef k(acc):", *body)


def test_an_approximation_may_be_off_by_as_much_more() -> None:
    made = spec(
        "return {'O': torch.exp((A @ B.T).float()).to(A.dtype)}",
        {}, {"O": "{shape: [M, N], dtype: T}"}, name="k", header=_HEADER,
    )  # fmt: skip
    nearly = "return {'O': exp(acc) * 1.0002}"
    assert "O is wrong" in said(made, "O=Tile)\ndef k(acc):", nearly)
    assert not said(made, "O=Tile)\ndef k(acc):", nearly, near={"k O": 2e-4})


_MOST = "{shape: [M, N/32], dtype: float32}"


def test_a_mask_shows_a_maximum_that_begins_with_a_number() -> None:
    made = spec(
        "z = (A @ B.T).float() + b.float(); "
        "return {'O': z.unflatten(1, (-1, 32)).topk(2, -1).values.sum(-1)}",
        {"b": "[N]"}, {"O": _MOST}, name="k", header=_HEADER.replace("48", "64"),
    )  # fmt: skip
    lines = (
        "z = acc + b",
        "top = group_max(z, 32)",
        "ties = group_sum(equal(z, top), 32)",
        "below = group_max(where(equal(z, top), {}, z), 32)",
        "return {{'O': top + where(greater(ties, 1.0), top, below)}}",
    )
    heading = "O=GroupTile32)\ndef k(acc, b: RowVector):"
    assert said(made, heading, *(x.format("log(0.0)") for x in lines)) == ""
    assert "-Inf in most of the operands" in said(
        made, heading, *(x.format("-3.0e38") for x in lines)
    )


@pytest.mark.parametrize(
    ("product", "refused"), [("acc * w", False), ("where(equal(w, 0.0), 0.0, acc * w)", True)]
)
def test_nan_comes_through_a_factor_of_zero(product: str, refused: bool) -> None:
    made = spec(
        "return {'O': ((A @ B.T).float() * w[:, None]).to(A.dtype)}",
        {"w": "{shape: [M], dtype: float32}"}, name="k", header=_HEADER,
    )  # fmt: skip
    found = said(made, "O=Tile)\ndef k(acc, w: ColVector):", f"return {{'O': {product}}}")
    assert ("(NaN beside zeros)" in found) == refused


@pytest.mark.parametrize(
    ("larger", "refused"), [("maximum(p, q)", False), ("where(greater(p, q), p, q)", True)]
)
def test_nan_of_one_column_reaches_what_is_made_of_a_pair(larger: str, refused: bool) -> None:
    made = spec(
        "z = (A @ B.T).float().unflatten(1, (-1, 2)); "
        "return {'O': z.amax(-1).to(A.dtype)}",
        {}, {"O": "[M, N/2]"}, name="k", header=_HEADER,
    )  # fmt: skip
    lines = "p, q = pairs(acc)", f"return {{'O': {larger}}}"
    found = said(made, "O=HalfTile)\ndef k(acc):", *lines)
    assert ("(NaN in B)" in found) == refused == bool(found)


@pytest.mark.parametrize(("floor", "refused"), [("C", False), ("maximum(C, -3e38)", True)])
def test_both_terms_of_a_sum_may_be_masked(floor: str, refused: bool) -> None:
    made = spec(
        "return {'O': torch.logaddexp((A @ B.T).float(), C.float()).to(A.dtype)}",
        {"C": "[M, N]"}, name="k", header=_HEADER,
    )  # fmt: skip
    lines = (
        f"c = {floor}",
        "t = maximum(acc, c)",
        ("return {'O': where(equal(t, -log(0.0) * -1.0), t, t + log1p(exp(minimum(acc, c) - t)))}"),
    )
    found = said(made, "O=Tile)\ndef k(acc, C: Tile):", *lines)
    assert ("(-Inf in A and most of the operands)" in found) == refused == bool(found)


@pytest.mark.parametrize(
    ("sum_", "refused"), [("(acc + b) * r", False), ("(acc + b) * 2.0 * r - (acc + b) * r", True)]
)
def test_minus_infinity_of_a_mask_stays_one(sum_: str, refused: bool) -> None:
    made = spec(
        "return {'O': (((A @ B.T).float() + b.float()) * r[:, None]).to(A.dtype)}",
        {"b": "[N]", "r": "{shape: [M], dtype: float32, draw: {uniform: [1, 2]}, domain: [1, 2]}"},
        name="k", header=_HEADER,
    )  # fmt: skip
    heading = "O=Tile)\ndef k(acc, b: RowVector, r: ColVector):"
    found = said(made, heading, f"return {{'O': {sum_}}}")
    assert ("(-Inf in most of the operands)" in found) == refused == bool(found)


def test_a_zero_that_the_program_makes_of_nan_is_not_said_to_be_unwritten() -> None:
    made = spec(
        "z = (A @ B.T).float(); return {'O': torch.where(z < 3, 0.0, 4.0).to(A.dtype)}",
        {}, name="k", header=_HEADER,
    )  # fmt: skip
    line = "return {'O': where(greater_equal(acc, 3.0), 4.0, 0.0)}"
    found = said(made, "O=Tile)\ndef k(acc):", line)
    assert "(NaN in A)" in found and found.endswith("is 0, which the program makes of such inputs")
