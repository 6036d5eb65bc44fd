"""A run as a page: each turn with its cost, candidates as diffs, findings, and the end. And as a log of
inspect_ai, whose reader and viewer (0.3.285) took what is asserted here."""

import json
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent import events as e
from coda_agent.agent import inspect_log, pages, run_page
from coda_agent.agent.judgement import Judgement, Machine
from coda_agent.agent.log import read_events
from coda_agent.agent.workspace import Run
from coda_agent.primitives.errors import WorkspaceError
from tests.agent.test_pages import Page

ROOT = Path(__file__).parents[2]
USAGE = {"input_tokens": 100, "cache_read_input_tokens": 900, "output_tokens": 50}


def dated(events: list[Any]) -> list[e.Event]:
    times = (f"2026-11-26T10:00:{second:02d}.000Z" for second in range(60))
    return [event.model_copy(update={"time": time}) for event, time in zip(events, times)]  # noqa: B905


def run_of_a_model() -> list[e.Event]:
    prompted = {"system": [{"type": "text", "text": "The <rules>."}]}
    first = [{"role": "user", "content": [{"type": "text", "text": "The spec."}]}]
    said = [{"type": "thinking", "thinking": "Hm."}, {"type": "text", "text": "I write."}]
    about = {"model": "m-1", "usage": USAGE, "usd": 0.25, "seconds": 3.0, "stop_reason": "tool_use"}
    return dated([
        e.RunStarted(run="r", kind="generate", spec="s", author="claude"),
        e.AuthorStarted(author="claude"),
        e.Prompted(request=prompted, messages=first, characters=21),
        e.Responded(content=said, **about),
        e.ToolStarted(id="a", name="write_candidate", input={"text": "x = 1\ny = 2"}),
        e.CandidateSaved(digest="d1", text="x = 1\ny = 2"),
        e.ToolFinished(id="a", name="write_candidate", text="candidate d1"),
        e.CandidateSaved(digest="d2", text="x = 1\ny = 3"),
        e.ToolFinished(id="b", name="check", text="attempt 1, check static: FAILED", seconds=1.5),
        e.LimitReached(reason="$1.00"),
        e.RunFinished(reason="budget: $1.00"),
    ])  # fmt: skip


def test_a_run_of_a_model_is_told_in_order(tmp_path: Path) -> None:
    sections = [(str(head), body) for head, body in run_page.sections(run_of_a_model())]
    assert [head for head, _ in sections] == [
        "What came of it", "The author", "Prompt, 21 characters",
        "Turn 1: m-1, 1000 tokens read, 90% by the cache, 50 written, 3 s, $0.25, tool_use",
        "Thought", "Candidate d1", "write_candidate, 0.0 s: candidate d1", "Candidate d2",
        "check, 1.5 s", "A limit", "The end",
    ]  # fmt: skip
    found: dict[str, Any] = dict(sections)
    assert dict(found["What came of it"])["dollars"] == "$0.25"
    assert found["Prompt, 21 characters"] == "The <rules>.\n\nThe spec."
    assert found["Candidate d2"].splitlines()[1:] == [" x = 1", "-y = 2", "+y = 3"]
    assert found["Thought"] == "Hm." and found["The end"] == "budget: $1.00"
    path = pages.write(tmp_path / "run.html", "r", [*run_page.sections(run_of_a_model())])
    page = Page(path.read_text("utf-8"))
    assert page.tags.count("details") == 3 and "+y = 3" in page.text
    assert "The <rules>.\n\nThe spec." in page.text and not {"rules", "script"} & {*page.tags}


def test_the_share_by_the_cache_is_what_was_read_of_it() -> None:
    written = {"input_tokens": 50, "cache_read_input_tokens": 0, "output_tokens": 5}
    usage = {**written, "cache_creation_input_tokens": 10_000}
    events = dated([e.RunStarted(run="r"), e.Responded(model="m", usage=usage, usd=0.0)])
    _, (head, _), _ = run_page.sections(events)
    assert str(head).startswith("Turn 1: m, 10050 tokens read, 0% by the cache, 5 written")


def judged(number: int, check: str, finding: str = "O is wrong") -> e.Judged:
    digests = dict.fromkeys(("spec", "candidate"), f"sha256:{0:064x}")
    about = {"passed": False, "gates": {"static": {"passed": False}}, "digests": digests}
    judgement = Judgement.model_validate({**about, "finding": finding})
    return e.Judged(
        number=number, check=check, judgement=judgement, machine=Machine(device="cpu"), gpu_s=0.0
    )


