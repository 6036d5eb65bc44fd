from pathlib import Path

import pytest

from coda_agent.agent.events import (
    CandidateSaved,
    Event,
    Judged,
    RunFailed,
    RunStarted,
    Stored,
    Unknown,
    event_of,
)
from coda_agent.agent.judgement import Judgement, Machine
from coda_agent.agent.log import RunLog, read_events
from coda_agent.agent.state import RunState
from coda_agent.primitives.errors import WorkspaceError


def test_every_torn_tail_is_skipped_and_cut_off(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with RunLog(path) as log:
        fields = {"text": "zwei\nZeilen ✓", "bad": float("nan"), "path": tmp_path}
        log.append(Unknown(type="a", fields=fields))
        log.append(Unknown(type="b"))
    whole = path.read_bytes()
    first = whole.index(b"\n") + 1
    for cut in range(first, len(whole)):
        path.write_bytes(whole[:cut])
        assert [event.type for event in read_events(path)] == ["a"]
        with RunLog(path) as log:
            assert log.append(Unknown(type="c")).seq == 1
        assert [(event.seq, event.type) for event in read_events(path)] == [(0, "a"), (1, "c")]
    assert read_events(path)[0].data == {
        "text": "zwei\nZeilen ✓",
        "bad": "nan",
        "path": str(tmp_path),
    }


def test_damage_before_the_last_line_is_an_error(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with RunLog(path) as log:
        log.append(Unknown(type="a"))
    path.write_bytes(b'{"torn\n' + path.read_bytes())
    with pytest.raises(WorkspaceError, match=r"events.jsonl:1 is not an event"):
        read_events(path)
    with pytest.raises(WorkspaceError):
        RunLog(path)


@pytest.mark.parametrize(
    "line",
    [
        "[" * 9999, "7", "[]", "9" * 5000, '"\\ud800"',
        '{"seq": 0, "time": "never", "type": "x", "data": {}}',
        '{"seq": 0, "time": "2026-11-22T00:00:00", "type": "x", "data": {}}',
        '{"seq": 1e999, "time": "2026-11-22T00:00:00Z", "type": "x", "data": {}}',
    ],
)  # fmt: skip
def test_a_line_of_a_stranger_is_named(tmp_path: Path, line: str) -> None:
    (tmp_path / "events.jsonl").write_text(f"{line}\n")
    with pytest.raises(WorkspaceError, match=r"events.jsonl:1 is not an event: .{3,90} \(take"):
        read_events(tmp_path / "events.jsonl")


def test_two_writers_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    with RunLog(path) as log:
        log.append(Unknown(type="a"))
        with pytest.raises(WorkspaceError, match="written by another"):
            RunLog(path)
        log.append(Unknown(type="b"))
    with RunLog(path) as log:
        assert log.append(Unknown(type="c")).seq == 2


def test_no_log_has_no_events(tmp_path: Path) -> None:
    assert RunState.of(read_events(tmp_path / "none.jsonl")) == RunState()


def test_every_kind_comes_back_as_it_was_written(tmp_path: Path) -> None:
    """And what a line of its kind lacks is named."""
    path = tmp_path / "events.jsonl"
    with RunLog(path) as log:
        written = log.append(CandidateSaved(digest="abc", text="x"))
        assert read_events(path) == [written]
    path.write_text(path.read_text().replace('"text":"x"', '"text":1'))
    with pytest.raises(WorkspaceError, match=r"events.jsonl:1 is not an event: .*text.*string"):
        read_events(path)
    kinds = [kind for kind in Event.__subclasses__() if kind is not Unknown]
    assert len({kind.model_fields["type"].default for kind in kinds}) == len(kinds) > 15
    line = {
        "seq": 0,
        "time": "2026-01-01T00:00:00.000Z",
        "type": "gave.up",
        "data": {"reason": "r"},
    }
    assert event_of(line).line() == line


def test_the_state_of_a_run(tmp_path: Path) -> None:
    path = tmp_path / "events.jsonl"
    gates = {"static": {"passed": True, "seconds": 0.5}, "performance": {}}
    judgement = Judgement.model_validate(
        {"passed": True, "level": "proved", "gates": gates, "digests": {}}
    )
    with RunLog(path) as log:
        log.append(RunStarted(kind="generate", spec="s", author="composer"))
        log.append(
            Judged(
                number=1, check="submit", judgement=judgement, machine=Machine(device="cpu"),
                gpu_s=0.0,
            )
        )  # fmt: skip
        log.append(Stored(type="committed", commit="abc", level="proved"))
        log.append(Unknown(type="unheard.of", fields={"x": 1}))
    state = RunState.of(read_events(path))
    assert (state.kind, state.spec, state.author) == ("generate", "s", "composer")
    assert state.gates["static"] == {"passed": True, "seconds": 0.5}
    assert state.gates["performance"]["passed"] is None
    assert (state.outcome, state.level, state.commit) == ("passed", "proved", "abc")
    with RunLog(path) as log:
        log.append(RunFailed(message="interrupted"))
    assert RunState.of(read_events(path)).outcome == "failed"
