"""Tests of evals/leaderboard.py: one table of trials that count, and the committed one is theirs."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent.agent.cli import app
from coda_agent.agent.judge.records import VERSIONS, JsonObject
from coda_agent.agent.state import Spent
from coda_agent.agent.tables import by_head
from coda_agent.agent.workspace import Workspace, init
from coda_agent.evals import leaderboard, suites
from coda_agent.evals.cells import FOLDER, append
from coda_agent.evals.trials import Trial, records_of
from tests.evals.small import ROOT

SPECS = ("gemm_swiglu", "gemm_rope", "gemm_rmsnorm", "gemm_bias_act", "gemm_rmsnorm_swiglu",
         "gemm_rmsnorm_rope", "gemm_partial_cross_entropy")  # fmt: skip


@pytest.fixture
def where(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Workspace:
    """A workspace with a suite of seven specs."""
    monkeypatch.chdir(tmp_path)
    (tmp_path / "evals" / "suites").mkdir(parents=True)
    text = f'title = "T"\nspecs = {json.dumps(SPECS)}\ngoal = "accepted"\n'
    (tmp_path / "evals" / "suites" / "tiny.toml").write_text(text)
    return init(tmp_path)[0]


def trial(where: Workspace, spec: str, author: str, *, speed: float = 1.0, **more: Any) -> Trial:
    """A trial at so many times the bare product's speed; 0 for one that was refused."""
    suite = suites.load("tiny", where.root / "evals" / "suites")
    about: JsonObject = {"commit": "abc1234", "machine": "NVIDIA H200", "date": "2026-01-01"}
    about |= {"suite": "tiny", "suite_digest": suite.digest, "device": "cuda", "spec": spec}
    about |= {"spec_digest": suite.spec(where, spec).digest, "run": "r"}
    about |= {"author": author, "trial": 1, "goal": "accepted", "attempts": 2}
    about |= {"outcome": "accepted" if speed else "refused", "versions": {"numerics": VERSIONS["numerics"]}}  # fmt: skip
    about |= {"roofline": speed / 2, "of_gemm": speed, "over_compile": 2 * speed} if speed else {}
    spent = Spent(usd=0.5, tokens=1000, wall_s=60, gpu_s=5)
    return Trial.model_validate({**about, "spent": spent, **more})


def rows(where: Workspace, *records: Trial) -> list[JsonObject]:
    append(records_of(where.root, "tiny"), records)
    return by_head(leaderboard.table(leaderboard.boards(where)))


def test_authors_are_ranked_where_they_differ_by_more_than_chance(where: Workspace) -> None:
    good = [trial(where, spec, "claude:m", speed=0.9) for spec in SPECS]
    bad = [trial(where, spec, "composer", speed=0) for spec in SPECS]
    few = [trial(where, spec, "tools:x") for spec in SPECS[:2]]
    found = rows(where, *bad, *good, *few)
    assert [(row["author"], row["rank"]) for row in found] == [
        ("claude:m", 1), ("tools:x", 1), ("composer", 2)
    ]  # fmt: skip
    first, _, last = found
    assert first["trials"] == "7/7" and first["solved@1"] == "1.00 (1.00–1.00)"
    assert first["roofline score"] == "0.45 (0.45–0.45)" and first["of GEMM"] == "0.900"
    assert (first["over compile"], first["USD"], first["GPU, s"]) == ("1.800", "0.50", "5.00")
    assert (first["commit"], first["date"]) == ("abc1234", "2026-01-01")
    assert (last["trials"], last["of GEMM"], last["attempts"]) == ("0/7", "–", "–")


def test_a_trial_of_another_suite_spec_or_gate_does_not_count(where: Workspace) -> None:
    spec = SPECS[0]
    others = [
        trial(where, spec, "a", suite_digest="sha256:0"),
        trial(where, spec, "b", spec_digest="sha256:0"),
        trial(where, spec, "c", versions={"numerics": 1}),
        trial(where, spec, "e", outcome="gave_up", versions={}),
    ]
    assert [row["author"] for row in rows(where, *others, trial(where, spec, "d"))] == ["d"]


def test_recorded_runs_are_one_author_and_what_was_withheld_makes_another(
    where: Workspace,
) -> None:
    replayed = [trial(where, spec, f"replay:{spec}-1a2b") for spec in SPECS[:2]]
    without = trial(where, SPECS[0], "claude:m", without=("demos", "tips"))
    assert {row["author"]: row["trials"] for row in rows(where, *replayed, without)} == {
        "replay": "2/2", "claude:m without demos without tips": "1/1",
    }  # fmt: skip
    (board,) = leaderboard.boards(where).values()
    matrix = by_head(leaderboard.matrix(board))
    assert [row["spec"] for row in matrix] == sorted(SPECS[:2])
    assert matrix[0]["claude:m without demos without tips"] == "–"
    assert matrix[1]["replay"] == "1/1 1.000× GEMM"


def test_the_command_writes_the_table_and_a_page_that_escapes(where: Workspace) -> None:
    assert CliRunner().invoke(app, ["eval", "leaderboard"]).exit_code == 2  # no trials
    rows(where, trial(where, SPECS[0], "agent:<script>|x"))
    result = CliRunner().invoke(app, ["eval", "leaderboard", "--html", "page.html"])
    assert result.exit_code == 0, result.output
    page = (where.root / "page.html").read_text("utf-8")
    assert "agent:&lt;script&gt;|x" in page and "<script" not in page
    assert r"agent:&lt;script&gt;\|x" in (where.root / leaderboard.PAGE).read_text("utf-8")


def test_the_committed_table_is_short_and_of_the_records(tmp_path: Path) -> None:
    made, _ = init(tmp_path)
    shutil.copytree(ROOT / FOLDER, made.root / FOLDER)
    page = leaderboard.write(made.root, leaderboard.boards(made)).read_text("utf-8")
    assert page == (ROOT / leaderboard.PAGE).read_text("utf-8")
    assert page.count("\n") <= 60 and "stale" not in page
