"""Ways in which a stream makes no sense, as changes of the events of `PAIR`."""

import copy
import math
from typing import Any

from server import Edit, Reply, call, text


def edited(where: int, **changes: object) -> Edit:
    """The events with fields of one of them changed; a field that is ... is taken out."""

    def edit(events: list[Any]) -> list[Any]:
        events = copy.deepcopy(events)
        event = events[where]
        for path, value in changes.items():
            *outer, last = path.split("__")
            inner = event
            for key in outer:
                inner = inner[key]
            if value is ...:
                del inner[last]
            else:
                inner[last] = value
        return events

    return edit


def moved(start: int, end: int, to: int) -> Edit:
    """The events with a slice of them elsewhere; `to` counts in what is left."""
    return lambda events: [
        *(rest := events[:start] + events[end:])[:to],
        *events[start:end],
        *rest[to:],
    ]


# A reply with a text and a call: start, [start, delta, stop], [start, delta, stop], delta, stop.
PAIR = Reply([text("First."), call("check", {"level": "static"}, "a")])
START, TEXT, DELTA, CALL, INPUT, LAST, END = 0, 1, 2, 4, 5, 7, 8
DEEP = '{"level": ' + "[" * 5000 + "]" * 5000 + "}"

BROKEN: dict[str, Edit] = {
    "nothing": lambda events: [],
    "no start": lambda events: events[1:],
    "two starts": lambda events: [events[0], *events],
    "a start in the middle": moved(START, 1, 3),
    "a delta before its block": moved(DELTA, 3, 1),
    "a delta after its block": moved(DELTA, 3, 3),
    "a block in a block": moved(3, 4, 5),
    "a block left open": lambda events: events[:3] + events[4:],
    "a block twice": lambda events: events[:4] + events[1:],
    "a block after the delta of the message": moved(LAST, 8, 1),
    "a gap in the indices": edited(CALL, index=2),
    "an index that is no number": edited(CALL, index="1"),
    "a negative index": edited(CALL, index=-1),
    "a delta for another block": edited(INPUT, index=0),
    "no end": lambda events: events[:-1],
    "no delta of the message": lambda events: events[:LAST] + events[END:],
    "a call after the end": moved(CALL, LAST, 5),
    "two ends": lambda events: [*events, events[END]],
    "no usage at the start": edited(START, message__usage=...),
    "null usage at the start": edited(START, message__usage=None),
    "no usage at the end": edited(LAST, usage=...),
    "a count that is not a number": edited(LAST, usage__output_tokens=math.nan),
    "usage that is a list": edited(LAST, usage=[1]),
    "no message": edited(START, message=[]),
    "no delta": edited(DELTA, delta=None),
    "a delta of the wrong kind": edited(DELTA, delta={"type": "thinking_delta", "thinking": "x"}),
    "a delta without its text": edited(DELTA, delta={"type": "text_delta"}),
    "text that is a number": edited(DELTA, delta__text=5),
    "text that starts as a number": edited(TEXT, content_block__text=5),
    "a block without a type": edited(TEXT, content_block__type=...),
    "a call without an id": edited(CALL, content_block__id=...),
    "a call with a null id": edited(CALL, content_block__id=None),
    "an id that the API refuses": edited(CALL, content_block__id="a b"),
    "an empty id": edited(CALL, content_block__id=""),
    "a call without a name": edited(CALL, content_block__name=...),
    "a name that the API refuses": edited(CALL, content_block__name="check\n"),
    "a name of a megabyte": edited(CALL, content_block__name="x" * 2**20),
    "an input that breaks off": edited(INPUT, delta__partial_json='{"level": "sta'),
    "an input that is a list": edited(INPUT, delta__partial_json='["static"]'),
    "an input of two objects": edited(INPUT, delta__partial_json="{}{}"),
    "an input that is null": edited(INPUT, delta__partial_json="null"),
    "an input without end of depth": edited(INPUT, delta__partial_json=DEEP),
    "an input that is not a number": edited(INPUT, delta__partial_json='{"level": NaN}'),
    "an input with half a character": edited(INPUT, delta__partial_json='{"level": "\\ud800"}'),
    "text with half a character": edited(DELTA, delta__text="\ud800"),
    "no stop reason": edited(LAST, delta__stop_reason=None),
    "a stop reason that is a number": edited(LAST, delta__stop_reason=5),
    "details that are a list": edited(LAST, delta__stop_details=["x"]),
    "a message without a model": edited(START, message__model=...),
    "a message whose id is a number": edited(START, message__id=5),
    "an event that is a list": lambda events: [*events[:3], [1], *events[3:]],
    "an event without a type": lambda events: [*events[:3], {}, *events[3:]],
    "an event whose type is a list": lambda events: [*events[:3], {"type": []}, *events[3:]],
    "an event that is no JSON": lambda events: [*events[:3], "{oops", *events[3:]],
    "an event without end of depth": lambda events: [*events[:3], DEEP, *events[3:]],
    "a count without end": lambda events: [events[0], '{"type": "x", "n": ' + "9" * 5000 + "}"],
}  # fmt: skip