def test_a_finding_is_told_once() -> None:
    """By the result of the call that asked for it, or, where none did, by itself."""
    told = e.ToolFinished(name="check", text="FAILED: O is wrong", data={"attempt": 1})
    for check, more in (("check", []), ("submit", [e.CandidateSaved(digest="d", text="x")])):
        events = dated([e.RunStarted(run="r"), *more, judged(1, check), e.RunFinished()])
        assert (f"Verdict, {check}", "O is wrong") in [*run_page.sections(events)]
    events = dated([e.RunStarted(run="r"), judged(1, "static"), told, judged(2, "submit", "Other")])
    said = [(str(head), body) for head, body in run_page.sections(events)][1:]
    assert said == [("check, 0.0 s", "FAILED: O is wrong"), ("Verdict, submit", "Other")]


def test_recorded_runs_are_pages(tmp_path: Path) -> None:
    logs = sorted((ROOT / "logs" / "trajectories").glob("*/events.jsonl"))
    assert len(logs) > 10
    for log in logs[::4]:
        path = pages.write(tmp_path / "run.html", "r", [*run_page.sections(read_events(log))])
        text = "".join(Page(path.read_text("utf-8")).text)
        assert "What came of it" in text and "submit, " in text and "The end" in text
        assert "Verdict, " not in text  # each was asked for by a call, whose result says it


def test_a_run_of_a_model_is_a_log_of_inspect() -> None:
    calls = [{"type": "tool_use", "id": "b", "name": "check", "input": {"level": "static"}}]
    results = e.ToolFinished(id="b", name="check", text="FAILED", ok=False)
    first, *events = run_of_a_model()
    asked = e.Responded(model="m-1", content=calls, usage=USAGE, usd=0.5, stop_reason="tool_use")
    turn = [asked, e.ToolStarted(id="b", name="check"), results, e.Turned(note="$1 is left")]
    log = inspect_log.document("r", dated([first, *events[:3], *turn, *events[-2:]]))
    (sample,) = log["samples"]
    assert (log["status"], log["eval"]["model"], log["eval"]["task"]) == ("success", "m-1", "s")
    assert [(m["role"], m["content"]) for m in sample["messages"]] == [
        ("system", "The <rules>."), ("user", "The spec."),
        ("assistant", [{"type": "reasoning", "reasoning": "Hm."}, {"type": "text", "text": "I write."}]),
        ("assistant", []), ("tool", "FAILED"), ("user", "$1 is left"),
    ]  # fmt: skip
    assert sample["messages"][3]["tool_calls"] == [
        {"id": "b", "function": "check", "arguments": {"level": "static"}}
    ]
    assert sample["messages"][4]["function"] == "check" and "error" in sample["messages"][4]
    assert [x["event"] for x in sample["events"]] == ["model", "model", "tool", "info", "info"]
    assert log["stats"]["model_usage"]["m-1"] == {
        "input_tokens": 200, "output_tokens": 100, "total_tokens": 2100, "total_cost": 0.75,
        "input_tokens_cache_read": 1800, "input_tokens_cache_write": 0,
    }  # fmt: skip
    assert sample["scores"]["judge"]["value"] == "I"
    other = asked.model_copy(update={"model": "m-2"})
    log = inspect_log.document("r", dated([first, *events[:3], other, *events[-2:]]))
    assert log["eval"]["model"] == "m-1,m-2"
    assert {m: x["total_cost"] for m, x in log["stats"]["model_usage"].items()} == {
        "m-1": 0.25, "m-2": 0.5
    }  # fmt: skip
    failed = e.RunFailed(error="KeyboardInterrupt", message="interrupted")
    assert inspect_log.document("r", dated([first, failed]))["status"] == "cancelled"
    failed = e.RunFailed(error="E", message="oops")
    assert inspect_log.document("r", dated([first, failed]))["error"]["message"] == "oops"


def test_recorded_runs_are_logs_of_inspect(tmp_path: Path) -> None:
    folder = ROOT / "logs" / "trajectories" / "gemm_haar-3597"
    events = read_events(folder / "events.jsonl")
    path = inspect_log.write(Run(folder.name, tmp_path / folder.name), events)
    with pytest.raises(WorkspaceError, match="gemm_haar-3597 has no events"):
        inspect_log.write(Run(folder.name, tmp_path), [])
    assert path == tmp_path / "2026-11-23T00-15-11_gemm-haar_gemm-haar-3597.json"
    (sample,) = json.loads(path.read_text("utf-8"))["samples"]
    said = [x["function"] for x in sample["events"] if x["event"] == "tool"]
    assert said == [m["function"] for m in sample["messages"] if m["role"] == "tool"]
    assert said[0] == "read_spec" and said[-1] == "submit"
    judged = [x["score"]["value"] for x in sample["events"] if x["event"] == "score"]
    assert judged[-1] == "C" == sample["scores"]["judge"]["value"]
    assert sample["scores"]["judge"]["answer"].startswith('"""')
