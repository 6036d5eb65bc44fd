"""Several conversations with models in one run.

Those that are held at once have calls under way at the same time, each in a thread of its own. All
else is done by the run's thread, one thing after another: tools, the judge, the log. An event is of
the conversation that was prompted, or turned to, last; so is the candidate, and who is turned to
gets its own back.
"""

import threading
from collections.abc import Mapping
from queue import SimpleQueue
from typing import Any, NamedTuple

from coda_agent.agent import events as e
from coda_agent.agent.authors.claude.client import Declined, Stopped
from coda_agent.agent.authors.claude.conversation import Conversation
from coda_agent.agent.authors.claude.loop import Call, Claude
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.workbench import Work, Workbench


class Talks:
    """A run's conversations, as its events tell them.

    Attributes:
        held: Each of them.
        begun: How many attempts there were before each.
        now: The number of the present one, from 0; -1 before the first.
    """

    def __init__(self) -> None:
        self.held: list[Conversation] = []
        self.begun: list[int] = []
        self.now = -1
        self._attempts, self._candidate = 0, ""

    @property
    def present(self) -> Conversation:
        """The present conversation, or an empty one."""
        return self.number(self.now)

    def number(self, n: int) -> Conversation:
        """Give a conversation; one that has not begun is empty."""
        return self.held[n] if 0 <= n < len(self.held) else Conversation()

    def apply(self, event: e.Event) -> None:
        """Take the next event."""
        match event:
            case e.Prompted():
                self.now = len(self.held)
                self.held.append(Conversation())
                self.begun.append(self._attempts)
                self.held[-1].candidate = self._candidate
            case e.Switched():
                self.now = event.number
            case e.Judged():
                self._attempts += 1
            case e.CandidateSaved():
                self._candidate = event.text
            case _:
                pass
        for talk in (
            self.held if isinstance(event, e.RunResumed | e.RunFinished) else [self.present]
        ):
            talk.apply(event)

    def turn_to(self, bench: Workbench, number: int) -> Conversation:
        """Go on with a conversation, and with its candidate, unless another's has passed."""
        talk = self.held[number]
        if self.now != number:
            bench.log.append(e.Switched(number=number))
            if bench.state.candidate != talk.candidate and not bench.state.passed:
                bench.log.candidate(talk.candidate)
        return talk


class _News(NamedTuple):
    """What a thread says of a call: `answer`, which may be an exception; or that it `failed` once.

    `reply` then takes an exception that ends it, or None.
    """

    number: int
    answer: Any = None
    failed: JsonObject | None = None
    reply: "SimpleQueue[Exception | None] | None" = None


def hold(bench: Workbench, talks: Talks, models: Mapping[int, Claude]) -> Work[str | None]:
    """Hold conversations at once until one has passed or all have ended; the last one's reason.

    Calls that are under way at the end are waited for, so that it is known what they cost.

    Raises:
        Stopped: a call could not be made; raised when no other is under way.
    """
    news, under_way = SimpleQueue[_News](), dict[int, Call]()
    ready, reason, stop = list(models), None, None
    while ready or under_way:
        for number in ready:
            if stop or bench.state.passed:
                break
            who, talk = models[number], talks.turn_to(bench, number)
            ended = yield from who.advance(bench, talk)
            call = ended or who.call(bench, talk)
            if isinstance(call, str):
                reason = call
                continue
            under_way[number] = call
            left_s = who.left_s(bench)
            threading.Thread(
                target=_respond, args=(who, call, left_s, number, news), daemon=True
            ).start()
        ready = []
        if under_way:
            try:
                ready = _heard(bench, talks, models, under_way, news.get())
            except Declined as declined:
                reason = str(declined)
            except Stopped as stopped:
                stop = stop or stopped
    if stop and not bench.state.passed:
        raise stop
    return reason


def _respond(who: Claude, call: Call, left_s: float, number: int, news: SimpleQueue[_News]) -> None:
    """Make a call in a thread of its own, which tells the run's thread of it."""

    def failed(**about: Any) -> None:
        reply = SimpleQueue[Exception | None]()
        news.put(_News(number, failed=about, reply=reply))
        if error := reply.get():
            raise error

    try:
        answer: Any = who.client.respond(call.request, left_s, failed)
    except BaseException as error:  # which is raised by the run's thread
        answer = error
    news.put(_News(number, answer))


def _heard(
    bench: Workbench, talks: Talks, models: Mapping[int, Claude], under_way: dict[int, Call],
    said: _News,
) -> list[int]:  # fmt: skip
    """Record what a thread says; the conversation that can go on by it."""
    who, call = models[said.number], under_way[said.number]
    talk = talks.turn_to(bench, said.number)
    if said.reply:
        error = None
        try:
            who.failed(bench, talk, call, **said.failed or {})
        except Stopped as stopped:
            error = stopped
        if bench.state.passed:
            error = Stopped("another conversation has passed")
        said.reply.put(error)
        return []
    del under_way[said.number]
    if isinstance(said.answer, BaseException):
        raise said.answer
    who.book(bench, call, said.answer)
    return [said.number]
