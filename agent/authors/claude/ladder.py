"""The ladder: the composer, then models from cheap to strong.

- The composer goes first and is free. What it refuses, and why, is in every model's first message.
- A model begins a conversation of its own. Instead of what others said it is given the candidate
  that came furthest, and what the judge found wrong with it.
- A cheap model, that is every one but the last, may have several samples: conversations that begin
  alike, with what the models before left. So may a model that is alone. They come one after the
  other, because a run's log, and so its resumption, knows one conversation at a time.
- A conversation's share is what is left, divided by those to come. Whoever gives up, or refuses to
  answer, leaves the run to the next; the last one's word stands.
- A pass ends it, unless a model's times say that there is something to win. Then the next one is
  given the program and its times, and the faster program is kept.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING

from coda_agent.agent import events as e
from coda_agent.agent.authors import Author, Options
from coda_agent.agent.authors.claude.client import Declined
from coda_agent.agent.authors.claude.conversation import Conversation
from coda_agent.agent.authors.claude.loop import Claude, stops
from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.state import Attempt
from coda_agent.primitives.errors import CodaError, ProgramError

if TYPE_CHECKING:
    from coda_agent.agent.workbench import Work, Workbench

MODELS = "claude-haiku-5-5", "claude-sonnet-5-5", "claude-opus-5-5", "claude-fable-5-2"
"""By price; the newest of each family."""
WORTH = 1.1
"""Times the bound: below that nothing is spent for speed."""
FURTHEST = """# The best that others have tried

It is the candidate now, and may be edited."""
FASTER = """# What passed and can be faster

It is accepted, and is the candidate now. Submit one that is faster beside torch.compile: the faster
of the two is kept. Its times are below; profile says what they are made of. Give up where nothing
is to be won."""


class Ladder(Author):
    """The author.

    Raises:
        CodaError: there is no key, or the price of a model is not known.
    """

    name = "ladder"

    def __init__(self, options: Options) -> None:
        self.options = options
        *cheap, last = enumerate(options.models)
        self.talks = [rung for rung in cheap or [last] for _ in range(options.samples)]
        self.talks += [last] * bool(cheap)
        for model in options.models:
            self._claude(model, options.budget.usd)  # whether it can be
        budget = options.budget
        named = (m + f" ({n} times)" * (n > 1) for (_, m), n in Counter(self.talks).items())
        self.limits = f"the composer, then {', '.join(named)}: at most ${budget.usd:.2f}, "
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
        # Nobody goes on with a conversation that ended its part of the run.
        for number in range(max(1, len(talk.begun) + bool(reason)), len(self.talks) + 1):
            # What the composer wrote costs nothing, and so ends it.
            if (kept := bench.state.kept) and not (talk.begun and slow(kept)):
                break
            with stops(bench):
                try:
                    reason = yield from self._converse(bench, talk, number)
                except CodaError as error:
                    if isinstance(error, Declined) and number < len(self.talks):
                        reason = str(error)
                    elif bench.state.kept:  # which stands, whatever becomes of those after it
                        break
                    else:
                        raise
        if (kept := bench.state.kept) and not bench.state.passed:
            bench.keep(kept)
        bench.finish(bench.state.over or reason)

    def _converse(self, bench: "Workbench", talk: Conversation, number: int) -> "Work[str | None]":
        """Begin a conversation or go on with it; the reason of its end."""
        rung = self.talks[number - 1]
        left = self.options.budget.usd - (bench.state.spent.usd or 0.0)
        share = self.options.budget.usd - left + left / (len(self.talks) - number + 1)
        who = self._claude(rung[1], share)
        bench.log.append(e.AuthorStarted(author=f"claude:{who.options.model}"))
        if number > len(talk.begun):
            first = self.talks.index(rung)  # with whose start its other samples begin
            before = talk.begun[first] if first < len(talk.begun) else None
            who.open(bench, left_behind(bench, bench.state.attempts[:before]))
        return (yield from who.converse(bench, talk))

    def _compose(self, bench: "Workbench") -> "Work[None]":
        bench.log.append(e.AuthorStarted(author=Composer.name))
        try:
            bench.log.candidate(Composer().write(bench.spec, bench.log.observer))
        except ProgramError as error:
            bench.log.append(e.GaveUp(reason=str(error)))
            return
        yield bench.submission()


def slow(attempt: Attempt) -> bool:
    """Tell whether a bound on its times leaves something to win.

    The bound is the product alone by cuBLAS, or the floor where that is higher. The floor alone
    lies a quarter below what any kernel reaches.
    """
    for cell in attempt.judgement.cells:
        us = {name: timed.median_us for name, timed in (cell.times or {}).items()}
        if us and us["ours"] > WORTH * max(us["gemm"], cell.floor_us or 0.0):
            return True
    return False


def left_behind(bench: "Workbench", tried: Sequence[Attempt]) -> str:
    """Show what passed, or else the attempt that came furthest, and make it the candidate."""

    def passed(attempt: Attempt) -> int:
        return sum(bool(gate.passed) for gate in attempt.judgement.gates.values())

    failed = [attempt for attempt in reversed(tried) if not attempt.passed]
    best = bench.state.kept or max(failed, key=passed, default=None)
    text = best.text if best else ""
    if bench.state.candidate != text:
        bench.log.candidate(text)
    if not best:
        return ""
    head = FASTER if best.passed else FURTHEST
    return f"{head}\n\n```python\n{text.strip()}\n```\n\n{bench.told(best).text}"
