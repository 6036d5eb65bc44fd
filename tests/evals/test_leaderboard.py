"""Tests of evals/leaderboard.py: who is ranked and who stands apart; the committed page is theirs."""

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


def rows(where: Workspace, *records: Trial, recorded: str = "no") -> list[JsonObject]:
    append(records_of(where.root, "tiny"), records)
    table = by_head(leaderboard.table(leaderboard.boards(where)))
    assert (said := [str(row["recorded"]) for row in table]) == sorted(said)
    return [row for row in table if row["recorded"] == recorded]


def test_authors_are_ranked_where_they_differ_by_more_than_chance(where: Workspace) -> None:
    good = [trial(where, spec, "claude:m", speed=0.9) for spec in SPECS]
    bad = [trial(where, spec, "composer", speed=0) for spec in SPECS]
    few = [trial(where, spec, "messages:x", models=("x",)) for spec in SPECS[:2]]
    found = rows(where, *bad, *good, *few)
    assert [(row["author"], row["model"], row["rank"]) for row in found] == [
        ("claude", "m", 1), ("messages", "x", 1), ("composer", "–", 2)
    ]  # fmt: skip
    first, _, last = found
    assert first["trials"] == "7/7" and first["solved@1"] == "1.00 (1.00–1.00)"
    assert first["roofline score"] == "0.45 (0.45–0.45)" and first["of GEMM"] == "0.900"
    assert (first["over compile"], first["USD"], first["GPU, s"]) == ("1.800", "0.50", "5.00")
    assert (first["commit"], first["date"]) == ("abc1234", "2026-01-01")
    assert (last["trials"], last["of GEMM"], last["attempts"]) == ("0/7", "–", "–")


def test_only_what_the_composer_did_not_solve_ranks(where: Workspace) -> None:
    """A model that solves the rest alone is ahead of one that solves all but the rest."""
    hard, easy = SPECS[:6], SPECS[6:]
    composer = [trial(where, spec, "composer", speed=spec in easy) for spec in SPECS]
    adds = [trial(where, spec, "claude:m", speed=spec in hard) for spec in SPECS]
    repeats = [trial(where, spec, "claude:n", speed=spec in (*easy, *hard[:1])) for spec in SPECS]
    nobody = rows(where, *adds, *repeats)
    assert {(row["rank"], row[leaderboard.GIVEN]) for row in nobody} == {("–", "–")}
    found = {row["model"]: row for row in rows(where, *composer)}
    assert {model: row["rank"] for model, row in found.items()} == {"m": 1, "n": 2, "–": 2}
    assert found["m"][leaderboard.GIVEN] == "1.00 (1.00–1.00) of 6"
    assert found["n"][leaderboard.GIVEN].startswith("0.17 (") and found["n"]["trials"] == "2/7"
    assert found["–"][leaderboard.GIVEN] == "0.00 (0.00–0.00) of 6"


def test_models_and_effort_make_a_row(where: Workspace) -> None:
    climbed = {"models": ("a", "a", "b"), "effort": "low"}
    two = [trial(where, SPECS[0], "ladder", **climbed), trial(where, SPECS[0], "ladder", models=("a",), effort="high")]  # fmt: skip
    assert [(row["author"], row["model"]) for row in rows(where, *two)] == [
        ("ladder", "a ×2, b, effort low"), ("ladder", "a, effort high")
    ]  # fmt: skip


def test_a_program_is_an_author_without_a_model(where: Workspace) -> None:
    (row,) = rows(where, trial(where, SPECS[0], "file:mine.py"))
    assert (row["author"], row["model"]) == ("file:mine.py", "–")


def test_of_a_suite_that_was_named_by_its_path_the_newest_counts(where: Workspace) -> None:
    digests = ("sha256:0", "sha256:1", "sha256:1")
    mine = [
        trial(where, spec, "composer", suite="mine", suite_digest=digest)
        for spec, digest in zip(SPECS, digests, strict=False)
    ]
    (row,) = rows(where, *mine)
    assert (row["suite"], row["trials"]) == ("mine", "2/2")


