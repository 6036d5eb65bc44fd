"""A run as a page: all that happened, and its cost."""

import difflib
import json
from collections.abc import Iterable, Iterator

from coda_agent.agent import events as e
from coda_agent.agent.budget import tokens
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.pages import Diff, Fold, Section
from coda_agent.agent.plain import dollars
from coda_agent.agent.state import RunState

_JUDGED = "check", "benchmark", "submit"


def sections(events: Iterable[e.Event]) -> Iterator[Section]:
    """Lay out a run: the end first, then all in order."""
    events = [*events]
    state = RunState.of(events)
    yield "What came of it", [*_end(state)]
    candidate, turn, asked = "", 0, JsonObject()
    told = {x.facts.get("attempt") for x in events if isinstance(x, e.ToolFinished)}
    for event in events:
        match event:
            case e.Prompted():
                yield Fold(f"Prompt, {event.characters} characters"), _texts(event)
            case e.Responded():
                turn += 1
                yield _turn(turn, event), _blocks(event, "text")
                yield Fold("Thought"), _blocks(event, "thinking")
            case e.ToolStarted():
                asked[event.id] = event.input
            case e.CandidateSaved():
                yield f"Candidate {event.digest}", changed(candidate, event.text)
                candidate = event.text
            case e.ToolFinished():
                yield from _call(event, asked.pop(event.id, None))
            case e.Judged(number=number, judgement=judged):
                if judged.finding and number not in told:  # else the call's result says it
                    yield f"Verdict, {event.check}", judged.finding
            case _:
                if said := _said(event):
                    yield said


def changed(before: str, after: str) -> str:
    """Show a candidate as the lines that differ from the last one."""
    if not before:
        return after
    lines = difflib.unified_diff(before.splitlines(), after.splitlines(), lineterm="", n=2)
    return Diff("\n".join([*lines][2:]) or "unchanged")


def _end(state: RunState) -> Iterator[tuple[str, str]]:
    spent = state.spent
    known = {
        "spec": state.spec, "author": state.author, "outcome": state.outcome,
        "level": state.level, "why": state.why or None, "commit": state.commit,
        "turns": state.steps or None, "dollars": dollars(spent.usd) if state.steps else None,
        "tokens": spent.tokens, "seconds": round(spent.wall_s), "attempts": len(state.attempts),
    }  # fmt: skip
    yield from ((name, str(value)) for name, value in known.items() if value is not None)


def _texts(event: e.Prompted) -> str:
    said = [*event.request.get("system", ())]
    said += [block for message in event.messages for block in message["content"]]
    return "\n\n".join(block["text"] for block in said if isinstance(block, dict))


def _turn(number: int, event: e.Responded) -> str:
    usage = event.usage
    out = usage.get("output_tokens") or 0
    read = tokens({**usage, "iterations": None}) - out
    cached = usage.get("cache_read_input_tokens") or 0
    share = f", {cached / read:.0%} by the cache" if read else ""
    said = f"Turn {number}: {event.model}, {read} tokens read{share}, {out} written"
    return f"{said}, {event.seconds:.0f} s, {dollars(event.usd)}, {event.stop_reason}"


def _blocks(event: e.Responded, kind: str) -> str:
    return "\n\n".join(block.get(kind, "") for block in event.content if block["type"] == kind)


def _call(event: e.ToolFinished, given: JsonObject | None) -> Iterator[Section]:
    head = f"{event.name}, {event.seconds:.1f} s" + ("" if event.ok else ", an error")
    if event.name in _JUDGED:
        yield head, event.text
        return
    inputs = {k: v for k, v in (given or {}).items() if k not in ("text", "old", "new")}
    shown = f"{json.dumps(inputs, ensure_ascii=False)}\n\n" if inputs else ""
    first = next((line for line in event.text.splitlines() if line.strip("- ")), "")
    yield Fold(f"{head}: {first[:100]}"), shown + event.text


def _said(event: e.Event) -> Section | None:
    match event:
        case e.RequestFailed():
            return "A call failed", event.error
        case e.LimitReached(reason=reason) | e.GaveUp(reason=reason):
            return {"limit": "A limit", "gave.up": "Given up"}[event.type], reason
        case e.AuthorStarted():
            return "The author", event.author
        case e.Switched():
            return f"Conversation {event.number + 1}", "goes on, or begins"
        case e.RunFailed():
            return "The run failed", f"{event.error}: {event.message}"
        case e.RunFinished(reason=str(reason)):
            return "The end", reason
        case _:
            return None
