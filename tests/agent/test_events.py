from pathlib import Path

import pytest

from coda_agent.agent.events import EventLog, RunState, read_events, summary
from coda_agent.primitives.errors import WorkspaceError


def test_every_torn_tail_is_skipped_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append("a", {"text": "zwei\nZeilen ✓", "bad": float("nan"), "path": tmp_path})
        log.append("b")
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert [event.type for event in read_events(path)] == ["a"]
        with EventLog(path) as log:
            assert log.append("c").seq == 1
        assert [(event.seq, event.type) for event in read_events(path)] == [(0, "a"), (1, "c")]
    assert read_events(path)[0].data == {
        "text": "zwei\nZeilen ✓",
        "bad": "nan",
        "path": str(tmp_path),
    }


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append("a")
    path.write_bytes(b'{"torn\n' + path.read_bytes())
    with pytest.raises(WorkspaceError, match=r"events.jsonl:1 is not an event"):
        read_events(path)
    with pytest.raises(WorkspaceError):
        EventLog(path)


def test_two_writers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append("a")
        with pytest.raises(WorkspaceError, match="written by another"):
            EventLog(path)
        log.append("b")
    with EventLog(path) as log:
        assert log.append("c").seq == 2


def test_no_log_has_no_events(tmp_path: Path) -> None:
    assert summary(read_events(tmp_path / "none.jsonl")) == RunState()


def test_summary(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with EventLog(path) as log:
        log.append("run.started", {"kind": "generate", "spec": "s", "author": "composer"})
        log.append("gate.started", {"gate": "static"})
        assert summary(read_events(path)).gates["static"].passed is None
        log.append("gate.finished", {"gate": "static", "passed": True, "seconds": 0.5})
        log.append("verdict", {"passed": True, "level": "proved"})
        log.append("committed", {"commit": "abc"})
        log.append("unheard.of", {"x": 1})
    state = summary(read_events(path))
    assert (state.kind, state.spec, state.author) == ("generate", "s", "composer")
    assert (state.gates["static"].passed, state.gates["static"].seconds) == (True, 0.5)
    assert (state.outcome, state.level, state.commit) == ("passed", "proved", "abc")
    with EventLog(path) as log:
        log.append("run.failed", {"message": "interrupted"})
    assert summary(read_events(path)).outcome == "failed"
