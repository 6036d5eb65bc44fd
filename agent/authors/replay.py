"""The replay, an author that repeats the calls of a recorded run before today's judge."""

from collections.abc import Collection, Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent.authors import Author, Kind, Options
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from coda_agent.agent.events import Event
    from coda_agent.agent.workbench import Workbench
    from coda_agent.agent.workspace import Workspace


class _Recorded(Kind):
    """`replay:RUN` is a run of logs/trajectories; `replay` stands for each of them."""

    name = spelling = "replay"
    deterministic = True

    def make(self, which: str, options: Options, workspace: "Workspace") -> Author:
        from coda_agent.agent.events import read_events

        log = _trajectories(workspace) / which / "events.jsonl"
        if not which or not log.is_file():
            raise CodaError(f"no recorded run {which!r} in {_trajectories(workspace)}")
        return Replay(read_events(log))

    def tried(
        self, which: str, options: Options, workspace: "Workspace", specs: Collection[str]
    ) -> dict[str, list[str]]:
        from coda_agent.agent.events import read_events, summary

        found: dict[str, list[str]] = {}
        for log in sorted(_trajectories(workspace).glob(f"{which or '*'}/events.jsonl")):
            if (spec := summary(read_events(log)).spec) in specs:
                found[self.full_name(log.parent.name)] = [str(spec)]
        if not found:
            raise CodaError(f"no run in {_trajectories(workspace)} is of a spec of the suite")
        return found


AUTHOR = _Recorded()


def _trajectories(workspace: "Workspace") -> Path:
    return workspace.root / "logs" / "trajectories"


class Replay(Author):
    """The author of a recorded run.

    Attributes:
        differences: What came out otherwise than it did then, one sentence a call.
        skipped: Calls that this machine cannot do.
    """

    def __init__(self, events: "list[Event]") -> None:
        from coda_agent.agent.events import summary

        self.events, self.name = events, f"replay:{summary(events).author}"
        self.differences: list[str] = []
        self.skipped: list[str] = []

    def settings(self) -> dict[str, Any]:
        return {"replays": self.events[0].data.get("run")}

    def drive(self, bench: "Workbench") -> None:
        """Repeats the calls; tips are not written a second time, and this run says nothing of
        their worth."""
        for name, given, then in self._calls():
            result = bench.call(name, given)
            now = {"ok": result.ok, "passed": result.data.get("passed")}
            if result.data.get("lacks") and then["ok"]:
                self.skipped.append(f"{name}: {result.text}")
            elif then != now:
                self.differences.append(
                    f"{name}: was {_word(then)}, is {_word(now)}: {result.text}"
                )
        bench.finish("the recording ends here" if not bench.state.over else None, final=False)

    def _calls(self) -> Iterator[tuple[str, Any, dict[str, Any]]]:
        """Name, input and what came of it, of each call that ended; a text written in one go counts
        as two calls."""
        begun: dict[str, Any] | None = None
        texts = [e.data.get("text") for e in self.events if e.type == "candidate.saved"]
        verdicts = [e.data["passed"] for e in self.events if e.type == "verdict"]
        if texts and not any(e.type == "tool.started" for e in self.events):
            yield "write_candidate", {"text": texts[-1]}, {"ok": True, "passed": None}
            if verdicts:
                yield "submit", {}, {"ok": True, "passed": verdicts[-1]}
        for event in self.events:
            if event.type == "tool.started":
                begun = event.data
            elif event.type == "tool.finished" and begun and begun["id"] == event.data["id"]:
                then = {"ok": event.data["ok"], "passed": event.data["data"].get("passed")}
                if begun["name"] != "log_tip":
                    yield begun["name"], begun["input"], then
                begun = None


def _word(outcome: dict[str, Any]) -> str:
    if not outcome["ok"]:
        return "an error"
    return {True: "a pass", False: "a refusal", None: "done"}[outcome["passed"]]
