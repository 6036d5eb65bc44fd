"""A run as a log of inspect_ai, one sample, for its viewer.

What is written here is its log format, version 2, as JSON.
"""

import json
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path

from coda_agent.agent import events as e
from coda_agent.agent.authors.claude.samples import Talks
from coda_agent.agent.budget import tokens
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.run_page import changed
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import Run
from coda_agent.primitives.errors import WorkspaceError

Message = JsonObject

_STOPS = {
    "end_turn": "stop", "tool_use": "tool_calls", "max_tokens": "max_tokens",
    "model_context_window_exceeded": "model_length", "refusal": "content_filter",
}  # fmt: skip


def write(run: Run, events: list[e.Event]) -> Path:
    """Write the log beside a run's folder, named as viewers want it.

    Raises:
        WorkspaceError: nothing happened in the run.
    """
    if not events:
        raise WorkspaceError(f"{run.id} has no events")
    when = events[0].time[:19].replace(":", "-")
    parts = when, str(RunState.of(events).spec), run.id
    path = run.folder.parent / f"{'_'.join(part.replace('_', '-') for part in parts)}.json"
    path.write_text(json.dumps(document(run.id, events), ensure_ascii=False), "utf-8")
    return path


def document(name: str, events: list[e.Event]) -> JsonObject:
    """Say a run in inspect_ai's terms."""
    state, told = RunState.of(events), _Told(events[0].time)
    for event in events:
        told.apply(event)
    spec, start, end = str(state.spec), events[0].time, events[-1].time
    model = ",".join(told.usage) or str(state.author)
    stopped = state.failure is not None and state.error == "interrupted"
    ended = "success" if state.finished else "started"
    status = "cancelled" if stopped else "error" if state.failure else ended
    fault = {"message": str(state.error), "traceback": "", "traceback_ansi": ""}
    failed = {"error": fault} if status == "error" else {}
    passed = state.outcome == "passed"
    score = {
        "name": "judge", "scorer": "judge",
        "metrics": {"mean": {"name": "mean", "value": float(passed)}},
    }  # fmt: skip
    prompt = [message for message in told.messages if message["role"] in ("system", "user")]
    sample = {
        "id": spec, "epoch": 1, "input": prompt[:2] or spec, "target": "accepted",
        "messages": told.messages, "events": told.events, "metadata": state.record(),
        "scores": {"judge": _score(passed, state.candidate, told.finding)},
        "output": told.output, "model_usage": told.usage, "started_at": start, "completed_at": end,
        "total_time": state.spent.wall_s, **failed,
    }  # fmt: skip
    return {
        "version": 2, "status": status, **failed,
        "eval": {
            "eval_id": name, "run_id": name, "task_id": name, "created": start, "task": spec,
            "dataset": {"name": "specs", "samples": 1, "sample_ids": [spec]},
            "model": model, "solver": state.author, "config": {}, "metadata": {"run": name},
        },
        "results": {"total_samples": 1, "completed_samples": 1, "scores": [score]},
        "stats": {"started_at": start, "completed_at": end, "model_usage": told.usage},
        "samples": [sample],
    }  # fmt: skip


