"""The ladder: the composer, then models from cheap to strong.

- The composer goes first and is free. What it refuses, and why, is in every model's first message.
- A model begins a conversation of its own. Instead of what others said it is given the candidate
  that came furthest, and what the judge found wrong with it.
- A model's share is what is left, divided by the conversations to come. Whoever gives up, or
  refuses to answer, leaves the run to the next; the last one's word stands.
"""

from dataclasses import asdict, replace
from typing import TYPE_CHECKING, Any

from coda_agent.agent import events as e
from coda_agent.agent.authors import Author, Options
from coda_agent.agent.authors.claude.client import Declined
from coda_agent.agent.authors.claude.conversation import Conversation
from coda_agent.agent.authors.claude.loop import Claude, stops
from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import ProgramError

if TYPE_CHECKING:
    from coda_agent.agent.workbench import Work, Workbench

MODELS = "claude-haiku-5-5", "claude-sonnet-5-5", "claude-opus-5-5", "claude-fable-5-2"
"""By price; the newest of each family."""


class Ladder(Author):
    """The author.

    Raises:
        CodaError: there is no key, or the price of a model is not known.
    """

    name = "ladder"

    def __init__(self, options: Options) -> None:
        self.options = options
        models = options.models
        self.rungs = [model for model in models for _ in range(options.samples)]
        for model in models:
            self._claude(model, options.budget.usd)  # whether it can be
        budget = options.budget
        times = f", {options.samples} times each" * (options.samples > 1)
        self.limits = f"the composer, then {', '.join(models)}{times}: at most ${budget.usd:.2f}, "
        self.limits += f"{budget.minutes:g} minutes"

    def settings(self) -> JsonObject:
        return {"options": asdict(self.options)}

    def _claude(self, model: str, usd: float) -> Claude:
        budget = replace(self.options.budget, usd=usd)
        return Claude(replace(self.options, model=model, budget=budget))

    def work(self, bench: "Workbench") -> "Work[None]":
        """Work until a candidate passes or the last model has ended."""
        talk = Conversation()
        bench.log.follow(talk)
        if not talk.begun:
            yield from self._compose(bench)
        reason = bench.state.over
        for number in range(max(1, talk.begun), len(self.rungs) + 1):
            if bench.state.passed:
                break
            left = self.options.budget.usd - (bench.state.spent.usd or 0.0)
            share = self.options.budget.usd - left + left / (len(self.rungs) - number + 1)
            who = self._claude(self.rungs[number - 1], share)
            bench.log.append(e.AuthorStarted(author=f"claude:{who.options.model}"))
            with stops(bench):
                try:
                    if number > talk.begun:
                        who.open(bench, furthest(bench))
                    reason = yield from who.converse(bench, talk)
                except Declined as declined:
                    if number == len(self.rungs):
                        raise
                    reason = str(declined)
        bench.finish(reason)

    def _compose(self, bench: "Workbench") -> "Work[None]":
        bench.log.append(e.AuthorStarted(author=Composer.name))
        try:
            bench.log.candidate(Composer().write(bench.spec, bench.log.observer))
        except ProgramError:
            return
        yield bench.submission()


def furthest(bench: "Workbench") -> str:
    """Show the failed candidate that passed most gates, and its finding."""
    tried = [attempt for attempt in bench.state.attempts if not attempt.passed]
    if not tried:
        return ""

    def passed(judged: Any) -> int:
        return sum(bool(gate.passed) for gate in judged.judgement.gates.values())

    best = max(reversed(tried), key=passed)
    if bench.state.candidate != best.text:
        bench.log.candidate(best.text)
    found = bench.told(best).text
    return (
        "# The best that others have tried\n\nIt is the candidate now, and may be edited.\n\n"
        f"```python\n{best.text.strip()}\n```\n\n{found}"
    )
