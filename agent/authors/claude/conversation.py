"""The conversation with a model, as a run's events tell it.

Live and after a kill it is built by the same code from the same events, so that a resumed run sends
what the interrupted one would have sent, byte for byte. The list of messages only ever grows at its
end: what was sent once is a prefix of what is sent next, which is what the prompt cache needs.
"""

import hashlib
import json
from datetime import datetime

from coda_agent.agent import events as e
from coda_agent.agent.budget import cached, context, tokens
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.state import Spent

CUT = (
    "not run: your turn was cut off ({why}), so this call may be incomplete. "
    "Take a shorter step: fewer calls, less text."
)
INTERRUPTED = (
    "interrupted: this call did not finish. It may have had its effect; look before you repeat it."
)
SHORT_S, LONG_S = 240.0, 3300.0
"""Seconds that the cache keeps the tail of a conversation, and its opening: five minutes and an
hour, less some for the way."""


class Conversation:
    """What was said, and what is still owed an answer.

    Attributes:
        request: The parameters of every call but for `messages`; None before the first.
        messages: The history.
        calls: The tool calls of the last turn, by id, in order.
        results: Their results so far.
        started: Calls that were begun.
        open: Whether the last turn of the model still needs ours.
        limit: The budget that was reached. `told` says whether the model knows; its next turn is
            then the last.
        ended: Whether that last turn was taken.
        opening: The tokens of what every call starts with.
        spent: Dollars and tokens of its calls.
        reserved: Dollars set aside for its call that is under way.
        gave_up: Its last word, where that was to give up.
        candidate: What it has for one.
    """

    def __init__(self) -> None:
        self.request: JsonObject | None = None
        self.messages: list[JsonObject] = []
        self.calls: dict[str, JsonObject] = {}
        self.results: dict[str, JsonObject] = {}
        self.started: set[str] = set()
        self.open = False
        self.stop_reason = ""
        self.limit: str | None = None
        self.told = self.ended = False
        self.context = self.new_characters = 0
        self._cached = self.opening = 0
        self._answered = ""
        self.idle = self.failures = self.overflows = 0
        self._digest = hashlib.sha256()
        self.spent = Spent()
        self.reserved: float | None = 0.0
        self.gave_up, self.candidate = "", ""

    def apply(self, event: e.Event) -> None:
        """Take the next event."""
        match event:
            case e.Prompted():
                self.__init__()
                self.request, self.new_characters = event.request, event.characters
                self._digest.update(json.dumps(self.request).encode())
                for message in event.messages:
                    self._say(message["role"], message["content"])
            case e.Requested():
                self.reserved = event.worst_usd
            case e.RequestFailed():
                self.spent = self.spent.plus(usd=event.usd, tokens=tokens(event.usage))
            case e.Responded():
                self.spent = self.spent.plus(usd=event.usd, tokens=tokens(event.usage))
                self.reserved = 0.0
                self._response(event)
            case e.CandidateSaved():
                self.candidate = event.text
            case e.GaveUp():
                self.gave_up = event.reason
            case e.ToolStarted(id=id) if id in self.calls:
                self.started.add(id)
            case e.ToolFinished(id=id) if id in self.calls:
                self._answer(id, event.text, ok=event.ok)
                good = event.ok and event.facts.get("passed", True)
                self.failures = 0 if good else self.failures + 1
            case e.LimitReached():
                self.limit = event.reason
            case e.Turned():
                self._turn(event.note)
            case e.RunFinished():
                self.reserved = 0.0
            case e.RunResumed():  # with a budget that may be larger
                self.spent = self.spent.plus(usd=self.reserved)
                self.reserved = 0.0
                self.limit, self.told, self.ended = None, False, False
                self.idle = self.failures = self.overflows = 0
            case _:
                pass

    @property
    def over(self) -> bool:
        """Whether nobody goes on with it: it gave up, or its model refuses."""
        return bool(self.gave_up) or self.stop_reason == "refusal"

    @property
    def owed(self) -> list[JsonObject]:
        """The calls without a result, in order."""
        return [call for id, call in self.calls.items() if id not in self.results]

    def cached(self, now: datetime) -> int:
        """The tokens of what is sent next that the cache still has."""
        if not self._cached:
            return 0
        age_s = (now - datetime.fromisoformat(self._answered)).total_seconds()
        opening = min(self.opening, self._cached)
        return self._cached if age_s < SHORT_S else opening if age_s < LONG_S else 0

    @property
    def digest(self) -> str:
        """The SHA-256 of what is sent next: parameters and messages."""
        return self._digest.hexdigest()

    def _say(self, role: str, content: list[JsonObject]) -> None:
        message = {"role": role, "content": content}
        self.messages.append(message)
        self._digest.update(json.dumps(message).encode())

    def _response(self, event: e.Responded) -> None:
        content, why = event.content, event.stop_reason
        self.stop_reason, self.ended = why, self.told
        self.calls = {block["id"]: block for block in content if block["type"] == "tool_use"}
        self.results, self.started = {}, set()
        # A pause is answered by sending it back, unless calls in it are owed a result.
        self.open = bool(self.calls) or why not in ("pause_turn", "refusal")
        self.idle = 0 if why == "tool_use" else self.idle + 1
        if content:
            self.context, self.new_characters = context(event.usage), 0
            self._cached, self._answered = cached(event.usage), event.time
            self.opening = self.opening or self.context - (event.usage.get("output_tokens") or 0)
            self._say("assistant", content)
        if why == "model_context_window_exceeded":
            self.overflows += 1
        elif any(block["type"] == "compaction" for block in content):
            self.overflows = 0
        if why != "tool_use":
            for id in self.calls:
                self._answer(id, CUT.format(why=why), ok=False)

    def _answer(self, id: str, text: str, *, ok: bool) -> None:
        result = {"type": "tool_result", "tool_use_id": id, "content": text}
        self.results[id] = result if ok else {**result, "is_error": True}

    def _turn(self, note: str) -> None:
        content = [self.results[id] for id in self.calls]
        if note:
            content.append({"type": "text", "text": note})
        self._say("user", content)
        self.new_characters = sum(len(block.get("content") or note) for block in content)
        self.calls, self.results, self.started, self.open = {}, {}, set(), False
        self.told = self.limit is not None
