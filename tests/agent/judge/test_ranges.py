"""Tests of agent/judge/ranges.py: what overflows or vanishes in float32 alone is refused."""

from __future__ import annotations

import math

import pytest
import torch

from coda_agent.agent.judge.ranges import hold
from tests.agent.judge.test_meaning import findings, spec_of


def test_values_are_held_to_a_range() -> None:
    values = torch.tensor([0.0, 1e-3, -1e-3, 1.0, -8.0, 7.9, math.nan], dtype=torch.float64)
    held = hold(values, 2.0**-9, 8.0)
    assert held[:6].tolist() == [0.0, 0.0, 0.0, 1.0, -math.inf, 7.9] and held[6].isnan()
    assert hold(3, 1.0, 2.0) == 3


@pytest.mark.parametrize(
    ("body", "expression", "culprit"),
    [
        ("torch.sigmoid(z) * r", "exp(minimum(acc, 100.0)) / (1.0 + exp(minimum(acc, 100.0))) * r",
         "`exp(minimum(acc, 100))` overflows"),
        ("torch.where(z > 0, r, 0 * r)", "where(greater_equal(acc * acc * acc, 1e-300), r, 0.0)",
         "vanishes"),
        ("z.abs() * r", "sqrt(acc * acc) * r", "`acc · acc"),
        ("torch.rsqrt(z.abs() + 1e-8) * r",
         "(absolute(acc) + 1e-8) * rsqrt((absolute(acc) + 1e-8) * (absolute(acc) + 1e-8)"
         " * (absolute(acc) + 1e-8)) * r", "overflows"),
        # 0 is due, and an infinity times 0 stands there.
        ("torch.where(z > 0, 0.0, r)", "where(greater(acc, 0.0), acc * acc * 0.0, r)", "`acc · acc` overflows"),
        ("torch.tanh(z) * r", "(exp(2.0 * acc) - 1.0) / (exp(2.0 * acc) + 1.0) * r", "overflows"),
    ],
)  # fmt: skip
def test_what_float32_cannot_hold_is_refused(body: str, expression: str, culprit: str) -> None:
    (finding,) = findings(spec_of(body), expression, seed=5)
    assert "leaves float32's range" in finding.message and culprit in finding.message
    assert finding.where["output"] == "O" and finding.where["seed"] == 5


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("F.silu(z) * r", "acc / (1.0 + exp(-acc)) * r"),
        ("torch.sigmoid(z) * r", "r / (1.0 + exp(-acc))"),
        ("z * z * r", "(acc * r) * acc"),
        ("z * r / 6", "acc * (r * 0.16666666666666666)"),
        ("F.hardswish(z) * r", "acc * minimum(maximum(acc + 3.0, 0.0), 6.0) * r / 6.0"),
        ("F.softplus(z) * r", "(maximum(acc, 0.0) + log1p(exp(-absolute(acc)))) * r"),
    ],
)
def test_what_pytorch_loses_too_is_no_fault(body: str, expression: str) -> None:
    assert findings(spec_of(body), expression, seed=5) == []
