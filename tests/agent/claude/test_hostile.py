"""The loop before a server or a proxy that answers nonsense: nothing of it is acted on, all of it is
logged and paid for from the budget, and the run goes on or can be resumed."""

import math
from dataclasses import replace
from typing import Any

import pytest
from bench import author, generate, log_of, resume, spent_usd, types
from broken import BROKEN, PAIR
from server import Reply, Serve, call, error, text
from test_loop import WHOLE, Clock, accepted, results

from coda_agent.agent.authors.claude import Options, client
from coda_agent.agent.authors.claude.client import Stopped, retry_after
from coda_agent.agent.budget import Budget
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

RICH = Budget(usd=1e6, tokens=10**12, steps=1000)
BYTES = {
    "no text": b"event: ping\ndata: \xff\xfe\n\n",
    "an error that is no JSON": b"event: error\ndata: upstream timeout\n\n",
    "an error that says nothing": b'event: error\ndata: {"type": "error"}\n\n',
    "an error that is a list": b'event: error\ndata: {"type": "error", "error": [1]}\n\n',
    "a page": b"<html>\n\n<body>Bad gateway</body>\n\n",
}


@pytest.fixture
def clock() -> Clock:
    return Clock()


def failures(where: Workspace) -> list[JsonObject]:
    return [event.data for event in log_of(where) if event.type == "request.failed"]


@pytest.mark.parametrize("fallback", [None, "claude-sonnet-5-5"], ids=["alone", "fallback"])
def test_nonsense_is_asked_again_and_not_acted_on(
    where: Workspace, serve: Serve, clock: Clock, fallback: str | None
) -> None:
    """Each in turn before a good answer; with a fallback the SDK's middleware reads it first."""
    edits = [
        # The middleware makes one start of two in a row.
        *(edit for what, edit in BROKEN.items() if not fallback or what != "two starts"),
        *(lambda events, raw=raw: [*events[:3], raw] for raw in BYTES.values()),
    ]
    nonsense = [Reply(PAIR.content, edit=edit) for edit in edits]
    good = [*[Reply([call("list_demos", {}, f"d{i}")]) for i in range(5)], *WHOLE]
    script: list[Reply] = []
    for i, after in enumerate(good):
        script += [*nonsense[8 * i : 8 * i + 8], after]
    server = serve(script)
    who = author(Options(budget=RICH, fallback=fallback), clock=clock, sleep=clock.sleep)
    accepted(where, generate(where, who))
    assert len(server.bodies) == len(script)
    failed = failures(where)
    assert len(failed) == len(nonsense) == len(clock.slept)
    assert all(f["usd"] >= 0 and f["error"] and f["wait_s"] for f in failed)
    started = [event.data["id"] for event in log_of(where) if event.type == "tool.started"]
    assert started == [block["id"] for r in good for block in r.content if "id" in block]


def test_a_run_stopped_by_nonsense_resumes(where: Workspace, serve: Serve, clock: Clock) -> None:
    anonymous = Reply(PAIR.content, edit=BROKEN["a call without an id"])
    serve(lambda body, number: WHOLE[0] if not number else anonymous)
    with pytest.raises(Stopped, match=r"content\.1\.tool_use\.id: Field required"):
        generate(where, author(Options(budget=RICH), clock=clock, sleep=clock.sleep))
    assert len(failures(where)) == 9 and types(where, "tool.started") == ["tool.started"]
    serve(WHOLE[1:])
    accepted(where, resume(where, author()))


@pytest.mark.parametrize("wait", ["-5", "nan", "inf", "-inf", "1e400", "", "soon", "٣x"])
def test_a_time_that_is_none_is_no_time_to_wait(wait: str) -> None:
    import anthropic
    import httpx2

    for name in ("retry-after", "retry-after-ms"):
        response = httpx2.Response(
            429,
            headers=[(name.encode(), wait.encode())],
            request=httpx2.Request("POST", "http://x"),
        )
        refused = anthropic.APIStatusError("no", response=response, body=None)
        wait_s = retry_after(refused, 3)
        assert wait_s is not None and 1.5 <= wait_s <= 2.0


def test_a_negative_wait_is_none(where: Workspace, serve: Serve, clock: Clock) -> None:
    serve([error(429, "rate_limit_error", retry_after="-5"), *WHOLE])
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert [0.375 <= s <= 0.5 for s in clock.slept] == [True] and len(failures(where)) == 1


