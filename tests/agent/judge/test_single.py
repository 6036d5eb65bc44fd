"""Tests of agent/judge/single.py: what loses its digits in float32 alone is refused."""

from __future__ import annotations

import pytest
import torch

from coda_agent.agent.judge.draws import draws
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.agent.judge.runners import replayed
from coda_agent.agent.judge.single import cancelling_draws, digits_fault
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives import Tile, epilogue
from coda_agent.primitives.reader import read_programs
from tests.agent.judge.test_meaning import findings, program, spec_of
from tests.written import spec


@pytest.mark.parametrize(
    ("body", "expression", "culprit"),
    [
        ("torch.sigmoid(-z) * r", "(1.0 - sigmoid(acc)) * r", "`sigmoid(acc)`"),
        ("F.silu(z) * r", "acc * r * (tanh(acc * 0.5) * 0.5 + 0.5)", "`tanh(acc · 0.5)`"),
        ("torch.tanh(z) * r", "(2.0 * sigmoid(2.0 * acc) - 1.0) * r", "`sigmoid(2 · acc)`"),
        ("F.softplus(z) * r", "(maximum(acc, 0.0) + log(1.0 + exp(-absolute(acc)))) * r",
         "`1 + exp(-absolute(acc))`"),
        ("torch.log1p(z.abs()) * r", "where(greater(absolute(acc), 1e-6), "
         "log(1.0 + absolute(acc)), absolute(acc)) * r", "`1 + absolute(acc)`"),
        ("(z.unflatten(1, (-1, 16)).var(2, correction=0) + 1e-5).repeat_interleave(16, 1) * r",
         "(group_sum(acc * acc, 16) * 0.0625 + 1e-5"
         " - group_sum(acc, 16) * group_sum(acc, 16) * 0.00390625) * r", "group_sum(acc"),
    ],
)  # fmt: skip
def test_what_loses_its_digits_in_float32_is_refused(
    body: str, expression: str, culprit: str
) -> None:
    made = spec_of(body)
    variant = Variant(made, program(expression), {})
    faults = (
        digits_fault(variant, x, variant.reference(x), replayed(made, variant.program, x), 5)
        for _, x in draws(made, {}, 5)
    )
    finding = next(filter(None, faults))
    assert "loses its digits in float32" in finding.message and culprit in finding.message
    got, due = finding.where["got"], finding.where["expected"]
    assert abs(got - due) > 2.0**-8 * abs(due)  # which bfloat16 shows
    assert findings(made, expression, seed=5) != []


@pytest.mark.parametrize(
    ("body", "expression"),
    [
        ("torch.sigmoid(-z) * r", "r / (1.0 + exp(acc))"),
        # PyTorch's own has no more digits.
        ("F.gelu(z) * r", "0.5 * acc * (1.0 + erf(0.7071067811865476 * acc)) * r"),
        ("(1 - torch.sigmoid(z)) * r", "(0.5 - 0.5 * tanh(0.5 * acc)) * r"),
        ("torch.log(1 + z.exp()) * r", "log(exp(acc) + 1.0) * r"),
        ("z.exp() / (z.exp() + r)", "exp(acc) / (r + exp(acc))"),  # NaN where e^z is infinite
        # A rounding that falls to the other side of a jump is none of lost digits.
        ("torch.floor(z * 16) * r", "r * floor(16.0 * acc)"),
        ("(torch.sigmoid(z) > 0.5) * r", "where(greater(acc, 0.0), 1.0, 0.0) * r"),
    ],
)
def test_what_pytorch_loses_too_is_no_fault(body: str, expression: str) -> None:
    assert findings(spec_of(body), expression, seed=5) == []


def test_an_input_nearly_cancels_what_the_reference_adds_it_to() -> None:
    made = spec(
        "z = (A @ B.T).float(); return {'O': (y - 3 * z).square() + y}",
        {"y": "{shape: [M, N], dtype: float32}"}, {"O": "{shape: [M, N], dtype: float32}"},
        name="k",
        header="types: {T: [bfloat16]}\ncheck_shapes: [{M: 33, N: 48, K: 16}]\n",
    )  # fmt: skip

    @epilogue(O=Tile)
    def k(acc, y: Tile):
        return {"O": y * y - 6.0 * acc * y + 9.0 * acc * acc + y}

    ((label, inputs),) = cancelling_draws(Variant(made, k, {}), seed=3)
    due = 3 * inputs["A"].double() @ inputs["B"].double().mT
    left = ((inputs["y"] - due) / due).abs()
    assert label == "y nearly cancels what it is added to"
    assert float(left.max()) < 2.0**-9 and 2.0**-13 < float(left.mean()) < 2.0**-11
    assert torch.equal(inputs["y"], inputs["y"].float().double())


def test_what_is_added_to_columns_cancels_in_all_of_their_rows() -> None:
    made = spec(
        "return {'s': ((A @ B.T).float() - mu).square().sum(dim=0)}",
        {"mu": "{shape: [N], dtype: float32}"}, {"s": "{shape: [N], dtype: float32}"},
        name="k",
        header="types: {T: [bfloat16]}\ncheck_shapes: [{M: 33, N: 48, K: 16}]\n",
    )  # fmt: skip
    text = (
        "from coda_agent.primitives import ColSum, RowVector, epilogue\n"
        "@epilogue(s=ColSum)\ndef k(acc, mu: RowVector):\n    return {'s': %s}\n"
    )

    def found(expression: str) -> list[str]:
        return [f.message for f in check_meaning(made, read_programs(text % expression), seed=4)]

    assert found("(acc - mu) * (acc - mu)") == []
    (message,) = found("acc * acc - 2.0 * mu * acc + mu * mu")
    assert "in equal rows" in message
