"""Tests of agent/judge/jumps.py: in float32 a program takes the sides that PyTorch is sure of."""

from __future__ import annotations

import pytest
import torch

from coda_agent.agent.judge.jumps import sides
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.agent.judge.records import Finding
from coda_agent.primitives import __all__ as vocabulary
from coda_agent.primitives.reader import read_programs
from coda_agent.specs import Spec
from tests.agent.judge.test_meaning import findings, spec_of
from tests.written import spec

_TOP = "a = maximum(group_max(absolute(acc), 32), 7.888609052210118e-31)"
_EXPONENT = "torch.floor(torch.log2(a)) - 8.0"
_BITS = "torch.frexp(a).exponent - 9"


def block_scaled(exponent: str) -> Spec:
    body = (
        "D = (A @ B.T).float().unflatten(1, (-1, 32))\n"
        "a = D.abs().amax(dim=-1, keepdim=True).clamp(min=2.0**-100)\n"
        f"s = torch.ldexp(torch.ones_like(a), {exponent})\n"
        "return {'O': (D / s).clamp(-448.0, 448.0).flatten(1).to(torch.float8_e4m3fn)}"
    )
    header = (
        "dims: {M: {}, N: {multiple_of: 32}, K: {multiple_of: 8}}\n"
        "types: {T: [bfloat16]}\ncheck_shapes: [{M: 33, N: 96, K: 16}]\n"
    )
    return spec(body, {}, {"O": "{shape: [M, N], dtype: float8_e4m3fn}"}, name="k", header=header)


def judged(made: Spec, exponent: str, top: str = _TOP) -> list[Finding]:
    text = (
        f"from coda_agent.primitives import {', '.join({*vocabulary} - {'Program'})}\n"
        f"@epilogue(O=Tile)\ndef k(acc):\n    {top}\n    s = exp2({exponent})\n"
        "    return {'O': clamp(acc / s, -448.0, 448.0)}\n"
    )
    return check_meaning(made, read_programs(text), seed=1)


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("torch.where(z >= 0.1, r, -r)", "where(greater(acc, 0.1), r, -r)"),
        ("torch.where(z > 0.7, r, -r)", "where(greater_equal(acc, 0.7), r, -r)"),
        ("torch.where(z.abs() > 0.3, r, 0 * r)", "r - where(greater(0.3, absolute(acc)), r, 0.0)"),
    ],
)
def test_another_side_of_a_jump_is_refused(body: str, expression: str) -> None:
    (finding,) = findings(spec_of(body, stored="float32"), expression, seed=4)
    assert "takes the other side of a jump" in finding.message
    assert finding.where["seed"] == 4 and "beside them" in finding.where["case"]


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("torch.where(z >= 0.1, r, -r)", "where(greater(0.1, acc), -r, r)"),
        ("torch.where(z >= 0.1, r, -r)", "where(greater_equal(acc, 0.10000000149011612), r, -r)"),
        ("torch.where(z >= 0.7, r, -r)", "where(greater_equal(acc * 1.4285714285714286, 1.0), r, -r)"),
        ("torch.round(z / r) * r", "round_even(acc * (1.0 / r)) * r"),
        ("torch.where(z - r >= 0.1, r, -r)", "where(greater_equal(acc, r + 0.1), r, -r)"),
        ("torch.floor(z * 3) / 3 * r", "floor(acc * 3.0) * 0.3333333333333333 * r"),
        ("torch.floor(z.abs().sqrt()) * r", "floor(absolute(acc) * rsqrt(absolute(acc) + 1e-30)) * r"),
        ("z.cos().masked_fill(z > 0, 0.5) * r", "where(greater(acc, 0.0), 0.5, cos(wrapped(acc))) * r"),
        ("torch.ceil((z + 0.5) - 0.5) * r", "-floor(-acc) * r"),
        ("torch.ceil(0.5 - (0.5 - z)) * r", "-floor(-acc) * r"),
        ("(F.hardswish(3 * z.abs()) % 1.5).trunc() * r", "floor(fmod(hard_swish(3.0 * absolute(acc)), 1.5)) * r"),
    ],
)  # fmt: skip
@pytest.mark.one_in(2)
def test_the_same_side_written_otherwise_passes(body: str, expression: str) -> None:
    for seed in range(3):
        assert findings(spec_of(body, stored="float32"), expression, seed) == []


@pytest.mark.parametrize(
    ("due", "exponent", "top"),
    [
        (_EXPONENT, "floor(log(a) * 1.4426950408889634) - 8.0", _TOP),
        (_EXPONENT, "floor(log2(a)) - 8.0", _TOP.replace("7.888609052210118e-31", "2e-30")),
        (_BITS, 'floor(ptx("log2", "lg2.approx.f32 $0, $1;", a)) - 8.0', _TOP),
    ],
)
def test_another_exponent_of_a_block_is_refused(due: str, exponent: str, top: str) -> None:
    (finding,) = judged(block_scaled(due), exponent, top)
    assert "takes the other side of a jump" in finding.message
    assert "powers of two" in finding.where["case"]


def test_the_exponent_of_a_block_is_met_at_powers_of_two() -> None:
    assert judged(block_scaled(_EXPONENT), "floor(log2(a)) - 8.0") == []
    assert judged(block_scaled(_EXPONENT), "-floor(8.0 - floor(log2(a)))") == []


def test_the_direction_of_a_complex_number_is_no_jump() -> None:
    made = spec(
        "z = torch.view_as_complex((A @ B.T).float().unflatten(1, (-1, 2)))\n"
        "return {'O': torch.view_as_real(torch.sgn(z)).flatten(1).to(A.dtype)}",
        name="k", header="types: {T: [bfloat16]}\ncheck_shapes: [{M: 33, N: 96, K: 16}]\n",
    )  # fmt: skip
    inputs = {"A": torch.eye(16, dtype=torch.float64), "B": torch.eye(96, 16, dtype=torch.float64)}
    assert sides(made, {}, inputs, set()) == []


def test_pytorch_is_sure_where_nothing_was_rounded() -> None:
    """Of z >= 0.1 where z is any float32, and the program has the 0.1; of z / 3 >= 0.1 nowhere."""
    z = torch.tensor([[0.1, 0.2], [0.3, 0.7]]).double()
    inputs = {"A": torch.eye(2, dtype=torch.float64), "B": z.mT, "r": torch.ones(2).double()}

    def sure(body: str, number: float) -> bool:
        found = sides(spec_of(body), {}, inputs, {number})
        assert all(
            bool((other == -due).all() and certain.all()) for _, due, other, certain in found
        )
        return bool(found)

    assert sure("torch.where(z >= 0.1, r, -r)", 0.10000000149011612)
    assert not sure("torch.where(z >= 0.1, r, -r)", 0.2)
    assert not sure("torch.where(z / 3 >= 0.5, r, -r)", 0.5)
