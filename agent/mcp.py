"""The workbench over MCP: the same tools, for any agent that speaks the protocol, on stdio.

- Every tool may name a spec besides its own input; else it is about the spec of the call before.
  Each spec has one run, logged and judged like any other, under the author `mcp:<client>`, or the
  name in CODA_AGENT_AUTHOR. A run that is over, or whose spec is another by now, is followed by a
  new one at the next `read_spec`.
- This process is the warm one: it has torch and the compile workers ready before the first call.
  A thread does the calls, one after the other, while another answers the connection and tells
  progress.
- A fault of ours ends its run and leaves the others open.
"""

import importlib
import os
import re
import threading
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent import execution, prompt
from coda_agent.agent import runs as past
from coda_agent.agent.device import Device
from coda_agent.agent.judge import Observer
from coda_agent.agent.reply import BUG, answered
from coda_agent.agent.session import Call, end, perform
from coda_agent.agent.workbench import NEXT, TOOLS
from coda_agent.agent.workbench.registry import Result
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

_SPEC = {
    "type": "string",
    "description": "Name of the spec this is about, or a path to one; else that of the last call.",
}
_EYES = ("gate.started", "gate.progress")
"""Events a client is told of while it waits."""


class Connection:
    """The runs of one connection, by spec."""

    def __init__(self, workspace: Workspace, device: Device, *, commit: bool) -> None:
        self.workspace, self.commit = workspace, commit
        self.device: Device = device
        self._runs: dict[Path, str] = {}
        self._last: Path | None = None

    def call(
        self, name: str, given: dict[str, Any], client: str, observer: Observer
    ) -> tuple[Result, str]:
        """One tool call: its result, and the run it belongs to."""
        try:
            path = self._spec(given.pop("spec", None))
        except (CodaError, OSError) as error:
            return Result(ok=False, text=str(error)), ""
        call = Call(
            name, given, self._runs.get(path), str(path),
            os.environ.get("CODA_AGENT_AUTHOR") or f"mcp:{client}", self.device, self.commit,
        )  # fmt: skip
        reply = answered(lambda: perform(self.workspace, call, observer))
        document: Any = reply.document
        if "error" in document:
            text = reply.text.removeprefix("error: ")
            if reply.code == BUG:  # it ended the run
                text = f"this run failed: {document['error']['message']} ({NEXT})"
                self._runs.pop(path, None)
            return Result(ok=False, text=text), ""
        run, opened = document.pop("run"), document.pop("opened")
        self._runs[path], self._last = run, path
        result = Result.model_validate(document)
        if opened:
            result.text += f"\n\nrun {run}"
        return result, run

    def _spec(self, name: Any) -> Path:
        """The spec that is named, or that of the last call."""
        if name is not None:
            return self.workspace.resolve_spec(str(name))
        if self._last is None:
            raise CodaError("no run is open", hint="read_spec with a spec's name opens one")
        return self._last

    def close(self) -> None:
        """Ends the runs that are still open; each can be taken up again."""
        while self._runs:
            _, run = self._runs.popitem()
            try:
                end(self.workspace, past.find(self.workspace, run), "the client left")
            except Exception:
                traceback.print_exc()  # and the next one is ended all the same


def server(connection: Connection) -> "Server[Any]":
    """Make the MCP server of a connection."""
    import anyio
    import mcp_types as types
    from mcp.server.lowlevel import Server

    turn = anyio.Lock()

    async def list_tools(context: Any, params: Any) -> types.ListToolsResult:
        return types.ListToolsResult(tools=[types.Tool(**described(name)) for name in TOOLS])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        about = context.session.client_params
        client = re.sub(r"[^\w.@/+ -]", "_", about.client_info.name)[:70] if about else "unknown"
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
                connection.call, params.name, dict(params.arguments or {}), client, observer
            )
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=result.text)],
            structured_content={"run": run, **result.model_dump(mode="json")},
            is_error=result.failed,
        )

    told = {**prompt.instructions(), "specs": f"# The specs\n\n{_specs(connection.workspace)}"}
    return Server(
        "coda-agent",
        instructions=prompt.joined(told),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
    )


def described(name: str) -> dict[str, Any]:
    """A tool as MCP lists it: its schema with the spec as a further field."""
    tool = TOOLS[name]
    schema = tool.schema()
    schema["properties"] = {"spec": _SPEC, **schema["properties"]}
    return {"name": name, "description": tool.description, "input_schema": schema}


def serve(connection: Connection) -> None:
    """Serve on stdin and stdout until the client leaves."""
    import anyio
    from mcp.server.stdio import stdio_server

    async def main() -> None:
        made = server(connection)
        async with stdio_server() as (read, write):
            await made.run(read, write, made.create_initialization_options())

    execution.executor().start(gpu=False)  # which compiles' workers import while an agent reads
    threading.Thread(target=importlib.import_module, args=("torch",), daemon=True).start()
    try:
        anyio.run(main)
    finally:
        connection.close()


def _specs(workspace: Workspace) -> str:
    done = {kernel.name for kernel in workspace.kernels()}
    names = sorted(workspace.spec_names())
    return "\n".join(f"- {name}{' (has a kernel)' if name in done else ''}" for name in names)
