"""One call of a tool, for a shell or for an agent.

No run is held open between calls: each takes its run up from the log. So a run goes on from a shell
where MCP left it, and a process that is killed between calls loses nothing.
"""

import contextlib
from collections.abc import Iterator
from dataclasses import dataclass, field

from coda_agent.agent import pipeline
from coda_agent.agent import runs as past
from coda_agent.agent.authors import agents_name
from coda_agent.agent.device import Device
from coda_agent.agent.events import RunStarted
from coda_agent.agent.judge import Observer
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.log import RunLog
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workbench import TOOLS, Workbench, open_bench
from coda_agent.agent.workspace import Run, Workspace, resolve_spec
from coda_agent.primitives.errors import CodaError, MachineError, WorkspaceError
from coda_agent.primitives.suggest import near_matches
from coda_agent.specs import load_spec

INTERRUPTED = "interrupted: this call did not finish; it may have had its effect"


@dataclass(frozen=True)
class Call:
    """A call of a tool.

    Attributes:
        run: The run to go on with, as `runs.find` takes it; else the one that is open.
        spec: Opens a run of this spec, unless `run` is one that goes on.
        author, device: Of a run that is opened.
        commit: Whether this call, or a run that it opens, commits what passes.
    """

    tool: str
    given: JsonObject = field(default_factory=JsonObject)
    run: str | None = None
    spec: str | None = None
    author: str = "cli"
    device: Device = "auto"
    commit: bool = True


def perform(workspace: Workspace, call: Call, observer: Observer) -> Reply:
    """Do a call; the document is the tool's result with the run.

    Raises:
        CodaError: there is no such tool, run or spec; or the input does not fit and there is no run
            yet, which then is not begun.
    """
    if call.tool not in TOOLS:
        raise CodaError(f"no tool named {call.tool!r}", hint=near_matches(call.tool, TOOLS))
    run = _run(workspace, call)
    with _opened(workspace, run, call, observer) as bench:
        over = bench.state.over
        result = pipeline.drive(bench, bench.call(call.tool, call.given))
        if bench.state.over and not (over and bench.state.finished):
            bench.finish()
    others = _other_runs(workspace, bench.run) if run is None else ""
    code = REFUSED if result.failed else 0
    if not result.ok:
        code = (MachineError if result.data.get("lacks") else CodaError).exit_code
    document = {"run": bench.run.id, "opened": run is None, **result.model_dump(mode="json")}
    text = f"{result.text}{others}\n\nrun {bench.run.id}"
    return Reply(document, text, code, err=not result.ok)


def end(workspace: Workspace, run: Run, reason: str) -> None:
    """End a run for another's reason, unless it has ended.

    Raises:
        WorkspaceError: another process works on it.
    """
    with RunLog(run.folder / "events.jsonl") as log:
        if not log.state.finished and log.state.failure is None:
            spec = load_spec(run.folder / "spec.md")
            open_bench(workspace, run, spec, log).finish(reason, final=False)


def _other_runs(workspace: Workspace, run: Run) -> str:
    """Name the open runs beside one that was opened, for a shell."""
    others = ((x.id, state) for x, state in past.open_ones(workspace) if x.id != run.id)
    names = [name for name, state in others if not state.finished]
    more = f" and {len(names) - 3} more" if len(names) > 3 else ""
    return f"\n\nopen too: {', '.join(names[:3])}{more}; --run NAME goes on with one" * bool(names)


def _run(workspace: Workspace, call: Call) -> Run | None:
    """Find a call's run; None where it begins one.

    `read_spec` of a spec whose run is over, or of whose run the spec is another by now, begins one.
    """
    if call.run is None:
        if call.spec is not None:
            return None
        if found := next(past.open_ones(workspace), None):
            return found[0]
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
def _opened(
    workspace: Workspace, run: Run | None, call: Call, observer: Observer
) -> Iterator[Workbench]:
    """Open a run's workbench, or a new one; answer a killed call."""
    if run is None:
        TOOLS[call.tool].parsed(call.given)  # what does not fit begins no run
        path = resolve_spec(str(call.spec), workspace)
        author = agents_name(call.author)
        begin = RunStarted(author=author, device=call.device, commit=call.commit)
        opened = pipeline.opened(workspace, path, begin, observer)
    else:
        opened = pipeline.reopened(workspace, run, observer)
    with opened as bench:
        bench.state.commits &= call.commit
        if begun := bench.state.begun:
            bench.refuse(begun.id, begun.name, INTERRUPTED)
        yield bench
