"""The Claude author: a model of the Messages API at the workbench, until a kernel is accepted, the
author gives up, or a budget is used up.

- The run's events are the only state: `RunState` says what was done and spent, `Conversation` what
  was said, and the loop below only looks at these two. So a run continues after a kill where it
  stood.
- Nothing is spent before the most it can cost is known to fit: the prompt, cached where it is, and
  an answer as long as what is left pays for. Until the last turn the cost of one more short call is
  kept back; the model is told of that turn, and only `last` tools run in it.
- A turn that was cut off is answered, never acted on.
"""

import bisect
import contextlib
import json
import math
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict
from typing import Any

from coda_agent.agent import events as e
from coda_agent.agent import prompt
from coda_agent.agent.authors import Author, Options
from coda_agent.agent.authors.claude.answer import Broken
from coda_agent.agent.authors.claude.client import Client, Declined, Stopped
from coda_agent.agent.authors.claude.conversation import INTERRUPTED, Conversation
from coda_agent.agent.budget import SHORTEST, UNPRICED, Prices, tokens
from coda_agent.agent.keys import KEYS
from coda_agent.agent.state import Spent
from coda_agent.agent.workbench import Work, Workbench
from coda_agent.primitives.errors import CodaError

COMPACT_AT = 0.6
"""Share of the context window at which the server summarises what came before."""
COMPACT_TIER = 0.8
"""The same, of the length from which on all of a prompt costs more."""
IDLE_TURNS = 3
TASK_BUDGETS = "task-budgets-2026-03-13"
TOLD = frozenset(
    f"claude-{name}" for name in (
        "fable-5-1", "fable-5", "mythos-5-1", "mythos-5", "opus-5-5", "opus-5", "opus-4-8",
        "opus-4-7", "sonnet-5-5", "haiku-5-5",
    )
)  # fmt: skip
"""Models that the documentation lists as seeing a task budget; the API does not say it of one."""
_SUMMARY = 8000
"""Tokens of a summary, at most."""
_RESULTS = 4000
"""Tokens of results, at most, that the call after the next reads beside its answer."""
BETAS = ["context-management-2025-06-27", "compact-2026-01-12"]
_CHARACTERS_PER_TOKEN = 2.0
"""For a worst case; text and code have between three and four."""

BUDGET = (
    "# The budget\n\n{most}; {steps} turns; {minutes:g} minutes. After each turn you are told what "
    "is spent. A candidate that was not submitted when it is used up counts for nothing."
)
IDLE = (
    "You called no tool. Go on with the work: submit when it is done, or give_up with the reason."
)
CUT = "Your turn was cut off: {why}. Take a shorter step."
LIMIT = (
    "The budget is used up: {reason}. This is your last turn. Only submit, log_tip and give_up "
    "still run: submit the candidate if it is worth it, and log what was learned."
)
NO_KEY = "the author claude needs ANTHROPIC_API_KEY, which is not set"
NO_KEY_HINT = (
    "without one: --author composer, or let an agent you have write it over MCP (coda-agent mcp)"
)


