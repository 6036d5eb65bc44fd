"""An answer made of the events of a stream: what the SDK makes of a good one, and no other."""

import json
from typing import Any

import pytest
from broken import BROKEN, LAST, PAIR, START, TEXT, edited
from server import Edit, Reply, Serve, call, text
from server import _events as stream

from coda_agent.agent.authors.claude.answer import Answer, Broken
from coda_agent.agent.judge.records import JsonObject

THINKING = {"type": "thinking", "thinking": "Hm, ünïcode.", "signature": "c2ln"}
REDACTED = {"type": "redacted_thinking", "data": "eA=="}
GOOD = Reply(
    [
        THINKING,
        REDACTED,
        text("First."),
        call("check", {"level": "static"}, "a"),
        call("f", {}, "b"),
    ]
)


def read(events: list[Any], taken: set[str] | None = None) -> Answer:
    answer = Answer(taken or set())
    answer.accepted = True
    for event in events:
        answer.take(event if isinstance(event, str) else json.dumps(event))
    return answer


def test_a_good_stream_is_what_the_sdk_makes_of_it(serve: Serve) -> None:
    from anthropic import Anthropic

    compaction = {"type": "compaction", "content": None}
    delta = {"type": "compaction_delta", "content": "so far", "encrypted_content": "eA=="}

    def compacted(events: list[Any]) -> list[Any]:
        return [*events[:2], {**events[2], "content_block": compaction},
                {"type": "content_block_delta", "index": 0, "delta": delta}, *events[3:]]  # fmt: skip

    reply = Reply([compaction, *GOOD.content], pings=1, edit=compacted, usage={"output_tokens": 7})
    serve([reply])
    with Anthropic().beta.messages.stream(
        model="m", max_tokens=9, messages=[{"role": "user", "content": "Go."}]
    ) as sent:
        expected = sent.get_final_message().to_dict()
    made = read(compacted(list(stream(reply, 0)))).whole()
    assert made["content"] == expected["content"]
    assert made["content"][0] == compaction | delta | {"type": "compaction"}
    keys = ("id", "model", "stop_reason", "usage")
    assert {key: made[key] for key in keys} == {key: expected[key] for key in keys}


@pytest.mark.parametrize("edit", BROKEN.values(), ids=BROKEN)
def test_what_makes_no_sense_is_broken(edit: Edit) -> None:
    with pytest.raises(Broken):
        read(edit(list(stream(PAIR, 0)))).whole()


def test_a_stop_for_a_tool_needs_a_call() -> None:
    with pytest.raises(Broken, match="calls none"):
        read(list(stream(Reply([text("I will.")]), 0))).whole()


def test_two_calls_of_one_answer_have_two_ids() -> None:
    twice = Reply([call("list_demos", {}, "a"), call("submit", {}, "a")])
    with pytest.raises(Broken, match="two calls have one id: a, a"):
        read(list(stream(twice, 0))).whole()


def test_an_id_of_an_earlier_call_is_changed() -> None:
    """Some proxies count the calls of each turn from zero."""
    both = Reply([call("list_demos", {}, "0"), call("submit", {}, "0_")])
    content = read(list(stream(both, 0)), {"0"}).whole()["content"]
    assert [block["id"] for block in content] == ["0_", "0__"]


def test_what_the_api_may_add_is_no_fault() -> None:
    """Events, blocks and deltas of a new kind, and fields; none of it is sent back."""
    news = {"type": "news", "id": "n"}
    reply = Reply([text("First."), news, call("check", {"level": "static"}, "a")])

    def edit(events: list[Any]) -> list[Any]:
        events = edited(TEXT, content_block__citations=None, content_block__extra={"x": 1})(events)
        more = {"type": "content_block_delta", "index": 0, "delta": {"type": "news_delta", "n": 1}}
        other = {**more, "index": 1}
        return [*events[:2], more, *events[2:5], other, {"type": "new", "n": 1}, *events[5:]]

    made = read(edit(list(stream(reply, 0)))).whole()
    assert made["content"] == PAIR.content


def test_what_the_api_would_refuse_is_not_kept() -> None:
    blank, unsigned = text(" \n\n"), {"type": "thinking", "thinking": "Hm"}
    reply = Reply([blank, text(""), unsigned, THINKING], stop_reason="max_tokens")
    assert read(list(stream(reply, 0))).whole()["content"] == [THINKING]


def test_a_cut_turn_keeps_of_an_input_what_is_whole() -> None:
    cut = Reply([call("write", '{"a": 1, "b": "x', "a")], stop_reason="max_tokens")
    (block,) = read(list(stream(cut, 0))).whole()["content"]
    assert block["input"] == {"a": 1}


ZERO = {"cache_read_input_tokens": 0, "cache_creation_input_tokens": 0}


@pytest.mark.parametrize(
    ("start", "end", "used"),
    [
        ({"input_tokens": 5, "output_tokens": 1}, {"output_tokens": 7},
         {"input_tokens": 5, "output_tokens": 7}),
        ({"input_tokens": 5, "output_tokens": 1}, {"output_tokens": 7, "input_tokens": 6},
         {"input_tokens": 6, "output_tokens": 7}),
        ({}, {"output_tokens": 7, "input_tokens": 6}, {"input_tokens": 6, "output_tokens": 7}),
        ({"input_tokens": 5, "output_tokens": 1}, {"output_tokens": 7, "input_tokens": None},
         {"input_tokens": 5, "output_tokens": 7}),
        ({"input_tokens": 5, "output_tokens": 1}, {}, None),
        ({"input_tokens": 5, "output_tokens": 1}, {"output_tokens": None}, None),
        ({}, {"output_tokens": 7}, None),
        ({"input_tokens": None}, {"output_tokens": 7}, None),
        *(({"input_tokens": 5}, {"output_tokens": wrong}, None)
          for wrong in (-7, "7", 7.5, True, 10**10, 10**400, [7])),
        *(({"input_tokens": 5, **wrong}, {"output_tokens": 7}, None) for wrong in (
            {"cache_read_input_tokens": -1}, {"cache_creation_input_tokens": "x"},
            {"cache_creation": {"ephemeral_1h_input_tokens": -1}}, {"cache_creation": 5},
            {"iterations": 5}, {"iterations": [{}]},
            {"iterations": [{"input_tokens": -1, "output_tokens": 1}]})),
    ],
)  # fmt: skip
def test_a_bill_is_known_or_it_is_not(
    start: JsonObject, end: JsonObject, used: JsonObject | None
) -> None:
    events = list(stream(PAIR, 0))
    events[START]["message"]["usage"], events[LAST]["usage"] = start, end
    answer = read(events)
    assert answer.whole()["usage"] == answer.used()
    found = answer.used()
    assert (found and {key: found[key] for key in used or {}}) == used


def test_the_bill_of_half_an_answer() -> None:
    events = list(stream(Reply([text("x" * 300)]), 0))
    assert Answer(set()).used() == {}  # the server refused
    assert read([]).used() is None and read([{"type": "ping"}]).used() is None
    assert read([{"type": "error"}]).used() == {}
    assert read(events[:1]).used() == {**ZERO, "input_tokens": 100, "output_tokens": 1}
    whole_text = read(events[:-2]).used()
    assert whole_text == {**ZERO, "input_tokens": 100, "output_tokens": 100}
    assert read([*events[:-2], {"type": "error"}]).used() == whole_text
    assert read(events[:-1]).used() == {**ZERO, "input_tokens": 100, "output_tokens": 50}
