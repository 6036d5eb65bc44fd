"""Tests of agent/judge/ties.py: what falls to the other side of a jump is refused."""

from __future__ import annotations

import pytest

from tests.agent.judge.test_meaning import findings, spec_of


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("torch.round(z) * r", "floor(acc + 0.5) * r"),
        ("torch.round(z.clamp(-127, 127)) * r", "floor(minimum(maximum(acc, -127.0), 127.0) + 0.5) * r"),
        ("torch.where(z > 2, r, -r)", "where(greater_equal(acc, 2.0), r, -r)"),
        ("torch.where(z >= 6, 1.0, z) * r", "where(greater_equal(6.0, acc), acc, 1.0) * r"),
    ],
)  # fmt: skip
def test_what_rounds_or_compares_otherwise_is_refused(body: str, expression: str) -> None:
    (finding,) = findings(spec_of(body), expression, seed=4)
    assert "halves of whole numbers" in finding.message


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("torch.round(z) * r", "round_even(acc) * r"),
        ("torch.round(z / 3) * r", "round_even(acc * 0.3333333333333333) * r"),
        ("torch.where(z > 0, r, -r)", "where(greater_equal(0.0, acc), -r, r)"),
        ("F.relu(z) * r", "maximum(acc, 0.0) * r"),
        ("F.relu6(z) * r", "minimum(maximum(acc, 0.0), 6.0) * r"),
        ("torch.log(1 + torch.exp(z)).sign() * r", "greater(softplus(acc), 0.0) * r"),
    ],
)
def test_the_same_jump_written_otherwise_passes(body: str, expression: str) -> None:
    assert findings(spec_of(body), expression, seed=4) == []


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("z * torch.rsqrt(z * z + 1e-12) * r", "acc / (absolute(acc) + 0.000001) * r"),
        ("z / z.abs().clamp_min(2.0**-100) * r", "acc / maximum(absolute(acc), 1e-30) * r"),
    ],
)
def test_another_epsilon_is_refused(body: str, expression: str) -> None:
    (finding,) = findings(spec_of(body), expression, seed=4)
    assert "is another function of the inputs" in finding.message
