"""The ladder: the composer, then models from cheap to strong.

- The composer goes first and is free. What it refuses, and why, is in every model's first message.
- A model begins a conversation of its own. Instead of what others said it is given the candidate
  that came furthest, and what the judge found wrong with it.
- A cheap model, that is every one but the last, may have several samples: conversations that begin
  alike, with what the models before left, and are held at once. A model that is alone has all of
  its samples at once but the last, which is given what they left.
- A conversation's share is what is left, divided by those to come. Whoever gives up, or refuses to
  answer, leaves the run to the others; the last one's word stands.
- A pass ends it, unless a model's times say that there is something to win. Then the next one is
  given the program and its times, and the faster program is kept.
"""

from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict, replace
from typing import TYPE_CHECKING, NamedTuple

from coda_agent.agent import events as e
from coda_agent.agent.authors import Author, Options
from coda_agent.agent.authors.claude.client import Declined
from coda_agent.agent.authors.claude.conversation import Conversation
from coda_agent.agent.authors.claude.loop import Claude, stops
from coda_agent.agent.authors.claude.samples import Talks, hold
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


class Rung(NamedTuple):
    """A model's conversations that are held at once: their numbers from `start` to `stop`."""

    model: str
    start: int
    stop: int


class Ladder(Author):
    """The author.

    Raises:
        CodaError: there is no key, or the price of a model is not known.
    """

    name = "ladder"

    def __init__(self, options: Options) -> None:
        self.options = options
        *cheap, last = options.models
        many = [(model, options.samples) for model in cheap] or [(last, options.samples - 1)]
        self.rungs, start = list[Rung](), 0
        for model, count in (*many, (last, 1)):
            if count:
                self.rungs.append(Rung(model, start, start := start + count))
        for model in options.models:
            self._claude(model, options.budget.usd)  # whether it can be
        budget, sums = options.budget, Counter[str]()
        for rung in self.rungs:
            sums[rung.model] += rung.stop - rung.start
        named = (m + f" ({n} times)" * (n > 1) for m, n in sums.items())
        self.limits = f"the composer, then {', '.join(named)}: at most ${budget.usd:.2f}, "
        self.limits += f"{budget.minutes:g} minutes"

    def settings(self) -> JsonObject:
        return {"options": asdict(self.options)}

    def _claude(self, model: str, usd: float, tokens: int | None = None) -> Claude:
        budget = replace(self.options.budget, usd=usd, tokens=tokens)
        return Claude(replace(self.options, model=model, budget=budget))

    def work(self, bench: "Workbench") -> "Work[None]":
        """Work until a candidate passes or the last model has ended."""
        talks = Talks()
        bench.log.follow(talks)
        if not talks.held:
            yield from self._compose(bench)
        reason, passed = bench.state.over, bench.state.passed
        for rung in self.rungs:
            begun, later = len(talks.held), self.rungs[-1].stop - rung.stop
            # Nobody goes on with a rung that has passed, or before one that has begun.
            if rung.stop < begun or (passed and rung.start < begun):
                continue
            # What the composer wrote costs nothing, and so ends it.
            if (kept := bench.state.kept) and not (begun and slow(kept)):
                break
            with stops(bench):
                try:
                    reason = yield from self._hold(bench, talks, rung, later)
                except CodaError as error:
                    if isinstance(error, Declined) and later:
                        reason = str(error)
                    elif bench.state.kept:  # which stands, whatever becomes of those after it
                        break
                    else:
                        raise
        if (kept := bench.state.kept) and not bench.state.passed:
            bench.keep(kept)
        bench.finish(bench.state.over or reason)

    def _hold(self, bench: "Workbench", talks: Talks, rung: Rung, later: int) -> "Work[str | None]":
        """Begin a rung's conversations or go on with them; the reason of the last one's end."""
        left = [n for n in range(rung.start, rung.stop) if not talks.number(n).over]
        if not left:
            return bench.state.over
        bench.log.append(e.AuthorStarted(author=f"claude:{rung.model}"))
        models = dict[int, Claude]()
        for n in left:
            models[n] = who = self._share(bench, rung.model, talks.number(n), len(left) + later)
            if n >= len(talks.held):
                if n > rung.start:
                    bench.log.append(e.Switched(number=n))
                # Samples begin with what the first one did.
                before = next(iter(talks.begun[rung.start :]), None)
                who.open(bench, left_behind(bench, bench.state.attempts[:before]))
        if len(left) > 1:
            return (yield from hold(bench, talks, models))
        return (yield from models[left[0]].converse(bench, talks.turn_to(bench, left[0])))

    def _share(self, bench: "Workbench", model: str, talk: Conversation, among: int) -> Claude:
        """Make an author with a share of what is left, beside what it has spent."""
        budget, spent = self.options.budget, bench.state.spent
        usd = (talk.spent.usd or 0.0) + (budget.usd - (spent.usd or 0.0)) / among
        tokens = None
        if budget.tokens:
            tokens = (talk.spent.tokens or 0) + (budget.tokens - (spent.tokens or 0)) // among
        return self._claude(model, usd, tokens and max(1, tokens))

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
