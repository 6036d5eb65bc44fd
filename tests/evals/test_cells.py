"""Tests of evals/cells.py: lines of JSON that are added, replaced, cut off and refused."""

from __future__ import annotations

import json
import subprocess
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent.judgement import Machine
from coda_agent.evals import cells
from coda_agent.evals.cells import Cell, append, machine, program_commit, read
from coda_agent.primitives.errors import CodaError


def cell(case: str, contender: str = "ours", **more: Any) -> Cell:
    about = {"commit": "abc1234", "machine": "a GPU", "date": "2026-11-25", "suite": "tiny"}
    return Cell(**{**about, "case": case, "contender": contender, "regime": "warm", **more})


def test_a_line_says_what_is_known_and_the_last_of_a_key_counts(tmp_path: Path) -> None:
    path = tmp_path / "new" / "tiny.jsonl"
    assert read(path, Cell) == {}
    append(path, [cell("one", time_us=2.0, interval_us=(1.0, 3.0)), cell("two")])
    append(path, [cell("one", time_us=1.0)])
    first, second, third = map(json.loads, path.read_text().splitlines())
    assert first["interval_us"] == [1.0, 3.0] and "absent" not in second and "ratio" not in second
    found = read(path, Cell)
    assert (
        found["one", "ours", "warm", "a GPU"] == cell("one", time_us=1.0)
        and third["time_us"] == 1.0
    )
    assert list(found) == [(case, "ours", "warm", "a GPU") for case in ("one", "two")]


def test_a_line_that_was_cut_off_is_dropped(tmp_path: Path) -> None:
    path = tmp_path / "tiny.jsonl"
    append(path, [cell("one"), cell("two")])
    whole = path.read_bytes()
    path.write_bytes(whole[:-20])
    assert [key[0] for key in read(path, Cell)] == ["one"]
    append(path, [cell("two")])
    assert path.read_bytes() == whole


@pytest.mark.parametrize(
    ("line", "message"),
    [("{", "Invalid JSON"), ("\N{SNOWMAN}", "Invalid JSON"), ('{"suite": "tiny"}', "commit: Field required"),
     (cell("one").line().replace('"case"', '"cases"'), "case: Field required")],
)  # fmt: skip
def test_a_line_that_is_no_record_is_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "tiny.jsonl"
    path.write_text(f"{cell('one').line()}\n{line}\n")
    with pytest.raises(CodaError, match=rf"tiny\.jsonl:2: {message}"):
        read(path, Cell)


def test_a_link_is_not_written_through(tmp_path: Path) -> None:
    outside, path = tmp_path / "outside", tmp_path / "tiny.jsonl"
    outside.write_text("kept, without a last line")
    path.symlink_to(outside)
    with pytest.raises(OSError, match=r"tiny\.jsonl"):
        append(path, [cell("one")])
    assert outside.read_text() == "kept, without a last line"


def test_machines_are_named() -> None:
    packages: dict[str, str | None] = {"torch": "2.11.0", "triton": "3.6.0"}
    about = Machine(device="cuda", gpu="NVIDIA H200", driver="580.1", packages=packages)
    assert machine(about) == "NVIDIA H200, driver 580.1, torch 2.11.0"
    assert machine(Machine(device="cpu", packages={"torch": "2.9"})) == "cpu, torch 2.9"
    assert machine(Machine(device="cpu")) == "cpu"


def test_the_commit_is_the_programs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a mark where sources differ from it, which records and pages do not decide."""
    monkeypatch.setattr(cells, "__file__", str(tmp_path / "evals" / "cells.py"))

    def git(*args: str) -> str:
        who = ("-c", "user.name=A", "-c", "user.email=a@b.c", "-c", "core.hooksPath=/dev/null")
        command = ["git", *who, *args]
        done = subprocess.run(command, cwd=tmp_path, check=True, capture_output=True, text=True)
        return done.stdout.strip()

    git("init", "-q")
    for name in ("evals/results/paper.jsonl", "agent/__init__.py", "evals/cells.py"):
        (tmp_path / name).parent.mkdir(parents=True, exist_ok=True)
        (tmp_path / name).write_text("first")
    git("add", ".")
    git("commit", "-qm", "first")
    head = git("rev-parse", "--short=7", "HEAD")
    (tmp_path / "evals" / "results" / "paper.jsonl").write_text("second")
    assert program_commit() == head
    git("commit", "-qam", "records")
    assert program_commit() == head
    (tmp_path / "agent" / "__init__.py").write_text("second")
    assert program_commit() == f"{head}+"
    (tmp_path / "package" / "evals").mkdir(parents=True)  # installed in somebody's repository
    monkeypatch.setattr(cells, "__file__", str(tmp_path / "package" / "evals" / "cells.py"))
    monkeypatch.setattr(cells, "package_version", lambda *_: "0.1.0")
    assert program_commit() == "0.1.0"
    monkeypatch.setenv("CODA_AGENT_COMMIT", "fedcba9")
    assert program_commit() == "fedcba9"