@contextlib.contextmanager
def stops(bench: Workbench) -> Iterator[None]:
    """End the run where its author is stopped, so that it can be resumed."""
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
        self.in_dollars, budget = self.prices is not None, options.budget
        self.most_tokens = budget.tokens or (math.inf if self.prices else UNPRICED)
        most = f"${budget.usd:.2f}"
        if not self.prices:
            most = f"{self.most_tokens} tokens (price unknown)"
        self.limits = f"{options.model}: at most {most}, {budget.steps} steps, "
        self.limits += f"{budget.minutes:g} minutes"

    def settings(self) -> dict[str, Any]:
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
        """Go on with a conversation until there is nothing more to do; the reason.

        Raises:
            Stopped: as `work`.
        """
        for call in [call for call in talk.owed if call["id"] in talk.started]:
            bench.refuse(call["id"], call["name"], INTERRUPTED)
        while (reason := (yield from self._step(bench, talk))) is None:
            pass
        return reason

    def _step(self, bench: Workbench, talk: Conversation) -> Work[str | None]:
        """The next thing to do; the reason where there is none."""
        if talk.owed:
            yield from self._run(bench, talk, talk.owed[0])
        elif bench.state.over:
            return bench.state.over
        elif talk.ended:
            return f"budget: {talk.limit}"
        elif talk.overflows > 1:
            return "the context window is full, and summarising it did not help"
        elif not talk.limit and (limit := self._limit(bench, talk)):
            if not bench.state.steps:
                return f"budget: {limit}"  # nothing is spent on a turn that cannot be followed up
            bench.log.append(e.LimitReached(reason=limit))
        elif talk.open or (talk.limit and not talk.told):
            bench.log.append(e.Turned(note=self._note(bench, talk)))
        else:
            return self._ask(bench, talk)
        return None

    def _run(self, bench: Workbench, talk: Conversation, call: dict[str, Any]) -> Work[None]:
        known = bench.tools.get(call["name"])
        if talk.ended and known and not known.last:
            bench.refuse(call["id"], call["name"], "not run: the last turn")
        else:
            yield from bench.call(call["name"], call["input"], call["id"])

    def _note(self, bench: Workbench, talk: Conversation) -> str:
        """What follows the results of the model's calls."""
        said = self._spent(bench)
        if talk.limit:
            said = LIMIT.format(reason=talk.limit)
        elif not talk.calls:
            said = IDLE if talk.stop_reason == "end_turn" else CUT.format(why=talk.stop_reason)
        return said

    def _spent(self, bench: Workbench) -> str:
        budget, spent = self.options.budget, bench.state.spent
        if spent.usd is not None:
            return f"[${spent.usd:.2f} of ${budget.usd:.2f} spent]"
        return f"[{spent.tokens} of {self.most_tokens} tokens used]"

    def _worst(
        self, bench: Workbench, talk: Conversation, most: int, after: int | None = None
    ) -> tuple[dict[str, Any], float | None]:
        """The most that a call with an answer of `most` tokens can take, as a usage block and in
        dollars, where prices are known: the next call or, `after` one whose answer has so many
        tokens, the one that follows it.

        Two models may answer where the first may refuse, and each after a summary of what came
        before where that is long. The cache has the prompt of the call before, for the first alone.
        """
        assert talk.request is not None and bench.state.time is not None
        read = talk.context + math.ceil(talk.new_characters / _CHARACTERS_PER_TOKEN)
        cached = talk.cached(bench.state.time)
        if after is not None:
            cached = read * ("cache_control" in talk.request)
            read += after + _RESULTS
        edits = talk.request.get("context_management", {}).get("edits", [])
        full = any(read >= edit["trigger"]["value"] for edit in edits)
        calls = [(read, cached, most)]
        if full:  # the answer follows a summary, which has read all
            short = min(read, talk.opening + _SUMMARY)
            calls = [(read, cached, _SUMMARY), (short, 0, most)]
        own, second, prices = self.options.model, self.options.fallback, self.prices
        billed = [(own, *call) for call in calls]
        billed += [(second, read, 0, answer) for read, _, answer in calls if second]
        usd = prices and sum(prices.worst(r, n, model, c) for model, r, c, n in billed)
        entries = [{"input_tokens": r, "output_tokens": n} for _, r, _, n in billed]
        return {"assumed": "the worst", "iterations": entries}, usd

    def _room(self, bench: Workbench, talk: Conversation) -> int:
        """The tokens of the longest answer that can be paid for; 0 where the shortest cannot.

        Until the last turn, what that one may cost with a short answer is kept back.
        """
        assert talk.request is not None
        longest, spent = talk.request["max_tokens"], bench.state.spent
        shortest = min(SHORTEST, longest)

        def too_long(most: int) -> bool:
            usage, usd = self._worst(bench, talk, most)
            used, cost = tokens(usage), usd or 0.0
            if not talk.told:
                usage, usd = self._worst(bench, talk, shortest, after=most)
                used, cost = used + tokens(usage), cost + (usd or 0.0)
            return self._over(spent.plus(usd=cost, tokens=used))

        lengths = range(shortest, longest + 1)
        count = bisect.bisect_left(lengths, True, key=too_long)
        return lengths[count - 1] if count else 0

    def _over(self, spent: Spent) -> bool:
        usd, used = spent.usd or 0.0, spent.tokens or 0
        return usd > self.options.budget.usd or used > self.most_tokens

    def _limit(self, bench: Workbench, talk: Conversation) -> str | None:
        """The budget that leaves room for one more call and no second."""
        budget, spent = self.options.budget, bench.state.spent
        if not self._room(bench, talk):
            usage, usd = self._worst(bench, talk, min(SHORTEST, budget.answer))
            if usd is None or (spent.tokens or 0) + 2 * tokens(usage) > self.most_tokens:
                return f"{self.most_tokens:.0f} tokens; {spent.tokens} used"
            return f"${budget.usd:.2f}; ${spent.usd:.2f} spent, the next call may cost ${usd:.2f}"
        if bench.state.steps + 1 >= budget.steps:
            return f"{budget.steps} steps"
        if spent.wall_s >= 60 * budget.minutes:
            return f"{budget.minutes:g} minutes"
        if spent.gpu_s > 60 * budget.gpu_minutes:
            return f"{budget.gpu_minutes:g} minutes of GPU work"
        if talk.failures >= budget.failures:
            return f"{talk.failures} results in a row that brought nothing"
        if talk.idle >= IDLE_TURNS:
            return f"{IDLE_TURNS} turns without a call that could run"
        return None

    def _ask(self, bench: Workbench, talk: Conversation) -> str | None:
        """One call of the model; a reason where it cannot be paid for, or where it refuses."""
        budget, most = self.options.budget, self._room(bench, talk)
        if not most or bench.state.steps >= budget.steps:
            return f"budget: {talk.limit}"
        assert talk.request is not None
        worst, most_usd = self._worst(bench, talk, most)
        request = {**talk.request, "max_tokens": most, "messages": talk.messages}
        reserved = most_usd and round(most_usd, 4)
        bench.log.append(e.Requested(digest=talk.digest, max_tokens=most, worst_usd=reserved))
        start = time.monotonic()

        def bill(usage: dict[str, Any] | None) -> dict[str, Any]:
            # What cannot be known, or priced, was reserved, and is taken to have cost just that.
            with contextlib.suppress(CodaError):
                if usage is not None:
                    return {"usage": usage, "usd": self.prices and self.prices.cost(usage)}
            return {"usage": worst, "usd": most_usd}

        def failed(error: str, wait_s: float | None, usage: dict[str, Any] | None) -> None:
            bench.log.append(e.RequestFailed(error=error, wait_s=wait_s, **bill(usage)))
            request["max_tokens"] = self._room(bench, talk)
            if wait_s is not None and not request["max_tokens"]:
                raise Stopped(f"no money for another attempt: {error}")

        message = self.client.respond(
            request, 60 * budget.minutes - bench.state.spent.wall_s, failed
        )
        details, refused = message["stop_details"] or {}, message["stop_reason"] == "refusal"
        about: dict[str, Any] = message | bill(message["usage"])
        about |= {"content": []} if refused else {}
        bench.log.append(e.Responded(**about, seconds=round(time.monotonic() - start, 3)))
        if refused:
            said = details.get("explanation") or details.get("category") or "no reason given"
            raise Declined(f"the model refused: {said}")
        return None

    def open(self, bench: Workbench, before: str = "") -> None:
        """Check the model and fix what every call will start with; `before` was tried by others.

        Raises:
            Stopped: as `work`.
        """
        options, info = self.options, self._model(bench)

        def size(name: str, usual: int) -> int:
            told = info.get(name)
            return told if isinstance(told, int) and 0 < told < 10**9 else usual

        def can(*path: str) -> bool:
            told: Any = info.get("capabilities")
            for name in (*path, "supported"):
                told = told.get(name) if isinstance(told, dict) else None
            return told is True if self.elsewhere else told is not False

        most = min(options.budget.answer, size("max_tokens", options.budget.answer))
        trigger = max(50_000, round(COMPACT_AT * size("max_input_tokens", 200_000)))
        if self.prices and (above := self.prices.tiers(options.model)[0].above):
            trigger = min(trigger, round(COMPACT_TIER * above))
        edit = {"type": "compact_20260112", "trigger": {"type": "input_tokens", "value": trigger}}
        sent = prompt.request(bench.spec, bench.withheld)
        request: dict[str, Any] = {
            "model": options.model,
            "max_tokens": most,
            "tools": sent["tools"],
            "system": sent["system"],
        }
        if not self.elsewhere:
            request["cache_control"] = {"type": "ephemeral"}
        if can("thinking", "types", "adaptive"):
            request["thinking"] = {"type": "adaptive", "display": "summarized"}
        if can("effort"):
            request["output_config"] = {"effort": options.effort}
        if can("context_management"):
            request |= {"context_management": {"edits": [edit]}, "betas": BETAS}
        if "output_config" in request and (total := self._task_budget()):
            request["output_config"] = {"effort": options.effort, "task_budget": total}
            request["betas"] = [*request.get("betas", ()), TASK_BUDGETS]
        more = "\n\n".join(part for part in (before, self._budget()) if part)
        sent["messages"][0]["content"].append({"type": "text", "text": more})
        characters = len(json.dumps(sent, ensure_ascii=False))
        messages = sent["messages"]
        bench.log.append(e.Prompted(request=request, messages=messages, characters=characters))

    def _budget(self) -> str:
        """What the model is told of its budget before it begins."""
        budget, most = self.options.budget, f"{self.most_tokens} tokens"
        if self.prices:
            price = self.prices.tiers(self.options.model)[-1]
            most = f"${budget.usd:.2f}, at ${1e6 * price.output:g} for a million tokens of answers"
        return BUDGET.format(most=most, steps=budget.steps, minutes=budget.minutes)

    def _task_budget(self) -> dict[str, Any] | None:
        """The tokens of answers that the dollars buy, for a model that is shown a countdown."""
        if not self.prices or self.options.model not in TOLD:
            return None
        total = round(self.options.budget.usd / self.prices.tiers(self.options.model)[-1].output)
        return {"type": "tokens", "total": min(total, 1_000_000)} if total >= 20_000 else None

    def _model(self, bench: Workbench) -> dict[str, Any]:
        """What the API says about the model.

        Raises:
            CodaError: there is no such model, or it is retired.
            Stopped: the API cannot be asked.

        Another server than Anthropic's need not say anything.
        """
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
