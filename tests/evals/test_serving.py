"""Tests of evals/serving.py: two layers of tiny models, for inference and training, on a CPU."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.evals.serving import suite
from tests.evals.small import ROOT, measured

pytestmark = pytest.mark.filterwarnings("ignore")
CASES = {case.name: case for case in suite(ROOT).cases}


@pytest.mark.one_in(4)
@pytest.mark.parametrize(
    "name",
    [name for name in CASES if name.endswith((" 8192", " 16384", "RoBERTa-large inference 512"))],
)
def test_layers_are_the_models_own(tmp_path: Path, name: str) -> None:
    found = {key[1]: cell for key, cell in measured(tmp_path, 64, CASES[name]).items()}
    errors = [found[contender].error or 1.0 for contender in ("ours", "eager")]
    assert errors[0] < 1.3 * errors[1] + 1e-3
    assert "kernels of the backend" in found["ours"].note
    for contender in {*found} - {"ours", "eager"}:
        assert found[contender].absent == "needs a GPU"


def test_means_are_taken_over_models() -> None:
    group = suite(ROOT).group
    assert group("Qwen2.5-7B inference 32") == group("TinyLlama-1.1B inference 32")
    assert len({*map(group, CASES)}) == 12