def test_errors_that_make_no_sense_are_errors(where: Workspace, serve: Serve, clock: Clock) -> None:
    bodies = [b"[]", b"null", b'{"error": 5}', b"<html>", b"[" * 9999, b"\xff"]
    serve([*(Reply(status=503, error=body) for body in bodies), *WHOLE])
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert [f["usd"] for f in failures(where)] == [0.0] * len(bodies)


def test_an_answer_without_end_is_cut_off(
    where: Workspace, serve: Serve, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(client, "LARGEST", 100_000)
    endless = Reply(edit=lambda events: [events[0], *[b"x" * 1000] * 200])
    serve([endless, *WHOLE])
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    (failed,) = failures(where)
    assert failed["error"] == "Broken: more than 100000 bytes"


def test_an_answer_whose_bill_makes_no_sense_costs_what_was_reserved(
    where: Workspace, serve: Serve
) -> None:
    """By the prices of the list: 20,000 tokens out, and what was sent, written for an hour."""
    priced = {"model": "claude-next", "input_tokens": 5, "output_tokens": 5}
    usages: list[JsonObject] = [
        {"input_tokens": None}, {"output_tokens": None}, {"input_tokens": -(10**8)},
        {"output_tokens": -(10**8)}, {"cache_read_input_tokens": -(10**8)},
        {"output_tokens": 10**400}, {"iterations": [priced]},
    ]  # fmt: skip
    demos = [Reply([call("list_demos", {}, f"d{i}")]) for i in range(2)]
    serve([replace(r, usage=usage) for r, usage in zip([*demos, *WHOLE], usages, strict=True)])
    accepted(where, generate(where, author(Options(budget=RICH))))
    log = log_of(where)
    reserved = [event.data["worst_usd"] for event in log if event.type == "request"]
    billed = [event.data for event in log if event.type == "response"]
    assert [round(about["usd"], 4) for about in billed] == reserved
    for about in billed:
        entries = about["usage"]["iterations"]
        assert [entry["output_tokens"] for entry in entries] in ([20_000], [8000, 20_000])
        usd = sum(entry["input_tokens"] * 8e-6 + entry["output_tokens"] * 2e-5 for entry in entries)
        assert math.isclose(usd, about["usd"])
    assert spent_usd(where) == pytest.approx(sum(reserved), abs=1e-3)


def test_a_server_that_never_says_what_it_costs_ends_by_the_budget(
    where: Workspace, serve: Serve
) -> None:
    reply = Reply(usage={"output_tokens": None})
    server = serve(lambda _, n: Reply([call("list_demos", {}, f"d{n}")], usage=reply.usage))
    outcome = generate(where, author(Options(budget=Budget(usd=3.0))))
    assert str(outcome.reason).startswith("budget: $3.00") and len(server.bodies) < 8
    assert 2.0 < spent_usd(where) <= 3.0


def test_a_pause_for_ever_is_idle(where: Workspace, serve: Serve) -> None:
    server = serve(lambda _, number: Reply([text("Wait.")], stop_reason="pause_turn"))
    outcome = generate(where, author(Options(budget=RICH)))
    assert not outcome.passed and "3 turns without a call" in str(outcome.reason)
    assert len(server.bodies) == 4


def test_a_call_runs_only_where_the_turn_stopped_for_it(where: Workspace, serve: Serve) -> None:
    """Each has a result: a request with a call and none is refused by the API, and so would be
    each resume."""
    reasons = ["end_turn", "pause_turn", "guardrail"]
    refused = [Reply([call("submit", {}, why)], stop_reason=why) for why in reasons]
    demo = Reply([call("list_demos", {}, "d")])
    server = serve([*refused[:2], demo, *refused[2:], *WHOLE])
    accepted(where, generate(where, author(Options(budget=RICH))))
    sent = server.requests()
    for why, number in zip(reasons, (1, 2, 4), strict=True):
        (result,) = results(sent[number])
        assert result["is_error"] and f"cut off ({why})" in result["content"]


def test_an_input_as_deep_as_the_parser_lets_through_is_logged(
    where: Workspace, serve: Serve
) -> None:
    deep: Any = "static"
    for _ in range(190):
        deep = {"level": deep}
    server = serve([Reply([call("check", deep, "d")]), *WHOLE])
    accepted(where, generate(where, author()))
    (result,) = results(server.requests()[1])
    assert result["is_error"] and "level: Input should be" in result["content"]
    assert server.requests()[1]["messages"][1]["content"][0]["input"] == deep


def test_a_refusal_with_a_call_runs_nothing_and_resumes(where: Workspace, serve: Serve) -> None:
    serve([Reply([call("submit", {}, "p")], stop_reason="refusal")])
    with pytest.raises(Stopped, match="refused: no reason given"):
        generate(where, author())
    assert "tool.started" not in types(where)
    serve(WHOLE)
    accepted(where, resume(where, author()))


def test_ids_that_begin_anew_with_each_turn_are_told_apart(where: Workspace, serve: Serve) -> None:
    replies = [
        Reply([{**block, "id": "call_0"} for block in r.content if "id" in block]) for r in WHOLE
    ]
    server = serve(replies)
    accepted(where, generate(where, author()))
    sent = [block for message in server.requests()[-1]["messages"] for block in message["content"]]
    ids = [block["id"] for block in sent if block["type"] == "tool_use"]
    assert ids == ["call_0", "call_0_", "call_0__", "call_0___"]
    assert [b["tool_use_id"] for b in sent if b["type"] == "tool_result"] == ids


INFO = {"type": "model", "id": "m", "display_name": "M", "lifecycle": "active"}


@pytest.mark.parametrize(
    "info",
    [
        {**INFO, "max_tokens": -5, "max_input_tokens": "many", "capabilities": [1]},
        {**INFO, "max_tokens": 10**400, "max_input_tokens": None, "capabilities": {"effort": 5}},
    ],
    ids=["wrong", "absurd"],
)
def test_a_model_of_which_nonsense_is_said_is_called_as_usual(
    where: Workspace, serve: Serve, info: Any
) -> None:
    server = serve(WHOLE)
    server.infos = [(200, info)]
    accepted(where, generate(where, author()))
    first = server.requests()[0]
    assert first["max_tokens"] == 20_000 and first["output_config"]["effort"] == "high"
    assert first["context_management"]["edits"][0]["trigger"]["value"] == 120_000


def test_what_a_model_cannot_do_is_not_asked_of_it(where: Workspace, serve: Serve) -> None:
    no = {"supported": False}
    can = {
        "effort": no,
        "context_management": no,
        "thinking": {"supported": True, "types": {"adaptive": no}},
    }
    server = serve(WHOLE)
    server.infos = [(200, {**INFO, "max_tokens": 4096, "capabilities": can})]
    accepted(where, generate(where, author()))
    first = server.requests()[0]
    assert first["max_tokens"] == 4096
    assert not {"thinking", "output_config", "context_management"} & set(first)


def test_the_question_about_the_model_is_under_the_same_policy(
    where: Workspace, serve: Serve, clock: Clock
) -> None:
    """Nonsense is asked again, and a wait of a year is a clean stop."""
    busy = {"type": "error", "error": {"type": "overloaded_error", "message": "busy"}}
    server = serve(WHOLE)
    server.infos = [(200, b"<html>"), (200, [1]), (529, busy, {"retry-after": "-1"}),
                    (429, busy, {"retry-after": "31536000"})]  # fmt: skip
    with pytest.raises(Stopped, match="the model did not answer: busy"):
        generate(where, author(clock=clock, sleep=clock.sleep))
    assert len(clock.slept) == 3 and [f["usd"] for f in failures(where)] == [0.0] * 4
    assert server.bodies == []
    accepted(where, resume(where, author(clock=clock, sleep=clock.sleep)))


def test_a_server_that_is_not_there_is_named(
    where: Workspace, clock: Clock, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-ant-nobody")
    monkeypatch.setenv("ANTHROPIC_BASE_URL", "http://127.0.0.1:9")
    with pytest.raises(Stopped, match=r"http://127\.0\.0\.1:9: .*refused"):
        generate(where, author(clock=clock, sleep=clock.sleep))
    assert len(clock.slept) == client.ATTEMPTS - 1


def test_a_list_of_models_that_makes_no_sense_is_not_named(where: Workspace, serve: Serve) -> None:
    server = serve([])
    server.models = {"data": 5}
    with pytest.raises(CodaError) as caught:
        generate(where, author(Options(model="claude-haiku-4-5")))
    assert str(caught.value) == "no model claude-haiku-4-5"
