"""Tests of evals/cli/judge.py: a score is said, kept and shown on the page."""

from __future__ import annotations

from pathlib import Path

import pytest
from typer.testing import CliRunner

from coda_agent.agent import workspace
from coda_agent.agent.cli import app
from coda_agent.evals.cells import FOLDER


def test_a_score_is_kept_and_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    where = workspace.init(tmp_path)[0]
    command = ["eval", "judge", "mutants", "--count", "3", "--device", "cpu"]
    result = CliRunner().invoke(app, command)
    assert result.exit_code == 0, result.output
    assert result.stdout.startswith("mutants: killed 3 of 3, 100.0%")
    record = where.root / FOLDER / "judge-mutants-cpu.jsonl"
    first = record.read_text("utf-8")
    assert first.count("\n") == 3
    assert "| mutants | cpu | killed 3 of 3" in (where.root / "docs" / "judge.md").read_text()
    assert CliRunner().invoke(app, command).exit_code == 0
    assert record.read_text("utf-8") == first  # nothing was judged again
