"""Past runs: finding one, and showing what happened in it."""

import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from coda_agent.agent import events as e
from coda_agent.agent.log import is_written, read_events
from coda_agent.agent.plain import dollars
from coda_agent.agent.state import RunState
from coda_agent.agent.workspace import Run, Workspace
from coda_agent.primitives.errors import WorkspaceError
from coda_agent.primitives.suggest import near_matches

if TYPE_CHECKING:
    from rich.console import RenderableType


def find(workspace: Workspace, name: str) -> Run:
    """Find a run by its name or a part, "last", or folder.

    Raises:
        WorkspaceError: there is none, or more than one.
    """
    if (Path(name) / "events.jsonl").is_file():
        return Run(Path(name).resolve().name, Path(name).resolve())
    runs = {run.id: run for run in everything(workspace)}
    found = [id for id in runs if name in id]
    if name == "last":
        newest = (id for id in sorted(runs, reverse=True) if not state(runs[id]).replays)
        found = list(itertools.islice(newest, 1))
    if name in runs or len(found) == 1:
        return runs[name if name in runs else found[0]]
    hint = near_matches(name, found or runs) or "there are no runs yet"
    raise WorkspaceError(f"{len(found) or 'no'} runs are called {name!r}", hint=hint)


def open_ones(workspace: Workspace) -> Iterator[tuple[Run, RunState]]:
    """List the runs at the tools that are not over, latest first, and how they stand."""
    for run in reversed(everything(workspace)):
        about = state(run)
        if about.kind == "generate" and not (about.over or about.metered):
            yield run, about


def everything(workspace: Workspace) -> list[Run]:
    """List every run of a workspace, oldest first."""
    logs = (workspace.root / "logs" / "runs").glob("*/events.jsonl")
    return [Run(path.parent.name, path.parent) for path in sorted(logs)]


def events_of(run: Run) -> list[e.Event]:
    """Read what happened in a run, if anything."""
    return read_events(run.folder / "events.jsonl")


def state(run: Run) -> RunState:
    """Say how a run stands."""
    return RunState.of(events_of(run))


def outcome(run: Run, about: RunState) -> str:
    """Say how a run ended: `open` at the tools, or `interrupted`, where no process works on it."""
    if about.outcome != "running" or is_written(run.folder / "events.jsonl"):
        return about.outcome
    return "interrupted" if about.metered else "open"


def timeline(run: Run, events: list[e.Event]) -> "RenderableType":
    """Tabulate what was tried, what was said, what it cost."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    about = RunState.of(events)
    table = Table(show_edge=False, pad_edge=False, expand=True)
    of_model = ("step", "USD") if about.steps else ()
    for column in ("time", *of_model[:1], "what", "result", *of_model[1:]):
        right = column in of_model
        table.add_column(column, justify="right" if right else "left", vertical="top")
    step = 0
    for event in events:
        step += isinstance(event, e.Responded)
        if row := _row(event):
            usd = getattr(event, "usd", 0.0)
            cells = [event.time[11:19], *row]
            if of_model:
                cells = [cells[0], str(step or ""), *row, f"{usd:.4f}" if usd else ""]
            table.add_row(*(Text(cell) for cell in cells))
    head = f"{run.id}\n{about.kind} of {about.spec} by {about.author}: {outcome(run, about)}"
    head += f" ({about.why})" * bool(about.why)
    head += f", {about.level}" * bool(about.level) + f", commit {about.commit}" * bool(about.commit)
    head += f"; {about.steps} steps, {dollars(about.spent.usd)}" * bool(about.steps)
    return Group(Text(head), Text(), table)


def _row(event: e.Event) -> tuple[str, str] | None:
    """Show an event as (what, result); None where readers learn nothing."""
    match event:
        case e.Responded(stop_reason=why):
            said = (block.get("text") or block.get("thinking") for block in event.content)
            words = " ".join(" ".join(text for text in said if text).split())
            return "model", f"{words[:400]}\n[{why}]" if words else why
        case e.ToolFinished():
            mark = "" if event.ok else "error: "
            return event.name, mark + "\n".join(event.text.splitlines()[:6])
        case e.RequestFailed(wait_s=wait):
            return "call failed", event.error + (f"; again in {wait:.1f} s" if wait else "")
        case e.CandidateSaved():
            return "candidate", event.digest
        case e.Switched():
            return event.type, str(event.number + 1)
        case e.LimitReached(reason=reason) | e.GaveUp(reason=reason):
            return event.type, reason
        case e.RunFinished(reason=str(reason)):
            return event.type, reason
        case e.RunFailed():
            return event.type, f"{event.error}: {event.message}"
        case e.Judged(judgement=judged):
            passed = "passed" if judged.passed else "refused"
            said = f"{event.check}: {passed}" + f", {judged.level}" * bool(judged.level)
            return event.type, "\n".join(filter(None, [said, judged.finding, event.replay]))
        case e.Stored() | e.RunStarted():
            keys = ("author", "level", "commit")
            data = event.data
            return event.type, ", ".join(f"{key} {data[key]}" for key in keys if data.get(key))
        case _:
            return None
