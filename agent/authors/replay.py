"""The replay, an author that repeats a recorded run's calls."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

from coda_agent.agent import events as e
from coda_agent.agent.authors import Author, Kind, Options
from coda_agent.agent.events import Event
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.log import read_events
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.agent.workbench import Work, Workbench


class _Recorded(Kind):
    """`replay:RUN` is a run of logs/trajectories; `replay` stands for each of them."""

    name = spelling = "replay"
    meaning = "Recorded runs of agents at the tools, repeated before today's judge."
    deterministic = True

    def make(self, which: str, options: Options, workspace: Workspace) -> Author:
        log = _trajectories(workspace) / which / "events.jsonl"
        if not which or not log.is_file():
            raise CodaError(f"no recorded run {which!r} in {_trajectories(workspace)}")
        return Replay(read_events(log))

    def tried(
        self, which: str, options: Options, workspace: Workspace, specs: Collection[str]
    ) -> dict[str, list[str]]:
        found: dict[str, list[str]] = {}
        for log in sorted(_trajectories(workspace).glob(f"{which or '*'}/events.jsonl")):
            if (spec := RunState.of(read_events(log)).spec) in specs:
                found[self.full_name(log.parent.name, options)] = [str(spec)]
        if not found:
            raise CodaError(f"no run in {_trajectories(workspace)} is of a spec of the suite")
        return found


AUTHOR = _Recorded()


def _trajectories(workspace: Workspace) -> Path:
    return workspace.root / "logs" / "trajectories"


class Replay(Author):
    """The author of a recorded run.

    Attributes:
        differences: What came out otherwise than it did then, one sentence a call.
        skipped: Calls that this machine cannot do.
    """

    def __init__(self, events: list[Event]) -> None:
        self.events, self.recorded = events, RunState.of(events)
        self.name = f"replay:{self.recorded.author}"
        self._turned = False  # to another conversation of a ladder
        self.differences: list[str] = []
        self.skipped: list[str] = []

    def settings(self) -> JsonObject:
        return {"replays": self.recorded.run}

    def work(self, bench: "Workbench") -> "Work[None]":
        """Repeat the calls, but for tips."""
        for name, given, then in self._calls():
            if self._turned and bench.state.gave_up:
                bench.log.append(e.AuthorStarted())
            self._turned = False
            result = yield from bench.call(name, given)
            now = _Came(result.ok, result.data.get("passed"))
            if result.data.get("lacks") and then.ok:
                self.skipped.append(f"{name}: {result.text}")
            elif then != now:
                self.differences.append(f"{name}: was {then}, is {now}: {result.text}")
        bench.finish("the recording ends here" if not bench.state.over else None, final=False)

    def _calls(self) -> "Iterator[tuple[str, object, _Came]]":
        """Name, input and outcome of each call that ended."""
        begun: e.ToolStarted | None = None
        tools = any(isinstance(event, e.ToolStarted) for event in self.events)
        if not tools:
            if self.recorded.candidate:
                yield "write_candidate", {"text": self.recorded.candidate}, _Came(True, None)
            if self.recorded.attempts:
                yield "submit", {}, _Came(True, self.recorded.attempts[-1].passed)
        for event in self.events:
            match event:
                # By no tool: one of several conversations goes on, or begins with another's.
                case e.CandidateSaved(text=str(text)) if tools and not begun and text:
                    yield "write_candidate", {"text": text}, _Came(True, None)
                case e.AuthorStarted() | e.Switched():
                    self._turned = True
                case e.ToolStarted():
                    begun = event
                case e.ToolFinished() if begun and begun.id == event.id:
                    if begun.name != "log_tip":
                        then = _Came(event.ok, event.facts.get("passed"))
                        yield begun.name, begun.input, then
                    begun = None
                case _:
                    pass


class _Came(NamedTuple):
    """What came of a call; `passed` is None where nothing was judged."""

    ok: bool
    passed: bool | None

    def __str__(self) -> str:
        if not self.ok:
            return "an error"
        return {True: "a pass", False: "a refusal", None: "done"}[self.passed]