def test_a_trial_of_another_suite_spec_or_gate_does_not_count(where: Workspace) -> None:
    spec = SPECS[0]
    others = [
        trial(where, spec, "claude:a", suite_digest="sha256:0"),
        trial(where, spec, "claude:b", spec_digest="sha256:0"),
        trial(where, spec, "claude:c", versions={"numerics": 1}),
        trial(where, spec, "claude:e", outcome="gave_up", versions={}),
    ]
    assert [row["model"] for row in rows(where, *others, trial(where, spec, "claude:d"))] == ["d"]


def test_recorded_runs_stand_apart_by_the_name_in_the_recording(where: Workspace) -> None:
    options = {"model": "claude-x", "models": [], "effort": "low"}
    wrote = {"a": ("agent:claude", None), "b": ("agent:m-2", None), "c": ("claude", options)}
    for name, (author, chosen) in wrote.items():
        log = where.root / "logs" / "trajectories" / name / "events.jsonl"
        log.parent.mkdir(parents=True)
        data = {"run": name, "spec": SPECS[0], "author": author, "options": chosen}
        line = {"seq": 0, "time": "2026-01-01T00:00:00Z", "type": "run.started", "data": data}
        log.write_text(json.dumps(line) + "\n")
    replayed = [trial(where, SPECS[0], f"replay:{name}") for name in (*wrote, "lost")]
    entered = [trial(where, spec, "agent:m-2") for spec in SPECS[1:3]]
    without = trial(where, SPECS[0], "claude:m", without=("demos", "tips"))
    composer = [trial(where, spec, "composer", speed=0) for spec in SPECS[:2]]
    found = rows(where, *replayed, *entered, *composer, without, recorded="yes")
    assert [(r["author"], r["model"], r["trials"], r[leaderboard.GIVEN][-4:]) for r in found] == [
        ("agent", "m-2", "3/3", "of 2"), ("agent:claude", "not named", "1/1", "of 1"),
        ("claude", "claude-x, effort low", "1/1", "of 1"), ("replay:lost", "not named", "1/1", "of 1"),
    ]  # fmt: skip
    assert {row[key] for row in found for key in ("rank", "USD", "attempts")} == {"–"}
    ranked = {(row["author"], row["trials"]) for row in rows(where)}
    assert ranked == {("claude without demos without tips", "1/1"), ("composer", "0/2")}
    (board,) = leaderboard.boards(where).values()
    matrix = by_head(leaderboard.matrix(board))
    assert [row["spec"] for row in matrix] == sorted(SPECS[:3])
    assert matrix[1]["claude without demos without tips (m)"] == "–"
    assert matrix[2]["agent:claude (not named)"] == "1/1 1.000× GEMM"


def test_the_command_writes_the_table_and_a_page_that_escapes(where: Workspace) -> None:
    assert CliRunner().invoke(app, ["eval", "leaderboard"]).exit_code == 2  # no trials
    rows(where, trial(where, SPECS[0], "agent:<script>|x"))
    result = CliRunner().invoke(app, ["eval", "leaderboard", "--html", "page.html"])
    assert result.exit_code == 0, result.output
    page = (where.root / "page.html").read_text("utf-8")
    assert "<td>&lt;script&gt;|x" in page and "<script" not in page
    written = (where.root / leaderboard.PAGE).read_text("utf-8")
    assert r"| &lt;script&gt;\|x |" in written
    assert "no trial counts: blocks, catalogue, extend, held_out, paper, smoke.\n" in written


def test_the_committed_table_is_short_and_of_the_records(tmp_path: Path) -> None:
    """`coda-agent eval leaderboard` writes it anew."""
    made, _ = init(tmp_path)
    for folder in (FOLDER, Path("logs", "trajectories")):
        shutil.copytree(ROOT / folder, made.root / folder)
    page = leaderboard.write(made.root, leaderboard.boards(made)).read_text("utf-8")
    assert page == (ROOT / leaderboard.PAGE).read_text("utf-8")
    assert page.count("\n") <= 60 and "stale" not in page
