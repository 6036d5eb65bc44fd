"""Functions written at random: the composer refuses them in a line, or is right, and the judge says
the same."""

from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from coda_agent.agent.authors.composer import Composer
from coda_agent.evals.judge import generated
from coda_agent.evals.judge.scores import Judge
from coda_agent.specs import load_spec

SETTINGS: dict[str, Any] = {
    "derandomize": True,
    "deadline": None,
    "database": None,
    "suppress_health_check": list(HealthCheck),
}


@settings(max_examples=150, **SETTINGS)
@given(st.data())
def test_no_function_is_composed_wrongly(data: st.DataObject) -> None:
    spec = generated.reference(lambda options: data.draw(st.sampled_from(options)))
    found = generated.judged(spec, None, seed=1)
    assert found["layer"] in ("not admitted", "refused", "right"), found["said"]
    assert "\n" not in found.get("said", "")


def test_the_judge_agrees_with_the_interpreter() -> None:
    cells = [generated.tried(31, number) for number in range(25)]
    assert {c["layer"] for c in cells} == {"not admitted", "refused", "right"}


@pytest.mark.parametrize("number", [1274, 1290, 2613, 3184, 4869])
def test_what_was_refused_though_right_passes(number: int) -> None:
    """A hypotenuse of NaN and infinity, and elements of integers within rounding of a jump."""
    assert generated.tried(2, number) == {"layer": "right"}


SPEC = """---
name: generated_{number}
gemm: [A, B]
inputs:
  A: {{shape: [M, K]}}
  B: {{shape: [N, K]}}
outputs:
  O: {{shape: [M, N], dtype: {dtype}}}
check_shapes: [{{M: 1, N: 16, K: 8}}, {{M: 37, N: 48, K: 24}}]
---
```python reference
import torch
import torch.nn.functional as F


def reference(A, B):
    D = A @ B.T
    return {{"O": {body}}}
```
"""
REMAINDER = "torch.fmod(torch.log(1 + torch.exp(D.clamp(max=60))), 1.5).to(A.dtype)"
CANCELLED = "(0.5 * torch.addcdiv(torch.rsub(D, D), D, D.square() + 1)).to(A.dtype)"
COSINE = "torch.where((F.relu(D).cos() > 0) & (D > 0), F.relu(D).cos(), D).to(A.dtype)"


@pytest.mark.parametrize(
    ("number", "dtype", "body"),
    [
        (467, "float32", "(torch.asinh(-D) + D).float()"),
        (1181, "T", COSINE),
        (0, "T", REMAINDER),
        (1766, "T", CANCELLED),
    ],
    ids=[
        "no digit is left of a small difference",
        "a sign by the cosine of a huge angle",
        "a remainder of a softplus, which is cut",
        "a value less itself, beside a small one",
    ],
)
def test_a_right_program_that_few_digits_are_left_of_is_not_refused(
    number: int, dtype: str, body: str
) -> None:
    text = SPEC.format(number=number, dtype=dtype, body=body)
    spec = load_spec(Path(f"generated_{number}.md"), text=text)
    assert generated.judged(spec, Judge(Path(), "cpu"), seed=number + 1) == {"layer": "right"}


@pytest.mark.parametrize(("old", "new"), [("maximum(", "minimum("), ("0.25", "0.26")])
def test_a_wrong_program_is_found(monkeypatch: pytest.MonkeyPatch, old: str, new: str) -> None:
    lines = {"D": "A @ B.T", "x1": "torch.maximum(D, E)", "O": "x1.masked_fill(x1 > 1, 0.25)"}
    picks = iter([generated.LAYOUTS[0], ("r", "[M, 1]"), "A @ B.T", 2, "binary", "E", "torch.maximum({x}, {y})", "unary",
                  "{x}.masked_fill({x} > 1, 0.25)", 1, 1, 1, "T", "", "float32"])  # fmt: skip
    spec = generated.reference(lambda options: next(picks))
    assert all(line in spec.reference_source for line in lines.values())
    judge = Judge(Path(), "cpu")
    assert generated.judged(spec, judge, seed=1) == {"layer": "right"}
    write = Composer.write
    monkeypatch.setattr(Composer, "write", lambda *a: _imported(write(*a).replace(old, new)))
    found = generated.judged(spec, judge, seed=1)
    assert found["layer"] == "wrong" and found["said"].startswith("O is off by")


def _imported(text: str) -> str:
    head, _, body = text.partition("@epilogue")
    start = head.index("from coda_agent")
    names = "Tile, epilogue, greater, maximum, minimum, where"
    return f"{head[:start]}from coda_agent.primitives import {names}\n\n\n@epilogue{body}"
