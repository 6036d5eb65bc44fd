"""What an author may spend, and the most its calls can cost."""

import bisect
import math

from coda_agent.agent.authors import Options
from coda_agent.agent.authors.claude.conversation import Conversation
from coda_agent.agent.budget import SHORTEST, UNPRICED, Prices, tokens
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.state import RunState, Spent

BUDGET = (
    "# The budget\n\n{most}; {steps} turns; {minutes:.3g} minutes. After each turn you are told "
    "what is spent. A candidate that was not submitted when it is used up counts for nothing."
)
IDLE_TURNS = 3
_SUMMARY = 8000
"""Tokens of a summary, at most."""
_RESULTS = 4000
"""Tokens of results, at most, that the call after the next reads beside its answer."""
_CHARACTERS_PER_TOKEN = 2.0
"""For a worst case; text and code have between three and four."""


class Purse:
    """What a conversation may spend; `prices` may be unknown.

    Dollars and tokens are its own, steps and time those of the run.
    """

    def __init__(self, options: Options, prices: Prices | None) -> None:
        self.options, self.budget, self.prices = options, options.budget, prices
        self.most_tokens = options.budget.tokens or (math.inf if prices else UNPRICED)

    def limits(self) -> str:
        """What may be spent, as is said before the run."""
        most = f"${self.budget.usd:.2f}"
        if not self.prices:
            most = f"{self.most_tokens} tokens (price unknown)"
        said = f"{self.options.model}: at most {most}, {self.budget.steps} steps, "
        return f"{said}{self.budget.minutes:g} minutes"

    def announced(self, state: RunState) -> str:
        """What the model is told of it before it begins: what others left to it."""
        budget = self.budget
        most = f"{self.most_tokens} tokens"
        if self.prices:
            price = self.prices.tiers(self.options.model)[-1]
            most = f"${budget.usd:.2f}, at ${1e6 * price.output:g} for a million tokens of answers"
        minutes = budget.minutes - state.spent.wall_s / 60
        return BUDGET.format(most=most, steps=budget.steps - state.steps, minutes=minutes)

    def said(self, spent: Spent) -> str:
        """What the model has spent, as it is told after each turn."""
        if spent.usd is not None:
            return f"[${spent.usd:.2f} of ${self.budget.usd:.2f} spent]"
        return f"[{spent.tokens} of {self.most_tokens} tokens used]"

    def worst(
        self, state: RunState, talk: Conversation, most: int, after: int | None = None
    ) -> tuple[JsonObject, float | None]:
        """Find the most that a call can take, in tokens and dollars.

        Its answer has `most` tokens; it may come `after` another call, whose answer has so many.
        Two models may answer where the first may refuse, and each after a summary of what came
        before where that is long. The cache has the prompt of the call before, for the first alone.
        """
        assert talk.request is not None and state.time is not None
        read = talk.context + math.ceil(talk.new_characters / _CHARACTERS_PER_TOKEN)
        cached = talk.cached(state.time)
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

    def room(self, state: RunState, talk: Conversation) -> int:
        """Find the longest answer that can be paid for, or 0.

        Until the last turn, what that one may cost with a short answer is kept back.
        """
        assert talk.request is not None
        longest = talk.request["max_tokens"]
        shortest = min(SHORTEST, longest)

        def too_long(most: int) -> bool:
            usage, usd = self.worst(state, talk, most)
            used, cost = tokens(usage), usd or 0.0
            if not talk.told:
                usage, usd = self.worst(state, talk, shortest, after=most)
                used, cost = used + tokens(usage), cost + (usd or 0.0)
            spent = talk.spent.plus(usd=cost, tokens=used)
            return (spent.usd or 0.0) > self.budget.usd or (spent.tokens or 0) > self.most_tokens

        lengths = range(shortest, longest + 1)
        count = bisect.bisect_left(lengths, True, key=too_long)
        return lengths[count - 1] if count else 0

    def limit(self, state: RunState, talk: Conversation) -> str | None:
        """The budget that leaves room for one more call and no second."""
        budget, spent = self.budget, talk.spent
        if not self.room(state, talk):
            usage, usd = self.worst(state, talk, min(SHORTEST, budget.answer))
            if usd is None or (spent.tokens or 0) + 2 * tokens(usage) > self.most_tokens:
                return f"{self.most_tokens:.0f} tokens; {spent.tokens} used"
            return f"${budget.usd:.2f}; ${spent.usd:.2f} spent, the next call may cost ${usd:.2f}"
        if state.steps + len(state.under_way) + 1 >= budget.steps:
            return f"{budget.steps} steps"
        spent = state.spent
        if spent.wall_s >= 60 * budget.minutes:
            return f"{budget.minutes:g} minutes"
        if spent.gpu_s > 60 * budget.gpu_minutes:
            return f"{budget.gpu_minutes:g} minutes of GPU work"
        if talk.failures >= budget.failures:
            return f"{talk.failures} results in a row that brought nothing"
        if talk.idle >= IDLE_TURNS:
            return f"{IDLE_TURNS} turns without a call that could run"
        return None
