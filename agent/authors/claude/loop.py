"""The Claude author: a model of the Messages API at the workbench.

- The run's events are the only state: `RunState` says what was done and spent, `Conversation` what
  was said, and the loop below only looks at these two. So a run continues after a kill where it
  stood.
- Nothing is spent before the most it can cost is known to fit: the prompt, cached where it is, and
  an answer as long as what is left pays for. Until the last turn the cost of one more short call is
  kept back; the model is told of that turn, and only `last` tools run in it.
- A turn that was cut off is answered, never acted on.
"""

import contextlib
import json
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from functools import partial
from typing import Any, NamedTuple

from coda_agent.agent import events as e
from coda_agent.agent import prompt
from coda_agent.agent.authors import Author, Options
from coda_agent.agent.authors.claude.answer import Broken
from coda_agent.agent.authors.claude.client import Client, Declined, Stopped
from coda_agent.agent.authors.claude.conversation import INTERRUPTED, Conversation
from coda_agent.agent.authors.claude.opening import parameters
from coda_agent.agent.authors.claude.purse import Purse
from coda_agent.agent.budget import Prices
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.keys import KEYS
from coda_agent.agent.workbench import Work, Workbench
from coda_agent.primitives.errors import CodaError

IDLE = (
    "You called no tool. Go on with the work: submit when it is done, or give_up with the reason."
)
CUT = "Your turn was cut off: {why}. Take a shorter step."
LIMIT = (
    "The budget is used up: {reason}. This is your last turn. Only submit, log_tip and give_up "
    "still run: submit the candidate if it is worth it, and log what was learned."
)
NO_KEY = "a model of Anthropic's needs ANTHROPIC_API_KEY, which is not set"
NO_KEY_HINT = (
    "without one: --author composer, or let an agent you have write it over MCP (coda-agent mcp)"
)


class Call(NamedTuple):
    """A call of the model: what is sent, the most that it can take, and when it began.

    Attributes:
        worst: In tokens, as a usage block. `usd` is its price, where that is known.
    """

    request: JsonObject
    worst: JsonObject
    usd: float | None
    start: float


@contextlib.contextmanager
def stops(bench: Workbench) -> Iterator[None]:
    """End the run where its author is stopped, resumable."""
    try:
        yield
    except Stopped as stop:
        bench.finish(str(stop), final=False)
        raise


