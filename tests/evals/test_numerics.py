"""Tests of evals/numerics.py: errors of a chain of kernels, interpreted."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.evals.numerics import LAYERS, SITES, suite
from tests.evals.small import ROOT, measured


@pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
def test_ours_is_more_accurate_than_pytorchs_path(tmp_path: Path) -> None:
    chosen = [case for case in suite(ROOT).cases if case.name.endswith((" 0", f" {LAYERS - 1}"))]
    assert len(chosen) == 2 * len(SITES)
    cells = measured(tmp_path, 32, *chosen)
    for case in chosen:
        ours, eager = (cells[case.name, name] for name in ("ours", "eager"))
        assert 1e-3 < (ours.error or 0) < (eager.error or 0) < 4e-3
        assert cells[case.name, "quack"].absent == "needs a GPU"
