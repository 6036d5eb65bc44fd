"""The loop against a scripted server: one test for each thing that goes wrong, and what is promised
when nothing does."""

import itertools
import json
import math
import os
import re
import subprocess
import time
import tomllib
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import pytest
from bench import KEY, RIGHT, WRONG, author, generate, log_of, resume, run_of, spent_usd, types
from server import MODEL, Reply, Serve, call, error, text

from coda_agent.agent import pipeline, workspace
from coda_agent.agent.authors import Options
from coda_agent.agent.authors.claude.client import Stopped
from coda_agent.agent.authors.claude.conversation import Conversation
from coda_agent.agent.budget import PRICES, Budget, Prices, tokens
from coda_agent.agent.events import Requested, Responded, RunResumed
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.keys import KEYS
from coda_agent.agent.log import read_events
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

WRITE_WRONG = Reply([text("First."), call("write_candidate", {"text": WRONG}, "w1")])
CHECK_1 = Reply([call("check", {"level": "static"}, "c1")])
WRITE = Reply([call("write_candidate", {"text": RIGHT}, "w2")])
CHECK_2 = Reply([call("check", {"level": "interpret"}, "c2")])
SUBMIT = Reply([call("submit", {}, "s1")])
WHOLE = [WRITE_WRONG, CHECK_1, WRITE, CHECK_2, SUBMIT]


with PRICES.open("rb") as file:
    ROWS = tomllib.load(file)["price"]
NAMES = sorted({row["model"] for row in ROWS})
MODELS = sorted({str(Prices(name).tiers(name)): name for name in NAMES}.values())
"""One of each price."""


class Clock:
    """Time that only passes when someone sleeps, or a script says so."""

    def __init__(self) -> None:
        self.now = 0.0
        self.slept: list[float] = []

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        self.slept.append(seconds)
        self.now += seconds


@pytest.fixture
def clock() -> Clock:
    return Clock()


def results(request: JsonObject) -> list[JsonObject]:
    """The tool results of a request's last message."""
    return [block for block in request["messages"][-1]["content"] if block["type"] == "tool_result"]


def commits(where: Workspace) -> int:
    try:
        return int(where.git("rev-list", "--count", "HEAD"))
    except workspace.GitError:
        return 0


def accepted(where: Workspace, outcome: pipeline.Outcome) -> None:
    """One commit, of the right program, and a log that tells it."""
    assert outcome.passed and outcome.level == "proved" and outcome.commit
    assert commits(where) == 1
    assert where.kernel("gemm_swiglu").program.read_text() == RIGHT
    assert where.kernel("gemm_swiglu").evidence.author == "claude"
    state = RunState.of(log_of(where))
    assert (state.outcome, state.commit, state.reason) == ("passed", outcome.commit, "proved")
    assert [event.seq for event in log_of(where)] == list(range(len(log_of(where))))


def test_a_run_from_spec_to_commit(where: Workspace, serve: Serve) -> None:
    server = serve(WHOLE)
    outcome = generate(where, author())
    accepted(where, outcome)
    sent = server.requests()
    assert len(sent) == len(WHOLE)
    first = sent[0]
    assert first["model"] == MODEL and first["stream"] is True
    assert first["thinking"]["type"] == "adaptive" and first["output_config"] == {
        "effort": "high", "task_budget": {"type": "tokens", "total": 250_000}
    }  # fmt: skip
    assert "$5.00, at $20 for a million" in first["messages"][0]["content"][1]["text"]
    assert sent[1]["messages"][-1]["content"][-1]["text"] == "[$0.00 of $5.00 spent]"
    assert [block["is_error"] for block in results(sent[2]) if "is_error" in block] == []
    assert "only imports and @epilogue functions may stand here" in results(sent[2])[0]["content"]
    assert "passed (proved)" in results(sent[4])[0]["content"]


def test_the_prefix_is_byte_stable(where: Workspace, serve: Serve) -> None:
    """Each request starts with all bytes of the one before it, up to the end of its messages."""
    thinking = {"type": "thinking", "thinking": "Hm, ünïcode.", "signature": "c2ln"}
    replies = [replace(WHOLE[0], content=[thinking, *WHOLE[0].content]), *WHOLE[1:]]
    server = serve(replies)
    generate(where, author())
    sent = server.requests()
    marks = [
        json.dumps(sent[0][part]).count("cache_control") for part in ("tools", "system", "messages")
    ]
    assert marks == [1, 1, 1] and sent[0]["cache_control"] == {"type": "ephemeral"}
    assert sent[0]["tools"][-1]["cache_control"]["ttl"] == "1h"
    for earlier, later in itertools.pairwise(sent):
        before, after = (dict(request) for request in (earlier, later))
        old, new = before.pop("messages"), after.pop("messages")
        assert json.dumps(before) == json.dumps(after)
        assert json.dumps(new).startswith(json.dumps(old)[:-1])
        assert len(new) == len(old) + 2
    assert sent[1]["messages"][1]["content"][0] == thinking


