"""The error of GEMM - RMSNorm - GEMM: at reduced size, interpreted."""

from __future__ import annotations

import json
import xml.etree.ElementTree as ET
from pathlib import Path
from statistics import geometric_mean

import pytest

from coda_agent.evals.chain_error import SITES, measure, write_page
from coda_agent.primitives.errors import CodaError

ROOT = Path(__file__).parents[2]


def test_a_delayed_norm_is_no_less_accurate_than_pytorch(tmp_path: Path) -> None:
    folder = tmp_path / "generated"
    folder.symlink_to(ROOT / "generated")
    file = measure(tmp_path, machine={"gpu": {}}, device="cpu", shrink=32, layers=3)
    cells = list(json.loads(file.read_text())["cells"].values())
    assert [row["layer"] for row in cells] == [0, 1, 2] * len(SITES)
    for site in SITES:
        rows = [row for row in cells if row["site"] == site]
        assert all(1e-3 < row["torch"] < 1e-2 for row in rows)  # bf16: 2^-9 a rounding
        assert geometric_mean(row["ours"] / row["torch"] for row in rows) < 1.0
    _, page, chart = write_page(tmp_path)
    text = page.read_text()
    assert "64 tokens, bf16, on a CPU, interpreted" in text
    ratios = [row["ours"] / row["torch"] for row in cells if row["site"] == next(iter(SITES))]
    assert f"| {geometric_mean(ratios):.3f} | {min(ratios):.3f}–{max(ratios):.3f} |" in text
    tips = [t.text for t in ET.parse(chart).iter("{http://www.w3.org/2000/svg}title") if t.text]
    assert f"0, ours: {ratios[0]:.3f}" in tips


def test_without_a_record_it_says_so(tmp_path: Path) -> None:
    with pytest.raises(CodaError, match="no numerical record"):
        write_page(tmp_path)
