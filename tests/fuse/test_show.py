"""What `coda-agent explain` shows of a function's plan."""

import json
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coda_agent.agent.cli import app

SOURCE = """
import torch.nn.functional as F
from torch import Tensor

def inner(x: Tensor, r: Tensor, wo: Tensor, g: Tensor, w: Tensor):
    h = r + F.linear(x, wo)
    return F.linear(F.rms_norm(h, (h.shape[-1],), g, 1e-5), w)
"""


def test_explain_shows_a_functions_plan_and_its_bytes(tmp_path: Path) -> None:
    path = tmp_path / "mine.py"
    path.write_text(SOURCE)
    sizes = {"x": "512,1024", "r": "512,2048", "wo": "2048,1024", "g": "2048", "w": "256,2048"}
    args = ["explain", f"{path}:inner", *(a for x in sizes for a in ("--shape", f"{x}={sizes[x]}"))]
    page = tmp_path / "plan.html"
    result = CliRunner().invoke(app, [*args, "--json", "--html", str(page)])
    assert result.exit_code == 0, result.stderr
    found = json.loads(result.stdout)
    steps = found["steps"]
    assert [s["launches"] for s in steps] == [2, 1, 1, 1]
    # x, wo, the residual, g; h scaled, and one float a row. h itself nobody needs.
    moved = 2 * (512 * 1024 + 2048 * 1024 + 512 * 2048 + 2048) + 2 * 512 * 2048 + 4 * 512
    assert steps[0]["bytes"] == moved
    assert steps[3]["what"].startswith("gemm_rmsnorm, accepted")
    assert sum(s["bytes"] for s in steps) < found["apart"]["bytes"]
    assert steps[3]["floor_us"] == pytest.approx(
        1e6 * max(2 * 512 * 256 * 2048 / 990e12, steps[3]["bytes"] / 4.8e12)
    )
    assert found["html"] == str(page)
    text = page.read_text("utf-8")
    assert all(s["step"] in text for s in steps)
    refused = CliRunner().invoke(app, [*args, "--stage", "ptx", "--html", str(page)])
    assert refused.exit_code != 0 and "--html shows a plan" in refused.stderr
