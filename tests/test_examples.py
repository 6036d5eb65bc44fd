"""Scripts of examples/ run to their end."""

import re
import runpy
import sys
import warnings
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


def test_a_model_trains_alike_by_kernels_and_by_pytorch(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    script = str(ROOT / "examples" / "train_model.py")
    monkeypatch.setattr(sys, "argv", [script, "--steps", "2"])
    with warnings.catch_warnings():
        runpy.run_path(script, run_name="__main__")
    printed = capsys.readouterr().out
    losses = re.findall(r"(\w+): loss ([\d.]+) to ([\d.]+)", printed)
    (one, *own), (other, *ours) = losses
    assert (one, other) == ("PyTorch", "kernels")
    assert all(abs(float(x) - float(y)) < 0.01 for x, y in zip(own, ours, strict=True))
    assert float(own[1]) < float(own[0]) and "kernels; left to PyTorch" in printed
