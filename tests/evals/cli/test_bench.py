"""Tests of evals/cli/bench.py: what is asked is checked first, and pages come from records alone."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from coda_agent.agent import workspace
from coda_agent.agent.cli import app
from coda_agent.evals.cells import FOLDER
from tests.evals.small import ROOT


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.chdir(tmp_path)
    return workspace.init(tmp_path)[0].root


def bench(*args: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["bench", *args])
    assert result.exit_code == code, (result.stdout, result.stderr)
    said = result.stderr if code else result.stdout
    return json.loads(said) if "--json" in args else said


@pytest.mark.parametrize(
    ("args", "said"),
    [
        (["--suite", "none"], "no suite 'none' (known: fuse, gradients, host, kernels, lay"),
        (["--suite", "papr"], "no suite 'papr' (did you mean paper?)"),
        (["--case", "gemm_swish"], "no case 'gemm_swish' (known: gemm_bias_act 4096"),
        (["--contender", "mine"], "no contender 'mine' (known: "),
        (["--regime", "cold"], "no regime 'cold' (known: "),
    ],
)
def test_what_there_is_not_is_one_line(where: Path, args: list[str], said: str) -> None:
    found = bench(*args, code=2)
    assert said in found and len(found.splitlines()) == 1


@pytest.mark.skipif(torch.cuda.is_available(), reason="a GPU is there")
@pytest.mark.parametrize("suite", ["kernels", "paper", "layers", "fuse", "host", "numerics"])
def test_without_a_gpu_one_line_says_that_one_is_needed(where: Path, suite: str) -> None:
    found = bench("--suite", suite, code=3)
    assert found.startswith("error: this needs a Hopper GPU") and len(found.splitlines()) == 1
    assert not (where / FOLDER).exists()


def test_the_page_is_written_from_the_records(where: Path) -> None:
    (where / FOLDER).mkdir(parents=True)
    shutil.copy(ROOT / FOLDER / "paper.jsonl", where / FOLDER)
    whole = bench("--suite", "paper", "--table")
    assert "over compile" in whole and f"wrote {where}/docs/results.md" in whole
    one = bench("--suite", "paper", "--table", "--kernel", "gemm_rope 4096", "--json")
    assert {cell["case"] for cell in one["cells"]} == {"gemm_rope 4096"}
    assert r"gemm\_rope" in (where / "docs" / "results.md").read_text("utf-8")