def test_cost_is_the_usage_blocks_to_the_cent(where: Workspace, serve: Serve) -> None:
    usages = [
        {"input_tokens": 12, "cache_creation_input_tokens": 30_000, "output_tokens": 900,
         "cache_creation": {"ephemeral_1h_input_tokens": 29_000, "ephemeral_5m_input_tokens": 1000}},
        {"input_tokens": 7, "cache_read_input_tokens": 30_000, "output_tokens": 1234,
         "cache_creation_input_tokens": 500, "cache_creation": {"ephemeral_5m_input_tokens": 500}},
        {"input_tokens": 3, "output_tokens": 10, "iterations": [
            {"type": "compaction", "input_tokens": 150_000, "output_tokens": 4000,
             "cache_creation_input_tokens": 0, "cache_read_input_tokens": 0},
            {"type": "message", "input_tokens": 3, "output_tokens": 10,
             "cache_creation_input_tokens": 0, "cache_read_input_tokens": 4000}]},
    ]  # fmt: skip
    in_, out, write5, write1, read = (Decimal(p) for p in ("4", "20", "5", "8", "0.2"))
    million = Decimal(1_000_000)
    expected = [
        (12 * in_ + 29_000 * write1 + 1000 * write5 + 900 * out) / million,
        (7 * in_ + 500 * write5 + 30_000 * read + 1234 * out) / million,
        (150_000 * in_ + 4000 * out + 3 * in_ + 4000 * read + 10 * out) / million,
    ]
    replies = [replace(reply, usage=usage) for reply, usage in zip(WHOLE[2:], usages, strict=True)]
    serve(replies)
    generate(where, author())
    billed = [event.data["usd"] for event in log_of(where) if event.type == "response"]
    assert [round(Decimal(b), 8) for b in billed] == [round(e, 8) for e in expected]
    assert abs(Decimal(spent_usd(where)) - sum(expected)) < Decimal("0.0000001")


def test_429_without_retry_after_backs_off(where: Workspace, serve: Serve, clock: Clock) -> None:
    server = serve([WHOLE[0], *[error(429, "rate_limit_error")] * 3, *WHOLE[1:]])
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert [0.375 * 2**i <= s <= 0.5 * 2**i for i, s in enumerate(clock.slept)] == [True] * 3
    assert len({server.bodies[i] for i in (1, 2, 3, 4)}) == 1
    failed = [event.data for event in log_of(where) if event.type == "request.failed"]
    assert [round(f["wait_s"], 6) for f in failed] == [round(s, 6) for s in clock.slept]


def test_429_with_retry_after_is_obeyed(where: Workspace, serve: Serve, clock: Clock) -> None:
    serve([error(429, "rate_limit_error", retry_after="97"), *WHOLE])
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert clock.slept == [97.0]


@pytest.mark.parametrize(("status", "kind"), [(500, "api_error"), (529, "overloaded_error")])
def test_a_server_in_trouble_is_asked_again(
    where: Workspace, serve: Serve, clock: Clock, status: int, kind: str
) -> None:
    serve([WHOLE[0], error(status, kind), *WHOLE[1:]])
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert len(clock.slept) == 1


def test_a_server_that_stays_down_is_a_clean_stop_and_resumes(
    where: Workspace, serve: Serve, clock: Clock
) -> None:
    serve(lambda body, number: WHOLE[number] if number < 2 else error(529, "overloaded_error"))
    with pytest.raises(Stopped, match="the model did not answer"):
        generate(where, author(clock=clock, sleep=clock.sleep))
    assert types(where)[-2:] == ["run.finished", "run.failed"]
    assert len(clock.slept) == 8 and commits(where) == 0
    server = serve(WHOLE[2:])
    accepted(where, resume(where, author()))
    assert len(server.bodies) == 3


