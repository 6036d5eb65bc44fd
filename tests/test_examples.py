"""Scripts of examples/ run to their end."""

import re
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]


def test_a_model_trains_alike_by_kernels_and_by_pytorch() -> None:
    script = ROOT / "examples" / "train_model.py"
    done = subprocess.run(
        [sys.executable, script, "--steps", "2"], capture_output=True, text=True, check=True
    )
    losses = re.findall(r"(\w+): loss ([\d.]+) to ([\d.]+)", done.stdout)
    (one, *own), (other, *ours) = losses
    assert (one, other) == ("PyTorch", "kernels")
    assert all(abs(float(x) - float(y)) < 0.01 for x, y in zip(own, ours, strict=True))
    assert float(own[1]) < float(own[0]) and "kernels; left to PyTorch" in done.stdout