class _Told:
    """What a run's events say, as messages and as events of inspect_ai."""

    def __init__(self, start: str) -> None:
        self.messages: list[Message] = []
        self.events: list[JsonObject] = []
        self.usage: dict[str, JsonObject] = {}
        self.output: JsonObject = {}
        self.finding = self._candidate = ""
        self._start = datetime.fromisoformat(start)
        self._talks, self._said = Talks(), dict[int, int]()
        self._asked, self._names = JsonObject(), dict[str, str]()

    def apply(self, event: e.Event) -> None:
        """Take the next event."""
        self._talks.apply(event)
        match event:
            case e.Prompted():
                system = [block["text"] for block in event.request.get("system", ())]
                self.messages.append({"role": "system", "content": "\n\n".join(system)})
                self._listened()
            case e.Responded():
                self._responded(event)
            case e.Turned():
                self._listened()
            case e.Switched(number=number):
                self._info(event, event.type, f"conversation {number + 1}")
            case e.ToolStarted():
                self._asked[event.id] = event.input
            case e.ToolFinished():
                self._called(event)
            case e.CandidateSaved():
                shown = f"```diff\n{changed(self._candidate, event.text)}\n```"
                self._info(event, f"candidate {event.digest}", shown)
                self._candidate = event.text
            case e.Judged(judgement=judged):
                self.finding = judged.finding
                score = _score(judged.passed, self._candidate, judged.finding)
                about = {"score": score, "intermediate": True, "scorer": event.check}
                self._happened(event, "score", **about)
            case e.RequestFailed(error=why) | e.LimitReached(reason=why) | e.GaveUp(reason=why):
                self._info(event, event.type, why)
            case e.RunFinished(reason=str(why)) | e.RunFailed(message=why):
                self._info(event, event.type, why)
            case _:
                pass

    def _happened(self, event: e.Event, kind: str, **more: object) -> None:
        since_s = (datetime.fromisoformat(event.time) - self._start).total_seconds()
        about = {"event": kind, "timestamp": event.time, "working_start": since_s}
        self.events.append(about | more)

    def _info(self, event: e.Event, source: str, text: str) -> None:
        self._happened(event, "info", source=source, data=text)

    def _listened(self) -> None:
        """Add what the model was sent by now."""
        talks = self._talks
        for message in talks.present.messages[self._said.get(talks.now, 0) :]:
            self.messages += _of_user(message["content"], self._names)
        self._said[talks.now] = len(talks.present.messages)

    def _responded(self, event: e.Responded) -> None:
        about = _of_model(event)
        self._names |= {call["id"]: call["function"] for call in about["tool_calls"]}
        used, sums = _usage(event), self.usage.setdefault(event.model, {})
        for key, value in used.items():
            sums[key] = sums.get(key, 0) + value
        stop = _STOPS.get(event.stop_reason, "unknown")
        self.output = {
            "model": event.model, "choices": [{"message": about, "stop_reason": stop}],
            "usage": used, "time": event.seconds,
        }  # fmt: skip
        self._happened(
            event, "model", model=event.model, input=[], tools=[], tool_choice="auto", config={},
            output=self.output, working_time=event.seconds,
        )  # fmt: skip
        self.messages.append(about)
        self._said[self._talks.now] = len(self._talks.present.messages)

    def _called(self, event: e.ToolFinished) -> None:
        given = self._asked.pop(event.id, None)
        call: JsonObject = {
            "id": event.id or f"call-{len(self.events)}", "function": event.name,
            "arguments": given if isinstance(given, dict) else {},
        }  # fmt: skip
        error = {} if event.ok else {"error": {"type": "unknown", "message": event.text}}
        self._happened(
            event, "tool", **call, result=event.text, working_time=event.seconds, **error
        )
        if (
            event.id not in self._talks.present.calls
        ):  # of an agent elsewhere, whose words are not known
            self.messages += [
                {"role": "assistant", "content": "", "tool_calls": [call]},
                {"role": "tool", "tool_call_id": call["id"], "function": event.name,
                 "content": event.text, **error},
            ]  # fmt: skip


def _of_model(event: e.Responded) -> Message:
    content = [
        {"type": "text", "text": block["text"]}
        if block["type"] == "text"
        else {"type": "reasoning", "reasoning": block.get("thinking", "")}
        for block in event.content
        if block["type"] in ("text", "thinking")
    ]
    calls = [
        {"id": block["id"], "function": block["name"], "arguments": block["input"]}
        for block in event.content
        if block["type"] == "tool_use"
    ]
    return {"role": "assistant", "content": content, "tool_calls": calls, "model": event.model}


def _of_user(content: list[JsonObject], names: dict[str, str]) -> Iterator[Message]:
    for block in content:
        if block["type"] != "tool_result":
            yield {"role": "user", "content": block.get("text", "")}
            continue
        id, text = block["tool_use_id"], block["content"]
        error = {"error": {"type": "unknown", "message": text}} if block.get("is_error") else {}
        yield {"role": "tool", "tool_call_id": id, "function": names.get(id), "content": text,
               **error}  # fmt: skip


def _usage(event: e.Responded) -> JsonObject:
    named = {
        "input_tokens": "input_tokens", "output_tokens": "output_tokens",
        "input_tokens_cache_read": "cache_read_input_tokens",
        "input_tokens_cache_write": "cache_creation_input_tokens",
    }  # fmt: skip
    found = {ours: event.usage.get(theirs) or 0 for ours, theirs in named.items()}
    cost = {} if event.usd is None else {"total_cost": event.usd}
    return {**found, "total_tokens": tokens(event.usage), **cost}


def _score(passed: bool, answer: str, why: str) -> JsonObject:
    return {"value": "C" if passed else "I", "answer": answer, "explanation": why}
