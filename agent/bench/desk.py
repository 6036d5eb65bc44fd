"""One call of a tool, for whoever asks: a shell, or an agent over MCP.

No run is held open between calls: each takes its run up from the log. So a run goes on from a shell
where MCP left it, and a bench that is killed between calls loses nothing.
"""

import contextlib
import json
import time
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict

from coda_agent.agent import events as e
from coda_agent.agent import pipeline
from coda_agent.agent import runs as past
from coda_agent.agent.authors import agents_name
from coda_agent.agent.device import Device
from coda_agent.agent.judge import Observer
from coda_agent.agent.log import RunLog, read_events
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workbench import TOOLS, Workbench, open_bench
from coda_agent.agent.workspace import Run, Workspace, find
from coda_agent.primitives.errors import CodaError, MachineError, WorkspaceError
from coda_agent.primitives.suggest import near_matches
from coda_agent.specs import load_spec

_RESTS = ("tool.finished", "run.failed", "run.resumed")
"""The events after which a run is in the middle of nothing."""
INTERRUPTED = "interrupted: this call did not finish; it may have had its effect"


class Call(BaseModel):
    """What is asked of the bench.

    Attributes:
        tool: Which tool.
        given: Its input; texts, lists and numbers as they are.
        words: More of its input as a shell has it: what is no text there is JSON, or has commas.
        run: The run to go on with, as `runs.find` takes it; else the one that is open.
        spec: Opens a run of this spec, unless `run` is one that goes on.
        author, device, commit: Of a run that is opened.
        folder: Where paths and the workspace are looked up.
        watched: Whether whoever asks wants to be told of events.
    """

    model_config = ConfigDict(extra="forbid", frozen=True)

    tool: str
    given: dict[str, Any] = {}
    words: dict[str, str] = {}
    run: str | None = None
    spec: str | None = None
    author: str = "cli"
    device: Device = "auto"
    commit: bool = True
    folder: str = "."
    watched: bool = False


def here(asked: dict[str, Any], observer: Observer) -> Reply:
    """The reply to a call, done by this process; raises as `replied`."""
    return replied(Call.model_validate(asked), observer)


def replied(call: Call, observer: Observer) -> Reply:
    """The reply to a call: its document is the tool's result with the name of the run.

    Raises:
        CodaError: there is no such tool, run or spec; or the input does not fit and there is no run
            yet, which then is not begun.
    """
    if call.tool not in TOOLS:
        raise CodaError(f"no tool named {call.tool!r}", hint=near_matches(call.tool, TOOLS))
    workspace = find(Path(call.folder))
    given = call.given | typed(call.tool, call.words)
    run = _run(workspace, call)
    with _taken(workspace, run, call, given, observer) as bench:
        over = bench.state.over
        result = pipeline.drive(bench, bench.call(call.tool, given))
        if bench.state.over and not (over and bench.state.finished):
            bench.finish()
    if run is None:
        result.text += _others(workspace, bench.run)
    code = REFUSED if result.failed else 0
    if not result.ok:
        code = (MachineError if result.data.get("lacks") else CodaError).exit_code
    document = {"run": bench.run.id, "opened": run is None, **result.model_dump(mode="json")}
    return Reply(document, f"{result.text}\n\nrun {bench.run.id}", code, err=not result.ok)


def _others(workspace: Workspace, opened: Run) -> str:
    """Which runs are open beside one that was opened, and were not left."""
    found = (run for run in past.open_ones(workspace) if run.id != opened.id)
    names = [run.id for run in found if not past.state(run).finished]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    said = f"\n\nopen too: {', '.join(names[:3])}{more}; --run NAME goes on with one"
    return said * bool(names)


def typed(tool: str, words: Mapping[str, str]) -> dict[str, Any]:
    """Words as the types that the tool's schema has."""
    fields = TOOLS[tool].schema()["properties"]
    typed: dict[str, Any] = {}
    for key, value in words.items():
        kind = fields.get(key, {}).get("type")
        if kind == "array" and not value.startswith("["):
            typed[key] = [part.strip() for part in value.split(",")]
        elif kind != "string" and value[:1] in ("[", "{"):
            try:
                typed[key] = json.loads(value)
            except ValueError as error:
                raise CodaError(f"{key} is not JSON: {error}") from error
        else:
            typed[key] = value
    return typed


def _run(workspace: Workspace, call: Call) -> Run | None:
    """The run that a call is about; None where it begins one.

    `read_spec` of a spec whose run is over, or of whose run the spec is another by now, begins one.
    """
    if call.run is None:
        if call.spec is not None:
            return None
        if run := next(past.open_ones(workspace), None):
            return run
        raise WorkspaceError("no run is open", hint="read_spec with a spec begins one")
    run = past.find(workspace, call.run)
    if call.spec is None or call.tool != "read_spec":
        return run
    state = past.state(run)
    if state.over is not None:
        return None
    if state.commits and workspace.differing_spec(
        str(state.spec), (run.folder / "spec.md").read_text("utf-8")
    ):
        end(workspace, run, "its spec was changed")
        return None
    return run


@contextlib.contextmanager
def _taken(
    workspace: Workspace, run: Run | None, call: Call, given: dict[str, Any], observer: Observer
) -> Iterator[Workbench]:
    """The workbench of a run, or of a new one; a call that a killed process left is answered."""
    if run is None:
        TOOLS[call.tool].parsed(given)  # what does not fit begins no run
        path = workspace.resolve_spec(str(call.spec))
        author = agents_name(call.author)
        opened = pipeline.opened(
            workspace, path, author, observer, device=call.device, commit=call.commit
        )
    else:
        opened = pipeline.reopened(workspace, run, observer)
    with opened as bench:
        if begun := bench.state.begun:
            bench.refuse(begun.id, begun.name, INTERRUPTED)
        yield bench


def end(workspace: Workspace, run: Run, reason: str) -> None:
    """Ends a run for a reason that is not its author's; one that has ended stays as it is.

    Raises:
        WorkspaceError: another process works on it.
    """
    with RunLog(run.folder / "events.jsonl") as log:
        if not log.state.finished and log.state.failure is None:
            spec = load_spec(run.folder / "spec.md")
            open_bench(workspace, run, spec, log).finish(reason, final=False)


def end_lost(folder: Path, since: float) -> list[str]:
    """Ends the runs that a killed process left in the middle of a call.

    Args:
        folder: Of the workspace.
        since: Seconds of the epoch before which nothing of them was written.

    Returns:
        Their names.
    """
    ended: list[str] = []
    for path in sorted((folder / "logs" / "runs").glob("*/events.jsonl")):
        with contextlib.suppress(FileNotFoundError, WorkspaceError):
            if path.stat().st_mtime >= since - 1.0 and _ended(path):
                ended.append(path.parent.name)
    return ended


def _ended(log: Path) -> bool:
    """Whether this run was in the middle of something, which is its end now."""
    for _ in range(10):  # the process may take a moment to go
        try:
            with RunLog(log) as writing:
                state = writing.state
                resting = read_events(log)[-1].type in _RESTS
                if state.finished or (resting and not state.over):
                    return False
                if begun := state.begun:
                    id, name = begun.id, begun.name
                    writing.append(e.ToolFinished(id=id, name=name, ok=False, text=INTERRUPTED))
                if state.over:
                    writing.append(e.RunFinished(reason=state.over))
                else:
                    writing.append(e.RunFailed(error="Lost", message="the bench was killed"))
                return True
        except WorkspaceError:
            time.sleep(0.1)
    return False
