"""Past runs: finding one, and showing what happened in it."""

from pathlib import Path
from typing import TYPE_CHECKING

from coda_agent.agent.events import Event, RunState, read_events, summary
from coda_agent.agent.workspace import Run, Workspace
from coda_agent.primitives.errors import WorkspaceError
from coda_agent.primitives.suggest import near_matches

if TYPE_CHECKING:
    from rich.console import RenderableType


def find(workspace: Workspace, name: str) -> Run:
    """A run by its name, by any part of it that no other run has, as "last", or by its folder.

    Raises:
        WorkspaceError: there is none, or more than one.
    """
    if (Path(name) / "events.jsonl").is_file():
        return Run(Path(name).resolve().name, Path(name).resolve())
    runs = {run.id: run for run in everything(workspace)}
    found = [id for id in runs if name in id]
    if name == "last" and runs:
        found = [max(runs)]
    if name in runs or len(found) == 1:
        return runs[name if name in runs else found[0]]
    hint = near_matches(name, found or runs) or "there are no runs yet"
    raise WorkspaceError(f"{len(found) or 'no'} runs are called {name!r}", hint=hint)


def everything(workspace: Workspace) -> list[Run]:
    """Every run of a workspace, oldest first."""
    logs = (workspace.root / "logs" / "runs").glob("*/events.jsonl")
    return [Run(path.parent.name, path.parent) for path in sorted(logs)]


def state(run: Run) -> RunState:
    """How a run stands."""
    return summary(read_events(run.folder / "events.jsonl"))


def timeline(run: Run) -> "RenderableType":
    """What was tried, what was said, what it cost: a table for a terminal or a page."""
    from rich.console import Group
    from rich.table import Table
    from rich.text import Text

    events = read_events(run.folder / "events.jsonl")
    about = summary(events)
    table = Table(show_edge=False, pad_edge=False, expand=True)
    for column in ("time", "step", "what", "result", "USD"):
        right = column in ("step", "USD")
        table.add_column(column, justify="right" if right else "left", vertical="top")
    step = 0
    for event in events:
        step += event.type == "response"
        if row := _row(event):
            usd = event.data.get("usd")
            cells = [event.time[11:19], str(step or ""), *row, f"{usd:.4f}" if usd else ""]
            table.add_row(*(Text(cell) for cell in cells))
    head = f"{run.id}\n{about.kind} of {about.spec} by {about.author}: {about.outcome}"
    head += f" ({about.reason or about.error})" * bool(about.reason or about.error)
    head += f", {about.level}" * bool(about.level) + f", commit {about.commit}" * bool(about.commit)
    head += f"; {about.steps} steps, ${about.usd:.2f}" * bool(about.steps)
    return Group(Text(head), Text(), table)


def _row(event: Event) -> tuple[str, str] | None:
    """An event as (what, result); None for those that add nothing to a reader."""
    data = event.data
    match event.type:
        case "response":
            said = (block.get("text") or block.get("thinking") for block in data["content"])
            words = " ".join(" ".join(text for text in said if text).split())
            return "model", f"{words[:400]}\n[{data['stop_reason']}]" if words else data[
                "stop_reason"
            ]
        case "tool.finished":
            mark = "" if data["ok"] else "error: "
            return data["name"], mark + "\n".join(data["text"].splitlines()[:6])
        case "request.failed":
            wait = data["wait_s"]
            return "call failed", data["error"] + (f"; again in {wait:.1f} s" if wait else "")
        case "candidate.saved":
            return "candidate", data.get("digest", "")
        case "limit" | "run.finished" | "gave.up" if data.get("reason"):
            return event.type, data["reason"]
        case "run.failed":
            return event.type, f"{data['error']}: {data['message']}"
        case "verdict" | "committed" | "unchanged" | "run.started":
            keys = ("author", "passed", "level", "commit")
            return event.type, ", ".join(f"{key} {data[key]}" for key in keys if data.get(key))
        case _:
            return None
