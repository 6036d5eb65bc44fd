"""The workbench over MCP: the same tools, for any agent that speaks the protocol, on stdio.

- Every tool takes a spec's name besides its own input; each spec has one workbench, whose run is
  logged and judged like any other, under the author `mcp:<client>`. A run that is over, or whose
  spec is another by now, is followed by a new one at the next `read_spec`.
- A fault of ours ends its run and leaves the others open.
- Calls run one after the other in a thread, so that the connection answers and progress is told
  meanwhile. What libraries print does not reach the client: the transport keeps stdout to itself.
"""

import traceback
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent import pipeline, prompt
from coda_agent.agent.workbench import NEXT, TOOLS, Workbench
from coda_agent.agent.workbench.registry import Result
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

_SPEC = {"type": "string", "description": "Name of the spec this is about, or a path to one."}
_EYES = ("gate.started", "gate.progress")
"""Events a client is told of while it waits."""


class Desk:
    """The workbenches of one connection, by spec."""

    def __init__(self, workspace: Workspace, device: pipeline.Device, *, commit: bool) -> None:
        self.workspace, self.commit = workspace, commit
        self.device: pipeline.Device = device
        self._open: dict[Path, tuple[Workbench, ExitStack]] = {}

    def call(
        self, name: str, given: dict[str, Any], client: str, observer: Callable[..., None]
    ) -> tuple[Result, str]:
        """One tool call: its result, and the run it belongs to."""
        try:
            path = self.workspace.resolve_spec(str(given.pop("spec", "")))
            bench, stack = self._taken(path, name, client)
        except (CodaError, OSError) as error:
            return Result(ok=False, text=str(error)), ""
        bench.log.observer = observer
        try:
            with stack:  # what is raised here fails the run
                result = bench.call(name, given)
                if bench.state.over and bench.reason is None:
                    bench.finish()
                self._open[path] = bench, stack.pop_all()
        except Exception as error:
            traceback.print_exc()
            failed = f"this run failed: {type(error).__name__}: {error} ({NEXT})"
            result = Result(ok=False, text=failed)
        return result, bench.run.id

    def _taken(self, path: Path, name: str, client: str) -> tuple[Workbench, ExitStack]:
        """The workbench of a spec and what closes it, out of those that are open."""
        bench, stack = self._open.pop(path, (None, ExitStack()))
        if bench and name == "read_spec":
            spec = bench.spec
            changed = self.workspace.differing_spec(spec.name, spec.text) is not None
            if bench.state.over or (changed and self.commit):
                _ended(bench, stack, "its spec was changed")
                bench = None
        if bench is None:
            opened = pipeline.opened(
                self.workspace, path, f"mcp:{client}", lambda *_: None,
                device=self.device, commit=self.commit,
            )  # fmt: skip
            bench = stack.enter_context(opened)
        return bench, stack

    def close(self) -> None:
        """Ends the runs that are still open; each can be taken up again."""
        while self._open:
            _, (bench, stack) = self._open.popitem()
            try:
                _ended(bench, stack, "the client left")
            except Exception:
                traceback.print_exc()  # and the next one is ended all the same


def _ended(bench: Workbench, stack: ExitStack, reason: str) -> None:
    """Closes a run, which ends for `reason` where it has not ended."""
    with stack:
        if bench.reason is None:
            bench.finish(reason, final=False)


def server(desk: Desk) -> "Server[Any]":
    """The MCP server of a desk."""
    import anyio
    import mcp_types as types
    from mcp.server.lowlevel import Server

    turn = anyio.Lock()

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(**described(name)) for name in TOOLS])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        about = context.session.client_params
        client = about.client_info.name if about else "unknown"
        told = 0

        def observer(type: str, data: dict[str, Any]) -> None:
            nonlocal told
            if type in _EYES:
                told += 1  # the protocol wants a number that grows; the gates' counts start over
                count = f" {data['done']}/{data['total']}" if "done" in data else ""
                note = f"{data.get('gate')}{count} {data.get('note') or ''}".strip()
                anyio.from_thread.run(context.session.report_progress, told, None, note)

        async with turn:
            result, run = await anyio.to_thread.run_sync(
                desk.call, params.name, dict(params.arguments or {}), client, observer
            )
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=result.text)],
            structured_content={"run": run, **result.model_dump(mode="json")},
            is_error=not result.ok,
        )

    told = {**prompt.instructions(), "specs": f"# The specs\n\n{_specs(desk.workspace)}"}
    return Server(
        "coda-agent",
        instructions=prompt.joined(told),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def described(name: str) -> dict[str, Any]:
    """A tool as MCP lists it: its schema with the spec as a further required field."""
    tool = TOOLS[name]
    schema = tool.schema()
    schema["properties"] = {"spec": _SPEC, **schema["properties"]}
    schema["required"] = ["spec", *schema.get("required", [])]
    return {"name": name, "description": tool.description, "input_schema": schema}


def serve(desk: Desk) -> None:
    """Serves on stdin and stdout until the client leaves."""
    import anyio
    from mcp.server.stdio import stdio_server

    async def main() -> None:
        made = server(desk)
        async with stdio_server() as (read, write):
            await made.run(read, write, made.create_initialization_options())

    try:
        anyio.run(main)
    finally:
        desk.close()


def _specs(workspace: Workspace) -> str:
    done = {kernel.name for kernel in workspace.kernels()}
    names = sorted(workspace.spec_names())
    return "\n".join(f"- {name}{' (has a kernel)' if name in done else ''}" for name in names)
