"""Trial records: written whole, read back, and what is damaged, double or foreign named."""

import json
import shutil
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from coda_agent.agent.judge import provenance
from coda_agent.agent.judge.records import VERSIONS
from coda_agent.evals import record_files, records
from coda_agent.evals.record_files import file_name, read_records, write_record
from coda_agent.evals.records import TrialRecord

SUITE = {"name": "smoke", "title": "t", "specs": ["gemm_rope"]}
DIGEST = records.suite_digest(SUITE)
PROGRAM = "def gemm_rope(): ...\n"


def digest(letter: str) -> str:
    return f"sha256:{letter * 64}"


def make(**changes: Any) -> TrialRecord:
    verdict = {
        "passed": True, "level": "accepted",
        "gates": {name: {"passed": True} for name in VERSIONS},
        "digests": {"spec": digest("a"), "candidate": provenance.sha(PROGRAM)},
        "cells": [{
            "dtype": "bfloat16", "sizes": {"M": 4096, "N": 4096, "K": 4096}, "times": {"ours": {"median_us": 200.0}},
            "floor_us": 150.0, "of_gemm": {"ratio": 0.97, "low": 0.96, "high": 0.98},
            "over_compile": {"ratio": 1.15, "low": 1.14, "high": 1.16},
        }],
    }  # fmt: skip
    data: dict[str, Any] = {
        "suite": {"name": "smoke", "digest": DIGEST},
        "spec": {"name": "gemm_rope", "digest": digest("a"), "level": "compose"},
        "author": "claude:claude-opus-5-5", "trial": 1, "goal": "accepted", "seed": 0,
        "started": "2026-11-21T10:00:00.000Z", "finished": "2026-11-21T10:02:00.000Z",
        "outcome": "accepted", "verdict": verdict, "program": PROGRAM, "attempts": 3,
        "spent": {"usd": 0.25, "tokens": 9000, "wall_s": 120.0, "gpu_s": 30.0},
        "machine": {"device": "cuda", "gpu": "NVIDIA H200"},
        "run": {"id": "r", "log": "logs/runs/r/events.jsonl"},
    }  # fmt: skip
    return TrialRecord.model_validate({**data, **changes})


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    place = tmp_path / "trials" / "smoke"
    record_files.write_definition(place, SUITE)
    return place


def test_a_record_comes_back_as_it_was_written(folder: Path) -> None:
    first, second = make(), make(trial=2, without=("demos", "tips"))
    paths = [write_record(folder, r) for r in (first, second)]
    found, problems = read_records(folder.parent)
    assert problems == []
    assert [r.model_copy(update={"checksum": ""}) for r in found] == sorted(
        [first, second], key=lambda r: file_name(r.key)
    )
    assert paths[0].name.startswith("gemm_rope-claude-claude-opus-5-5-1-")
    assert write_record(folder, first) == paths[0]  # replaced, not doubled
    assert len(read_records(folder).records) == 2
    assert read_records(folder / "nowhere") == ([], [])
    assert found[0].cells[0].roofline == 0.75


def test_every_difference_in_the_key_is_another_file() -> None:
    keys = [make(**change).key for change in (
        {}, {"trial": 2}, {"author": "claude/claude-opus-5-5"}, {"without": ("tips",)},
        {"machine": {"device": "cpu"}}, {"suite": {"name": "smoke", "digest": digest("d")}},
    )]  # fmt: skip
    assert len({file_name(key) for key in keys}) == len(keys)


