"""Drafts of references that the composer refuses: holes, what stands before them, what is proved."""

from pathlib import Path

import pytest

from coda_agent.agent.authors.composer import handed_over
from coda_agent.specs import load_spec

SPECS = Path(__file__).parents[4] / "specs"


@pytest.mark.parametrize(
    ("name", "before", "why"),
    [
        ("gemm_probit", "HOLE_1(0.999 * tanh(0.5 * (acc + bias)))", "erfinv"),
        ("gemm_weighted_log_sum", "HOLE_1(exp(acc) * w)", "uses a row reduction again"),
        ("gemm_median", "HOLE_1(C, E, acc)", "median"),
        ("gemm_pair_softmax", "HOLE_1(acc + bias)", "works across groups of 2 columns"),
    ],
)
def test_a_hole_stands_over_what_the_composer_had(name: str, before: str, why: str) -> None:
    spec = load_spec(SPECS / "catalogue" / f"{name}.md")
    said = handed_over(spec)
    first = said.splitlines()[0]
    assert before in said and why in first
    number = int(first.partition(": line ")[2].partition(":")[0])
    assert spec.text.splitlines()[number - 1].strip() in first
    assert str(SPECS) not in said


def test_what_the_composer_writes_is_not_handed_over() -> None:
    assert handed_over(load_spec(SPECS / "gemm_swiglu.md")) == ""


def test_outputs_without_a_hole_are_proved(tmp_path: Path) -> None:
    """The median has no rule; a row maximum beside it does."""
    text = (SPECS / "catalogue" / "gemm_median.md").read_text("utf-8")
    text = text.replace("outputs:\n", "outputs:\n  top: {shape: [M], dtype: float32}\n")
    top = '"top": torch.sigmoid(values[0]).amax(dim=1)'
    path = tmp_path / "gemm_median.md"
    path.write_text(text.replace("return {", f"return {{{top}, "))
    said = handed_over(load_spec(path))
    assert '"top": sigmoid(acc)' in said and "@epilogue(top=RowMax, O=Tile)" in said
    assert said.splitlines()[-1] == "gemm_median: top agrees with the reference."