class Claude(Author):
    """The author.

    Args:
        name: Whose model it is: `claude`, or `messages` for one of another server. That one's price
            may be unknown, and it may need no key.

    Raises:
        CodaError: there is no key, or the model's price is not known.
    """

    def __init__(
        self,
        options: Options,
        *,
        name: str = "claude",
        clock: Callable[[], float] = time.monotonic,
        sleep: Callable[[float], None] = time.sleep,
    ) -> None:
        self.options, self.name = options, name
        self.elsewhere = name != "claude"
        key = KEYS.take() or ({"ANTHROPIC_API_KEY": "none"} if self.elsewhere else {})
        if not key:
            raise CodaError(NO_KEY, hint=NO_KEY_HINT)
        self.prices: Prices | None = None
        if options.price or not self.elsewhere:
            self.prices = Prices(options.model, options.price)
            if options.fallback:
                self.prices.tiers(options.fallback)
        self.client = Client(key, options.fallback, options.base_url, clock, sleep)
        self.in_dollars = self.prices is not None
        self.purse = Purse(options, self.prices)
        self.limits = self.purse.limits()

    def settings(self) -> JsonObject:
        return {"options": asdict(self.options)}

    def work(self, bench: Workbench) -> Work[None]:
        """Work at the bench until the run is over, and end it.

        Raises:
            Stopped: the API cannot be reached, refuses to serve, or is out of money; the run can
                be resumed.
        """
        talk = Conversation()
        bench.log.follow(talk)
        with stops(bench):
            if talk.request is None:
                self.open(bench)
            reason = yield from self.converse(bench, talk)
        bench.finish(reason)

    def converse(self, bench: Workbench, talk: Conversation) -> Work[str | None]:
        """Go on with a conversation to its end; the reason of that."""
        while not (reason := (yield from self.advance(bench, talk))):
            call = self.call(bench, talk)
            if isinstance(call, str):
                return call
            failed = partial(self.failed, bench, talk, call)
            self.book(bench, call, self.client.respond(call.request, self.left_s(bench), failed))
        return reason

    def advance(self, bench: Workbench, talk: Conversation) -> Work[str | None]:
        """Do what comes before the model's next turn; the reason where it has none."""
        for call in [call for call in talk.owed if call["id"] in talk.started]:  # by a kill
            bench.refuse(call["id"], call["name"], INTERRUPTED)
        while True:
            if talk.owed:
                yield from self._run(bench, talk, talk.owed[0])
            elif bench.state.over or talk.gave_up:
                return bench.state.over or f"gave up: {talk.gave_up}"
            elif talk.ended:
                return f"budget: {talk.limit}"
            elif talk.overflows > 1:
                return "the context window is full, and summarising it did not help"
            elif not talk.limit and (limit := self.purse.limit(bench.state, talk)):
                if not talk.stop_reason:
                    return (
                        f"budget: {limit}"  # nothing is spent on a turn that cannot be followed up
                    )
                bench.log.append(e.LimitReached(reason=limit))
            elif talk.open or (talk.limit and not talk.told):
                bench.log.append(e.Turned(note=self._note(bench, talk)))
            else:
                return None

    def _run(self, bench: Workbench, talk: Conversation, call: JsonObject) -> Work[None]:
        known = bench.tools.get(call["name"])
        if talk.ended and known and not known.last:
            bench.refuse(call["id"], call["name"], "not run: the last turn")
        else:
            yield from bench.call(call["name"], call["input"], call["id"])

    def _note(self, bench: Workbench, talk: Conversation) -> str:
        """What follows the results of the model's calls."""
        said = self.purse.said(talk.spent)
        if talk.limit:
            said = LIMIT.format(reason=talk.limit)
        elif not talk.calls:
            said = IDLE if talk.stop_reason == "end_turn" else CUT.format(why=talk.stop_reason)
        return said

    def call(self, bench: Workbench, talk: Conversation) -> Call | str:
        """Begin a call of the model; a reason where that cannot be paid for."""
        state, most = bench.state, self.purse.room(bench.state, talk)
        if not most or state.steps + len(state.under_way) >= self.options.budget.steps:
            return f"budget: {talk.limit}"
        assert talk.request is not None
        worst, most_usd = self.purse.worst(bench.state, talk, most)
        request = {**talk.request, "max_tokens": most, "messages": [*talk.messages]}
        reserved = most_usd and round(most_usd, 4)
        bench.log.append(e.Requested(digest=talk.digest, max_tokens=most, worst_usd=reserved))
        return Call(request, worst, most_usd, time.monotonic())

    def left_s(self, bench: Workbench) -> float:
        """The seconds that are left of the run."""
        return 60 * self.options.budget.minutes - bench.state.spent.wall_s

    def _bill(self, call: Call, usage: JsonObject | None) -> JsonObject:
        # What cannot be known, or priced, was reserved, and is taken to have cost just that.
        with contextlib.suppress(CodaError):
            if usage is not None:
                return {"usage": usage, "usd": self.prices and self.prices.cost(usage)}
        return {"usage": call.worst, "usd": call.usd}

    def failed(
        self, bench: Workbench, talk: Conversation, call: Call, *, error: str,
        wait_s: float | None, usage: JsonObject | None,
    ) -> None:  # fmt: skip
        """Record an attempt that failed, and what the next one may take.

        Raises:
            Stopped: there is no money for it.
        """
        bench.log.append(e.RequestFailed(error=error, wait_s=wait_s, **self._bill(call, usage)))
        call.request["max_tokens"] = self.purse.room(bench.state, talk)
        if wait_s is not None and not call.request["max_tokens"]:
            raise Stopped(f"no money for another attempt: {error}")

    def book(self, bench: Workbench, call: Call, message: JsonObject) -> None:
        """Record the model's answer.

        Raises:
            Declined: the model refused.
        """
        details, refused = message["stop_details"] or {}, message["stop_reason"] == "refusal"
        about: JsonObject = message | self._bill(call, message["usage"])
        about |= {"content": []} if refused else {}
        seconds = round(time.monotonic() - call.start, 3)
        bench.log.append(e.Responded(**about, seconds=seconds))
        if refused:
            said = details.get("explanation") or details.get("category") or "no reason given"
            raise Declined(f"the model refused: {said}")

    def open(self, bench: Workbench, before: str = "") -> None:
        """Check the model and fix what calls start with, `before` included."""
        info = self._model(bench)
        sent = prompt.request(bench.spec, bench.withheld)
        request = parameters(sent, self.purse, info, elsewhere=self.elsewhere)
        told = self.purse.announced(bench.state)
        more = "\n\n".join(part for part in (before, told) if part)
        sent["messages"][0]["content"].append({"type": "text", "text": more})
        characters = len(json.dumps(sent, ensure_ascii=False))
        messages = sent["messages"]
        bench.log.append(e.Prompted(request=request, messages=messages, characters=characters))

    def _model(self, bench: Workbench) -> JsonObject:
        """Ask what the API says about the model."""
        import anthropic

        name, models = self.options.model, self.client.sdk.models

        def failed(**about: Any) -> None:
            bench.log.append(e.RequestFailed(**about, usd=0.0))

        try:
            info = self.client.model(name, 60 * self.options.budget.minutes, failed)
        except Stopped as stop:
            if self.elsewhere and isinstance(stop.__cause__, anthropic.APIStatusError | Broken):
                return {}
            if not isinstance(stop.__cause__, anthropic.NotFoundError):
                raise
            known = ""
            with contextlib.suppress(anthropic.APIError, AttributeError, TypeError):
                known = ", ".join(model.id for model in models.list(limit=20).data)
            raise CodaError(f"no model {name}", hint=known and f"known: {known}") from stop
        if info.get("lifecycle") == "retired":
            raise CodaError(f"the model {name} is retired", hint="choose another with --model")
        return info