@pytest.mark.parametrize("chunked", [True, False], ids=["broken", "closed"])
def test_a_stream_cut_in_a_tool_call_is_asked_again_and_not_run(
    where: Workspace, serve: Serve, clock: Clock, chunked: bool
) -> None:
    from server import events

    length = len(b"".join(events(WRITE, 0)))
    cut = replace(WRITE, cut=length // 2, chunked=chunked)
    serve([*WHOLE[:2], cut, *WHOLE[2:]])
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert types(where, "candidate.saved") == ["candidate.saved"] * 2
    failed = [event.data for event in log_of(where) if event.type == "request.failed"]
    assert len(failed) == 1 and failed[0]["usage"]["input_tokens"] == 100
    assert failed[0]["usd"] > Decimal(100 * 4) / 10**6  # the prompt, and some of the answer


def test_an_error_inside_a_stream_is_asked_again(
    where: Workspace, serve: Serve, clock: Clock
) -> None:
    class Overloaded(Reply):
        pass

    import server as scripted

    reply = Overloaded()
    plain = scripted.events
    bad = b'event: error\ndata: {"type": "error", "error": {"type": "overloaded_error", "message": "no"}}\n\n'
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(
            scripted, "events",
            lambda r, n: iter([next(plain(r, n)), bad]) if r is reply else plain(r, n),
        )  # fmt: skip
        serve([reply, *WHOLE])
        accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert "overloaded" in next(
        e.data["error"] for e in log_of(where) if e.type == "request.failed"
    )


def test_malformed_tool_input_is_asked_again(where: Workspace, serve: Serve, clock: Clock) -> None:
    broken = Reply([call("check", '{"level": "static" oops', "c0")])
    listed = Reply([call("check", '["static"]', "c0")])
    serve([*WHOLE[:1], broken, listed, *WHOLE[1:]])
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert types(where, "request.failed") == ["request.failed"] * 2


def test_input_that_does_not_fit_is_an_error_result(where: Workspace, serve: Serve) -> None:
    calls = [call("check", {"level": "deep"}, "a"), call("check", {"lvl": "static"}, "b")]
    server = serve([Reply(calls), *WHOLE])
    accepted(where, generate(where, author()))
    first, second = results(server.requests()[1])
    assert first["is_error"] and "level: Input should be 'static'" in first["content"]
    assert second["is_error"] and "lvl: Extra inputs are not permitted" in second["content"]


def test_an_unknown_tool_is_an_error_result(where: Workspace, serve: Serve) -> None:
    server = serve([Reply([call("chek", {}, "a")]), *WHOLE])
    accepted(where, generate(where, author()))
    (result,) = results(server.requests()[1])
    assert result["is_error"] and "no tool named 'chek' (did you mean check?)" in result["content"]


def test_a_refusal_is_a_clean_stop_and_resumes(where: Workspace, serve: Serve) -> None:
    details = {"type": "refusal", "category": "cyber", "explanation": "looks like malware"}
    refusal = Reply([text("I")], stop_reason="refusal", details=details)
    serve([WHOLE[0], refusal])
    with pytest.raises(Stopped, match="the model refused: looks like malware"):
        generate(where, author())
    server = serve(WHOLE[1:])
    accepted(where, resume(where, author()))
    assert server.requests()[0]["messages"][-1]["role"] == "user"  # the refusal is not in it


def test_a_refusal_goes_to_the_fallback(where: Workspace, serve: Serve) -> None:
    refusal = Reply([], stop_reason="refusal", details={"type": "refusal", "category": None})

    def script(body: JsonObject, number: int) -> Reply:
        if body["model"] == MODEL and len(body["messages"]) == 3:
            return refusal
        done = sum(message["role"] == "assistant" for message in body["messages"])
        return replace(WHOLE[done], model=body["model"])

    server = serve(script)
    accepted(where, generate(where, author(Options(fallback="claude-sonnet-5-5"))))
    models = [request["model"] for request in server.requests()]
    assert models == [MODEL, MODEL, "claude-sonnet-5-5", MODEL, MODEL, MODEL]


def test_a_server_that_may_asks_the_fallback_itself(where: Workspace, serve: Serve) -> None:
    """What the declining model thought and called is neither run nor sent back."""
    other = "claude-sonnet-5-5"
    seam = {"type": "fallback", "from": {"model": MODEL}, "to": {"model": other},
            "trigger": {"type": "refusal", "category": None}}  # fmt: skip
    thinking = {"type": "thinking", "thinking": "Hm", "signature": "c2ln"}
    declined = [thinking, text("First."), call("give_up", {"reason": "x"}, "g")]
    served = [seam, thinking, *WRITE_WRONG.content[1:]]
    counts = {"input_tokens": 1000, "output_tokens": 100}
    billed = [{"type": "message", "model": MODEL, **counts},
              {"type": "fallback_message", "model": other, **counts}]  # fmt: skip
    first = Reply([*declined, *served], model=other, usage={"iterations": billed})
    server = serve([first, *WHOLE[1:]])
    info = {"type": "model", "id": MODEL, "allowed_fallback_models": ["claude-opus-5", other]}
    server.infos = [(200, info)]
    accepted(where, generate(where, author(Options(fallback=other))))
    for request, headers in zip(server.requests(), server.headers, strict=True):
        assert request["fallbacks"] == [{"model": other}] and request["model"] == MODEL
        assert "server-side-fallback-2026-07-01" in headers["anthropic-beta"]
        assert "fallback-credit" not in headers["anthropic-beta"]  # the SDK's own
    assert server.requests()[1]["messages"][1]["content"] == [text("First."), *served]
    (usd, *_) = [event.usd for event in log_of(where) if isinstance(event, Responded)]
    assert usd is not None and math.isclose(usd, 1000 * (4e-6 + 2e-6) + 100 * (20e-6 + 10e-6))


def test_a_fallback_that_the_server_does_not_take_is_the_sdks(
    where: Workspace, serve: Serve
) -> None:
    server = serve(WHOLE)
    info = {"type": "model", "id": MODEL, "allowed_fallback_models": ["claude-opus-5"]}
    server.infos = [(200, info)]
    accepted(where, generate(where, author(Options(fallback="claude-sonnet-5-5"))))
    assert all("fallbacks" not in request for request in server.requests())
    assert all("fallback-credit" in headers["anthropic-beta"] for headers in server.headers)


def test_max_tokens_inside_a_tool_call_runs_nothing(where: Workspace, serve: Serve) -> None:
    """The first of two calls is complete, but the turn was cut: neither is run."""
    cut = Reply(
        [call("write_candidate", {"text": WRONG}, "a"), call("submit", "{", "b")],
        stop_reason="max_tokens",
    )
    server = serve([cut, *WHOLE])
    accepted(where, generate(where, author()))
    first, second = results(server.requests()[1])
    assert first["is_error"] and second["is_error"] and "cut off (max_tokens)" in second["content"]
    assert types(where).index("tool.started") > types(where).index("turn")


def test_unsigned_thinking_and_empty_text_are_not_sent_back(where: Workspace, serve: Serve) -> None:
    cut = Reply([text(""), {"type": "thinking", "thinking": "Hm"}], stop_reason="max_tokens")
    server = serve([cut, *WHOLE])
    accepted(where, generate(where, author()))
    roles = [message["role"] for message in server.requests()[1]["messages"]]
    assert roles == ["user", "user"]


def test_a_full_context_is_compacted_by_the_server(where: Workspace, serve: Serve) -> None:
    full = Reply([text("so far")], stop_reason="model_context_window_exceeded")
    compaction = {"type": "compaction", "content": "what was done so far"}
    compacted = replace(WHOLE[0], content=[compaction, *WHOLE[0].content])
    server = serve([full, compacted, *WHOLE[1:]])
    accepted(where, generate(where, author()))
    sent = server.requests()
    edit = sent[0]["context_management"]["edits"][0]
    assert edit["type"] == "compact_20260112" and edit["trigger"]["value"] == 120_000
    assert sent[2]["messages"][3]["content"][0] == compaction


def test_a_context_that_stays_full_is_a_clean_end(where: Workspace, serve: Serve) -> None:
    full = Reply([text("so far")], stop_reason="model_context_window_exceeded")
    serve([WHOLE[0], full, full])
    outcome = generate(where, author())
    assert not outcome.passed and outcome.reason and "context window is full" in outcome.reason


def test_two_calls_at_once_are_run_in_order_and_answered_together(
    where: Workspace, serve: Serve
) -> None:
    both = Reply(
        [call("write_candidate", {"text": RIGHT}, "a"), call("check", {"level": "static"}, "b")]
    )
    server = serve([both, SUBMIT])
    accepted(where, generate(where, author()))
    assert [result["tool_use_id"] for result in results(server.requests()[1])] == ["a", "b"]
    assert "passed" in results(server.requests()[1])[1]["content"]


def test_a_stall_of_forty_minutes_is_asked_again(
    where: Workspace, serve: Serve, clock: Clock
) -> None:
    """The server pings, so that the connection is alive, and says nothing."""

    def stall(number: int) -> None:
        clock.now += 2400.0 * (number == 3)

    serve([replace(WHOLE[0], pings=5, before=stall), *WHOLE])
    who = author(Options(budget=Budget(minutes=120)), clock=clock, sleep=clock.sleep)
    accepted(where, generate(where, who))
    (failed,) = (event.data for event in log_of(where) if event.type == "request.failed")
    assert "no answer before the deadline" in failed["error"]


def test_a_spend_limit_is_a_clean_stop_and_resumes(
    where: Workspace, serve: Serve, clock: Clock
) -> None:
    limit = error(
        429, "rate_limit_error", "You have reached your limit.",
        details={"error_code": "enforced_spend_limit_reached"},
    )  # fmt: skip
    server = serve([WHOLE[0], limit])
    with pytest.raises(Stopped, match="You have reached your limit"):
        generate(where, author(clock=clock, sleep=clock.sleep))
    assert clock.slept == [] and len(server.bodies) == 2
    serve(WHOLE[1:])
    accepted(where, resume(where, author()))


def test_attempts_that_fail_are_paid_from_the_same_budget(
    where: Workspace, serve: Serve, clock: Clock
) -> None:
    """Streams that break after a costly prompt: no attempt is made that might not be paid for."""
    usage = {
        "cache_creation_input_tokens": 14_000,
        "cache_creation": {"ephemeral_1h_input_tokens": 14_000},
    }
    broken = Reply([text("x" * 3000)], usage=usage, cut=1500)
    server = serve(lambda body, number: broken)
    who = author(Options(budget=Budget(usd=1.0)), clock=clock, sleep=clock.sleep)
    with pytest.raises(Stopped, match="no money for another attempt"):
        generate(where, who)
    assert 3 <= len(server.bodies) < 9
    assert 0.5 < spent_usd(where) <= 1.0


def test_a_call_that_nobody_saw_answered_is_taken_to_have_cost_the_worst(
    where: Workspace, serve: Serve
) -> None:
    serve(WHOLE)
    generate(where, author())
    log = log_of(where)
    asked = [event for event in log if isinstance(event, Requested)][2]
    state = RunState.of(log[: log.index(asked) + 1])
    before, reserved = state.spent.usd, asked.worst_usd
    assert before and reserved
    for _ in range(2):  # the second resumption finds nothing set aside
        state.apply(RunResumed(time=asked.time))
        assert state.spent.usd == pytest.approx(before + reserved)


def test_the_worst_case_covers_a_fallback_and_a_summary(serve: Serve) -> None:
    serve([])
    who = author(Options(fallback="claude-sonnet-5-5"))
    talk, state = Conversation(), RunState(time=datetime.now(UTC))
    edit = {"trigger": {"type": "input_tokens", "value": 120_000}}
    talk.request = {"max_tokens": 20_000, "context_management": {"edits": [edit]}}
    talk.context = 50_000
    one = 50_000 * 8e-6 + 20_000 * 20e-6 + 50_000 * 4e-6 + 20_000 * 10e-6
    usage, usd = who.purse.worst(state, talk, 20_000)
    assert tokens(usage) == 140_000 and usd == pytest.approx(one)
    talk.context = 120_000
    usage, usd = who.purse.worst(state, talk, 20_000)
    both = 120_000 * 12e-6 + 8_000 * 30e-6 + 8_000 * 12e-6 + 20_000 * 30e-6
    assert tokens(usage) == 2 * (128_000 + 28_000) and usd == pytest.approx(both)


def test_what_the_cache_has_is_priced_so_while_it_has_it() -> None:
    talk = Conversation()
    start = datetime(2026, 11, 1, tzinfo=UTC)
    written = {"input_tokens": 2, "cache_creation_input_tokens": 9000, "output_tokens": 500}
    more = {"input_tokens": 2, "cache_read_input_tokens": 9000, "output_tokens": 500,
            "cache_creation_input_tokens": 600}  # fmt: skip
    text = [{"type": "text", "text": "x"}]
    for usage in (written, more):
        talk.apply(Responded(time=start.isoformat(), content=text, usage=usage, usd=0.0))
    now = [talk.cached(start + timedelta(seconds=s)) for s in (0, 239, 241, 3299, 3301)]
    assert now == [9600, 9600, 9002, 9002, 0]
    assert math.isclose(Prices("claude-opus-5-5").worst(10_000, 1000, cached=9600), 0.02392)


class Thinker:
    """A model that uses every answer's whole length, by a server with a cache and summaries."""

    def __init__(self) -> None:
        self.cached, self.prompt = 0, 7000

    def __call__(self, body: JsonObject, number: int) -> Reply:
        """The prompt is the one before, the answer to it and its results."""
        results = json.dumps(body["messages"][-1]["content"], ensure_ascii=False)
        most, prompt = body["max_tokens"], self.prompt + len(results) // 4
        used = {"input_tokens": 0, "output_tokens": most, "cache_read_input_tokens": self.cached,
                "cache_creation_input_tokens": prompt - self.cached}  # fmt: skip
        content = [call("read_primitive", {"name": "exp"}, f"c{number}")]
        (edit,) = body["context_management"]["edits"]
        usage = {**used, "iterations": [{**used, "type": "message"}]}
        if prompt > edit["trigger"]["value"]:
            content = [{"type": "compaction", "content": "so far"}, *content]
            first = {**used, "type": "compaction", "output_tokens": 2000}
            prompt = 11_000
            last = {**used, "type": "message", "cache_read_input_tokens": 9000,
                    "cache_creation_input_tokens": 2000}  # fmt: skip
            usage = {**last, "iterations": [first, last]}
        self.cached, self.prompt = prompt, prompt + most
        return Reply(content, usage=usage, model=body["model"])


@pytest.mark.parametrize("cap", [1.0, 3.0])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.one_in(3)
def test_a_model_can_use_its_cap(where: Workspace, serve: Serve, model: str, cap: float) -> None:
    """Nine tenths at least and never more, up to a last turn that it is told of."""
    server = serve(Thinker())
    server.model = model
    options = Options(model=model, budget=Budget(usd=cap, answer=64_000))
    outcome = generate(where, author(options))
    assert str(outcome.reason).startswith(f"budget: ${cap:.2f};")
    assert 0.9 * cap <= spent_usd(where) <= cap
    sent = server.requests()
    assert min(body["max_tokens"] for body in sent) >= 4000
    assert "This is your last turn" in sent[-1]["messages"][-1]["content"][-1]["text"]
    assert types(where, "limit") == ["limit"]


def test_a_budget_too_small_for_two_calls_spends_nothing(where: Workspace, serve: Serve) -> None:
    server = serve(WHOLE)
    outcome = generate(where, author(Options(budget=Budget(usd=0.2))))
    assert not outcome.passed and server.bodies == []


def test_the_last_turn_may_submit_and_nothing_else(where: Workspace, serve: Serve) -> None:
    last = Reply([call("list_demos", {}, "x"), call("submit", {}, "s")])
    server = serve([WRITE, last])
    accepted(where, generate(where, author(Options(budget=Budget(steps=2)))))
    told = server.requests()[1]["messages"][-1]["content"]
    assert told[0]["type"] == "tool_result" and "2 steps" in told[1]["text"]
    refused = [e.data for e in log_of(where) if e.type == "tool.finished" and e.data["id"] == "x"]
    assert refused[0]["text"] == "not run: the last turn"


def test_the_best_candidate_outlives_the_budget(where: Workspace, serve: Serve) -> None:
    serve([WRITE, CHECK_2, WRITE_WRONG, CHECK_1])
    outcome = generate(where, author(Options(budget=Budget(steps=4))))
    assert outcome.reason == "budget: 4 steps"
    assert (run_of(where).folder / "best.py").read_text() == RIGHT
    assert log_of(where)[-1].data["best"]["check"] == "interpret"
    # More budget, and it goes on where it was.
    server = serve([WRITE, SUBMIT])
    accepted(where, resume(where, author(Options(budget=Budget(steps=20)))))
    assert len(server.requests()[0]["messages"]) == 9


@pytest.mark.parametrize(
    ("budget", "reply", "why"),
    [
        (Budget(failures=3), Reply([call("check", {"level": "static"}, "x")]), "3 results in a row"),
        (Budget(), Reply([text("I think about it.")], stop_reason="end_turn"), "3 turns without a call"),
        (Budget(tokens=200_000), Reply([call("list_demos", {}, "x")], usage={"input_tokens": 30_000}), "200000 tokens"),
        (Budget(minutes=0), Reply([call("list_demos", {}, "x")]), "0 minutes"),
    ],
)  # fmt: skip
def test_every_budget_ends_cleanly(
    where: Workspace, serve: Serve, budget: Budget, reply: Reply, why: str
) -> None:
    def script(body: JsonObject, number: int) -> Reply:
        blocks = [
            {**block, "id": f"t{number}"} if "id" in block else block for block in reply.content
        ]
        return replace(reply, content=blocks)

    serve(script)
    outcome = generate(where, author(Options(budget=budget)))
    assert not outcome.passed and why in str(outcome.reason)
    assert types(where)[-1] == "run.finished"


def test_giving_up_ends_the_run(where: Workspace, serve: Serve) -> None:
    serve([Reply([call("give_up", {"reason": "needs two GEMMs"}, "g")])])
    outcome = generate(where, author())
    assert (outcome.passed, outcome.reason) == (False, "gave up: needs two GEMMs")


def test_the_key_is_nowhere_but_in_the_request(
    where: Workspace, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Neither an error that quotes it, nor an author that repeats it, brings it to disk or to a
    child process."""
    leak = Reply([text(f"The key is {KEY}."), call("write_candidate", {"text": f"# {KEY}\n"}, "k")])
    big = Reply([call("read_primitive", {"name": KEY}, "p")])
    server = serve([error(500, "api_error", f"bad key {KEY}"), leak, big, *WHOLE])
    seen: list[str] = []
    plain = subprocess.Popen.__init__

    def watched(self: Any, *args: Any, **kwargs: Any) -> None:
        seen.append(str(dict(os.environ if kwargs.get("env") is None else kwargs["env"])))
        plain(self, *args, **kwargs)

    monkeypatch.setattr(subprocess.Popen, "__init__", watched)
    clock = Clock()
    accepted(where, generate(where, author(clock=clock, sleep=clock.sleep)))
    assert len(seen) > 5 and not any(KEY in environment for environment in seen)
    assert {headers["authorization"] for headers in server.headers} == {f"Bearer {KEY}"}
    files = [path for path in where.root.rglob("*") if path.is_file()]
    assert len(files) > 10
    assert [path for path in files if KEY.encode() in path.read_bytes()] == []
    objects = where.git("cat-file", "--batch-check", "--batch-all-objects").splitlines()
    assert not any(KEY in where.git("cat-file", "-p", line.split()[0]) for line in objects)
    assert "<ANTHROPIC_API_KEY>" in (run_of(where).folder / "events.jsonl").read_text()


def test_a_resumed_run_sends_what_the_interrupted_one_would_have(
    where: Workspace, serve: Serve, tmp_path: Path
) -> None:
    """Interrupted after each reply in turn, the requests of both processes together are those of
    a run that was not interrupted, byte for byte."""
    from bench import make_workspace

    whole = serve(WHOLE)
    generate(where, author())
    expected = [json.loads(body) for body in whole.bodies]
    for stop in range(1, len(WHOLE)):
        place = make_workspace(tmp_path / str(stop))

        def interrupted(body: JsonObject, number: int, stop: int = stop) -> Reply:
            return WHOLE[number] if number < stop else error(400, "invalid_request_error")

        first = serve(interrupted)
        with pytest.raises(Stopped):
            generate(place, author())
        second = serve(WHOLE[stop:])
        accepted(place, resume(place, author()))
        sent = [json.loads(body) for body in [*first.bodies[:-1], *second.bodies]]
        assert first.bodies[-1] == second.bodies[0]
        for one, other in zip(sent, expected, strict=True):
            assert _without_digits(one) == _without_digits(other)


def _without_digits(request: JsonObject) -> str:
    return re.sub(r"\d+\.\d+ s|[0-9a-f]{12}", "", json.dumps(request))


@pytest.mark.slow
def test_a_run_of_five_hundred_steps_is_quick_and_flat(where: Workspace, serve: Serve) -> None:
    """Our overhead is below 50 ms of processor time a step, the server's share in this process
    included; memory grows by no more than the messages do."""
    marks: list[tuple[float, int]] = []

    def script(body: JsonObject, number: int) -> Reply:
        pages = int(Path("/proc/self/statm").read_text().split()[1])
        marks.append((time.process_time(), pages * os.sysconf("SC_PAGE_SIZE")))
        tips = call("search_tips", {"query": "nothing"}, f"t{number}")
        return Reply([tips], usage={"input_tokens": 1})

    serve(script).keep = False
    budget = Budget(steps=501, usd=1e6, tokens=10**12, failures=10**6)
    outcome = generate(where, author(Options(budget=budget)))
    assert outcome.reason == "budget: 501 steps" and len(marks) == 501
    (start, before), (end, after) = marks[100], marks[500]
    print(f"{1e3 * (end - start) / 400:.1f} ms and {(after - before) / 400:.0f} bytes a step")
    assert (end - start) / 400 < 0.05
    assert after - before < 8_000_000


def test_without_a_key_there_are_ways_on(where: Workspace, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.setattr(KEYS, "_held", {})
    with pytest.raises(CodaError) as caught:
        author()
    said = str(caught.value)
    assert "\n" not in said and "composer" in said and "MCP" in said


def test_a_model_that_is_not_there_names_those_that_are(where: Workspace, serve: Serve) -> None:
    serve([])
    with pytest.raises(CodaError, match=f"no model claude-haiku-4-5 \\(known: {MODEL}\\)"):
        generate(where, author(Options(model="claude-haiku-4-5")))


def test_an_unknown_model_needs_a_price() -> None:
    from coda_agent.agent.budget import Price

    with pytest.raises(CodaError, match="--price-in and --price-out"):
        Prices("claude-next")
    for name, new in {
        "claude-sonnet-4-5": "sonnet-5-5", "claude-3-5-sonnet-20241022": "sonnet-5-5",
        "claude-3-opus-latest": "opus-5-5", "opus": "opus-5-5", "haiku": "haiku-5-5",
        "claude-opus-4-1-20250805": "opus-5-5",
    }.items():  # fmt: skip
        with pytest.raises(CodaError, match=f"use claude-{new}, or give"):
            Prices(name)
    for name in ("claude-mythos-5-2", "claude-opus-6"):  # newer than those in the list
        with pytest.raises(CodaError, match=r"not known \(give --price-in"):
            Prices(name)
    assert math.isclose(Prices("claude-next", Price.of(1, 2)).worst(10**6, 10**6), 4.0)
    assert Prices("claude-opus-5-5-20261001").tiers("claude-opus-5-5")[0].output == 20e-6


def test_a_long_prompt_costs_its_tier() -> None:
    prices = Prices("claude-haiku-5-5")
    assert math.isclose(prices.cost({"input_tokens": 100_000, "output_tokens": 0}), 0.01)
    assert math.isclose(prices.cost({"input_tokens": 100_001, "output_tokens": 0}), 0.0500005)


def test_what_is_written_for_an_hour_takes_nothing_off_the_bill() -> None:
    written = {"cache_creation_input_tokens": 0, "output_tokens": 0, "input_tokens": 0}
    usage = {**written, "cache_creation": {"ephemeral_1h_input_tokens": 1000}}
    assert math.isclose(Prices("claude-opus-5-5").cost(usage), 1000 * 8e-6)


def test_the_fold_is_the_state(where: Workspace, serve: Serve) -> None:
    """What the log says and what the server was sent are one conversation."""
    server = serve(WHOLE)
    generate(where, author())
    talk, state = Conversation(), RunState()
    for event in read_events(run_of(where).folder / "events.jsonl"):
        talk.apply(event)
        state.apply(event)
    assert (
        talk.messages[: len(server.requests()[-1]["messages"])] == server.requests()[-1]["messages"]
    )
    assert state.steps == 5 and not talk.owed


def test_the_command_line_counts_generates_and_resumes(
    where: Workspace, serve: Serve, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model, its limits and its cost are said."""
    from typer.testing import CliRunner

    from coda_agent.agent.cli import app

    def run(*args: str) -> Any:
        return CliRunner().invoke(app, list(args))

    monkeypatch.chdir(where.root)
    serve([])
    assert "[12345 tokens, counted]" in run("prompt", "gemm_swiglu").stdout
    cost = run("prompt", "gemm_swiglu", "--cost").stdout
    assert cost.endswith("[tokens counted]\n") and re.search(r"^all  .* 12345$", cost, re.MULTILINE)
    serve([WHOLE[0], error(401, "authentication_error", "bad key")])
    stopped = run(
        "generate", "gemm_swiglu", "--author", "claude", "--device", "cpu", "--max-usd", "4"
    )
    assert stopped.exit_code == 3 and "bad key" in stopped.stderr
    assert f"{MODEL}: at most $4.00, 1000 steps, 120 minutes" in stopped.stdout
    serve(WHOLE[1:])
    done = run("resume", "last")
    assert done.exit_code == 0 and "gemm_swiglu: proved, commit" in done.stdout
    assert "; 5 turns, $0.01 (" in done.stdout
    listed = run("runs").stdout
    assert ("claude" in listed and "accepted" in listed) or "proved" in listed

    monkeypatch.delenv("ANTHROPIC_API_KEY", raising=False)
    monkeypatch.setattr(KEYS, "_held", {})
    refused = run("generate", "gemm_swiglu", "--author", "claude")
    assert refused.exit_code == 2 and len(refused.stderr.strip().splitlines()) == 1
    assert "ANTHROPIC_API_KEY" in refused.stderr and "composer" in refused.stderr
    by_default = run("generate", "gemm_swiglu", "--device", "cpu", "--json")
    assert json.loads(by_default.stdout)["verdict"]["passed"]


def test_limits_are_changed_by_name() -> None:
    changed = Budget().changed(2.5, ["steps=7", "minutes=0.5"])
    assert changed == Budget(usd=2.5, steps=7, minutes=0.5)
    assert Budget().changed(None, []) == Budget()
    for wrong in ("step=7", "steps=x", "steps"):
        with pytest.raises(CodaError, match="is no limit"):
            Budget().changed(None, [wrong])


def test_the_price_is_that_of_the_day() -> None:
    from datetime import date

    def read(day: date) -> float:
        return Prices("claude-sonnet-5-5", day=day).tiers("claude-sonnet-5-5")[0].read

    assert (read(date(2026, 10, 6)), read(date(2026, 10, 7))) == (0.20 / 1e6, 0.10 / 1e6)
    with pytest.raises(CodaError, match="price of claude-sonnet-5-5 is not known"):
        read(date(2026, 9, 27))
