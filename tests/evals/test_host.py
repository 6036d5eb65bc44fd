"""Tests of evals/host.py: calls at the smallest check shape."""

from __future__ import annotations

from pathlib import Path

import pytest

from coda_agent.evals.host import suite
from tests.evals.small import ROOT, measured


@pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
def test_calls_compute_what_the_spec_says(tmp_path: Path) -> None:
    """In place too, where each contender has inputs of its own."""
    names = "gemm_residual_partial_rmsnorm_bwd", "gemm_rope", "gemm_fp8_swiglu"
    chosen = [case for case in suite(ROOT).cases if case.name in names]
    cells = measured(tmp_path, 1, *chosen)
    for case in chosen:
        assert 0 < (cells[case.name, "ours"].error or 0) < 5e-3 and case.regimes == ("host", "loop")
        assert not cells[case.name, "gemm"].absent and cells[case.name, "gemm"].error is None
