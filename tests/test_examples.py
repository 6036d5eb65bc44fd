"""Scripts of examples/ run to their end, and the notebook gives what is stored in it."""

import contextlib
import io
import json
import re
import runpy
import sys
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path

import pytest

EXAMPLES = Path(__file__).parents[1] / "examples"


@pytest.fixture
def run(
    monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str], tmp_path: Path
) -> Callable[..., str]:
    """Run a script, with scratch folders of the test's own; what it prints."""
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))

    def ran(name: str, *words: str) -> str:
        monkeypatch.setattr(sys, "argv", [name, *words])
        with warnings.catch_warnings():
            runpy.run_path(str(EXAMPLES / name), run_name="__main__")
        return capfd.readouterr().out

    return ran


def test_a_model_trains_alike_by_kernels_and_by_pytorch(run: Callable[..., str]) -> None:
    printed = run("train_model.py", "--steps", "2")
    losses = re.findall(r"(\w+): loss ([\d.]+) to ([\d.]+)", printed)
    (one, *own), (other, *ours) = losses
    assert (one, other) == ("PyTorch", "kernels")
    assert all(abs(float(x) - float(y)) < 0.01 for x, y in zip(own, ours, strict=True))
    assert float(own[1]) < float(own[0]) and "kernels; left to PyTorch" in printed


@pytest.mark.slow  # tests/agent/test_mcp.py takes the same way, over MCP
def test_an_agent_mends_a_candidate_and_submits_it(run: Callable[..., str], tmp_path: Path) -> None:
    wrong, _, mended = run("agent_at_the_bench.py").partition("> edit_candidate")
    assert "FAILED at numerics" in wrong and "`maximum(acc, 0) · acc` is due" in wrong
    assert "check submit: passed" in mended and "accepted as " in mended
    assert len([*tmp_path.glob("*/generated/squared_relu/evidence.json")]) == 1


@pytest.mark.slow  # `make demo` takes the same way through the commands
def test_a_function_becomes_a_kernel(run: Callable[..., str]) -> None:
    printed = run("function_to_kernel.py")
    assert "x = tanh(acc + b)" in printed
    differences = re.findall(r"^(?:largest|of).*: ([\d.]+)$", printed, re.M)
    assert len(differences) == 2 and all(float(x) < 0.03 for x in differences)


def test_the_notebook_gives_what_it_shows() -> None:
    """Cell by cell in one namespace, as Jupyter does; numbers may differ in their digits."""
    cells = json.loads((EXAMPLES / "a_kernel.ipynb").read_text())["cells"]
    space: dict[str, object] = {}
    for cell in (cell for cell in cells if cell["cell_type"] == "code"):
        code = compile("".join(cell["source"]), f"cell {cell['execution_count']}", "exec")
        with contextlib.redirect_stdout(io.StringIO()) as printed, warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Jupyter shows them aside
            exec(code, space)
        shown = "".join(text for output in cell["outputs"] for text in output["text"])
        wanted, got = (re.sub(r"0\.\d+", "0.…", x) for x in (shown, printed.getvalue()))
        assert got == wanted
