"""Inputs beyond the usual ones: each shows one wrong program, beside a right one that it lets be."""

from __future__ import annotations

import pytest

from coda_agent.agent.judge.draws import draws
from coda_agent.agent.judge.meaning import check_meaning
from coda_agent.agent.judge.ranges import range_fault
from coda_agent.agent.judge.runners import replayed
from coda_agent.agent.judge.single import digits_fault
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.reader import read_programs
from tests.agent.judge.test_meaning import findings, spec_of
from tests.written import spec


@pytest.mark.parametrize(
    ("body", "domain", "right", "wrong", "case"),
    [
        # e^z alone overflows where r is near its end.
        ("(z - r).exp()", "[0.5, 88]", "exp(acc - r)", "exp(acc) * exp(-r)", "domain"),
        ("(z - r).exp()", "[0.5, 88]", "exp(acc - r)", "exp(acc - 20.0) * exp(20.0 - r)", "domain"),
        # NaN for an r above 0 beside a z of 0.
        ("F.relu(z.abs() - r)", "", "relu(absolute(acc) - r)",
         "absolute(acc) * relu(1.0 - r / absolute(acc))", "A times 0, the rest of either sign"),
        ("z * r", "", "acc * r", "where(equal(acc, 0.0), 0.0, acc * r)",
         "NaN in the operands, products of 0"),
        ("torch.sigmoid(z) * r", "", "sigmoid(acc) * r", "maximum(sigmoid(acc), 5e-12) * r", ""),
    ],
)  # fmt: skip
def test_what_is_wrong_beyond_the_usual_values_is_refused(
    body: str, domain: str, right: str, wrong: str, case: str
) -> None:
    made = spec_of(body, domain)
    for seed in range(3):
        assert findings(made, right, seed) == []
        finding, *_ = findings(made, wrong, seed)
        assert case in finding.where.get("case", "")


def test_a_column_alone_is_as_large_as_its_norm_allows() -> None:
    made = spec(
        "z = (A @ B.T).float(); return {'O': z * z.square().mean(-1, keepdim=True).rsqrt()}",
        {}, {"O": "{shape: [M, N], dtype: float32}"}, name="k",
        header="types: {T: [bfloat16]}\ncheck_shapes: [{M: 33, N: 128, K: 16}]\n"
        "dims: {M: {}, N: {only: 128}, K: {multiple_of: 8}}\n",
    )  # fmt: skip
    text = (
        "from coda_agent.primitives import Tile, clamp, epilogue, group_sum, rsqrt\n"
        "@epilogue(O=Tile)\ndef k(acc):\n"
        "    x = acc * rsqrt(group_sum(acc * acc, 128) * 0.0078125)\n    return {'O': %s}\n"
    )
    assert check_meaning(made, read_programs(text % "x"), seed=1) == []
    finding, *_ = check_meaning(made, read_programs(text % "clamp(x, -11.0, 11.0)"), seed=1)
    assert finding.where["case"] == "one column of 128 alone"


def test_what_vanishes_with_all_inputs_loses_no_digits() -> None:
    """Of three numbers of 2^-110, PyTorch divides two first; the product of two is 0 in float32."""
    made = spec(
        "z = (A @ B.T).float(); return {'O': z * (r / s)[:, None]}",
        {
            "r": "{shape: [M], dtype: float32, draw: {uniform: [0.5, 1.5]}}",
            "s": "{shape: [M], dtype: float32, draw: {uniform: [0.0001, 0.001]}}",
        },
        {"O": "{shape: [M, N], dtype: float32}"}, name="k",
        header="types: {T: [bfloat16]}\ncheck_shapes: [{M: 33, N: 48, K: 16}]\n",
    )  # fmt: skip
    text = (
        "from coda_agent.primitives import ColVector, Tile, epilogue\n"
        "@epilogue(O=Tile)\ndef k(acc, r: ColVector, s: ColVector):\n"
        "    return {'O': acc * r / s}\n"
    )
    variant = Variant(made, read_programs(text)["k"], {})
    (inputs,) = (x for label, x in draws(made, {}, 4) if label == "all inputs smallest together")
    truth, results = variant.reference(inputs), replayed(made, variant.program, inputs)
    assert float(results["O"].abs().max()) > 2.0**-100
    assert digits_fault(variant, inputs, truth, results, 4) is None
    assert range_fault(variant, inputs, truth, results) is None