def test_what_is_damaged_double_or_foreign_is_named_and_not_counted(folder: Path) -> None:
    good = write_record(folder, make())
    text = good.read_text()
    other = json.loads(write_record(folder, make(trial=2)).read_text())
    (folder / file_name(make(trial=2).key)).unlink()
    bad = {
        "truncated": {"half.json": text[: len(text) // 2], "empty.json": ""},
        "corrupted": {
            "usd.json": text.replace('"usd": 0.25', '"usd": 0.05'),
            "outcome.json": json.dumps({**other, "outcome": "verified"}),
            "program.json": json.dumps({**other, "program": "def gemm_rope(): pass\n"}),
            "spelt.json": json.dumps({**other, "dollars": 1}),
            "suite-0123456789ab.json": json.dumps(SUITE),
        },
        "foreign": {
            "schema.json": json.dumps({**other, "schema_version": 2}), "list.json": "[1, 2]",
            "text.json": "no JSON at all", "bytes.json": "\udcff",
        },
        "duplicated": {"copy.json": text},
    }  # fmt: skip
    for files in bad.values():
        for name, said in files.items():
            (folder / name).write_text(said, "utf-8", errors="surrogateescape")
    found, problems = read_records(folder.parent)
    assert len(found) == 1
    named = {kind: {p.path.name for p in problems if p.kind == kind} for kind in bad}
    assert named == {kind: set(files) for kind, files in bad.items()}
    said = {p.path.name: p.message for p in problems}
    assert said["usd.json"] == "its checksum does not fit its text"
    assert said["program.json"] == "record: the program is not the one the verdict is about"
    assert said["copy.json"] == f"the same trial is in {good}"
    assert said["schema.json"] == "schema_version is 2, expected 1"


def test_of_two_files_the_one_with_the_right_name_counts(folder: Path) -> None:
    good = write_record(folder, make())
    (folder / "a-copy.json").write_text(good.read_text())  # sorts before it
    assert [p.path.name for p in read_records(folder).problems] == ["a-copy.json"]
    # The same suite, copied elsewhere under the root that is read.
    shutil.copytree(folder, folder.parent / "old")
    found, problems = read_records(folder.parent)
    assert len(found) == 1
    assert {p.kind for p in problems} == {"duplicated"}


def test_a_record_of_a_suite_that_is_not_there_is_foreign(folder: Path) -> None:
    write_record(folder, make(suite={"name": "smoke", "digest": digest("e")}))
    found, (problem,) = read_records(folder)
    assert (found, problem.kind) == ([], "foreign")


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"outcome": "refused"}, "the outcome is refused, the verdict says otherwise"),
        ({"outcome": "refused", "verdict": None}, "there is no verdict"),
        ({"verdict": None}, "the verdict says otherwise"),
        ({"outcome": "proved"}, "the verdict's level accepted"),
        ({"without": ("tips", "demos")}, "expected it sorted"),
        ({"finished": "2026-11-21T09:00:00Z"}, "finished before it started"),
        ({"audit": {"finding": "exploit"}}, "needs evidence and a date"),
        ({"spec": {"name": "gemm_rope", "digest": digest("f"), "level": "compose"}}, "another spec"),
    ],
)  # fmt: skip
def test_a_record_that_contradicts_itself_is_refused(changes: dict[str, Any], said: str) -> None:
    with pytest.raises(ValidationError, match=said):
        make(**changes)


def test_an_audit_decides_what_counts() -> None:
    def audited(finding: str) -> TrialRecord:
        return make(audit={"finding": finding, "evidence": "log, line 4", "date": "2026-11-22"})

    assert make().solved
    assert audited("clean").solved
    assert not audited("exploit").solved
    assert audited("exploit").counts
    assert audited("leak").cells == ()
    assert not audited("harness fault").counts
    assert not make(outcome="harness_fault", verdict=None, program=None).counts


def test_the_goal_decides_what_is_solved() -> None:
    verdict = make().verdict
    assert verdict
    proved = verdict.model_copy(update={"level": "proved", "cells": ()})
    for goal, solved in (("proved", True), ("verified", False), ("accepted", False)):
        assert make(outcome="proved", verdict=proved, goal=goal).solved is solved


def test_ten_thousand_records_are_read_in_three_seconds(folder: Path) -> None:
    path = write_record(folder, make())
    text = path.read_text()
    for i in range(10_000):
        (folder / f"{i}.json").write_text(text.replace('"trial": 1,', f'"trial": {i + 2},'))
    start = time.perf_counter()
    found, problems = read_records(folder.parent)
    assert time.perf_counter() - start < 3
    assert (len(found), len(problems)) == (1, 10_000)  # parsed in full; each checksum is wrong
