"""Tests of evals/judge/report.py: what the page counts, and that the committed one is of today."""

from __future__ import annotations

import shutil
from pathlib import Path

from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.tables import by_head
from coda_agent.evals.cells import FOLDER, append
from coda_agent.evals.judge import report
from coda_agent.evals.judge.scores import Score
from tests.evals.small import ROOT

ABOUT = {"commit": "abc1234", "machine": "cpu, torch 2.13.0", "date": "2026-01-02", "seed": 1}


def scores(**cells: JsonObject) -> list[Score]:
    return [Score(**ABOUT, case=case, cell=cell) for case, cell in cells.items()]


def mutant(layer: str, *expected: str, fault: str = "", **more: object) -> JsonObject:
    named = {"expected": [*expected], "fault": fault} if fault else {}
    return {"operator": "skip", "lowered": True, "layer": layer, **named, **more}


MUTANTS = scores(
    a=mutant("numerics", "k_tail", fault="k_tail"),
    b=mutant("numerics", "k_tail", fault="race"),
    c=mutant("numerics", "missing_operand", "constant_factor", fault="constant_factor"),
    d=mutant("signature"),
    e=mutant("equivalent"),
    f=mutant("survived"),
    g=mutant("numerics", "race", fault="race", vague=True),
)


def test_mutants_are_counted_and_survivors_named() -> None:
    result, faults, _ = report.mutants(MUTANTS)
    assert result == "killed 5 of 6, 83.3%; 1 equivalent"
    assert faults == ["lived: f: not explained"]


def test_a_right_name_counts_as_the_best_one() -> None:
    result, rows = report.diagnosis(MUTANTS)
    assert result == "2 of 4, 50.0%"  # a vague sentence names nothing
    found = {row["fault"]: row for row in by_head(rows)}
    assert found["k tail"] == {
        "fault": "k tail",
        "mutants": 2,
        "recall": "0.50",
        "precision": "1.00",
    }
    assert found["race"]["precision"] == "0.50" and found["missing operand"]["recall"] == "1.00"


def test_other_scores_are_summed_up() -> None:
    right = {"programs": ["p", "p: rewritten"], "trials": 6, "refused": ["p: off"]}
    assert report.corpus(scores(p=right, q={**right, "refused": []}))[:2] == (
        "refused 1 in 12 trials of 4 programs", ["refused: p: off"],
    )  # fmt: skip
    fault = {"number": 7, "layer": "wrong", "said": "O is off", "reference": "…"}
    cell = {
        "layers": {"right": 98, "wrong": 1, "refused": 1},
        "refused": {"no": 1},
        "faults": [fault],
    }
    result, faults, remarks = report.generated(scores(a=cell, b=cell))
    assert result == "of 200: 196 right, 2 wrong, 0 disputed, 2 refused, 0 not admitted"
    assert faults == ["7, wrong: O is off"] * 2 and remarks == ["refused 2 times: no"]


def test_the_page_has_a_row_a_score(tmp_path: Path) -> None:
    append(tmp_path / FOLDER / "judge-mutants-cpu.jsonl", MUTANTS)
    (tmp_path / "tests" / "exploits").mkdir(parents=True)
    (tmp_path / "tests" / "exploits" / "catalogue.toml").write_text(
        '[[row]]\nrow = 11\nname = "a cache"\nstatus = "stopped"\nlayer = "static"\n'
    )
    page = report.write_page(tmp_path).read_text("utf-8")
    row = "| mutants | cpu | killed 5 of 6, 83.3%; 1 equivalent | 2 of 4, 50.0% | 1 | abc1234 | "
    assert f"{row}cpu, torch 2.13.0, 2026-01-02 |" in page
    assert "- mutants, cpu: lived: f: not explained" in page
    assert "there are 1 stopped. What is stopped is stopped by: static 1." in page


def test_the_committed_page_is_short_and_of_the_records(tmp_path: Path) -> None:
    shutil.copytree(ROOT / FOLDER, tmp_path / FOLDER)
    (tmp_path / "tests" / "exploits").mkdir(parents=True)
    shutil.copy(ROOT / "tests" / "exploits" / "catalogue.toml", tmp_path / "tests" / "exploits")
    page = report.write_page(tmp_path).read_text("utf-8")
    assert page == (ROOT / report.PAGE).read_text("utf-8") and page.count("\n") <= 100
