"""The workbench over MCP: the same tools, for any agent that speaks the protocol, on stdio.

- Every tool may name a spec besides its own input; else it is about the spec of the call before.
  Each spec has one run, logged and judged like any other, under the author `mcp:<client>`, or the
  name in CODA_AGENT_AUTHOR. A run that is over, or whose spec is another by now, is followed by a
  new one at the next `read_spec`.
- The workspace's bench does the calls (`bench/`), one after the other, while this process answers
  the connection and tells progress.
- A fault of ours ends its run and leaves the others open.
"""

import os
import re
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.agent import prompt
from coda_agent.agent import runs as past
from coda_agent.agent.bench.client import VARIABLE, Bench
from coda_agent.agent.bench.desk import end, here
from coda_agent.agent.device import Device
from coda_agent.agent.reply import BUG, Reply, answered
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

Observer = Callable[[str, Any], None]
Ask = Callable[[dict[str, Any], Observer], Reply]
"""Has a call (`bench.desk.Call`, as data) done."""


def bench(workspace: Workspace) -> Ask:
    """The workspace's bench, or this process where there is to be none."""
    if os.environ.get(VARIABLE) == "off":
        return here
    found = Bench(workspace.root, lambda _: None)

    def ask(asked: dict[str, Any], observer: Observer) -> Reply:
        reply = found.call(asked, observer)
        reply.pop("printed")
        return Reply(**reply)

    return ask


class Desk:
    """The runs of one connection, by spec."""

    def __init__(self, workspace: Workspace, device: Device, ask: Ask, *, commit: bool) -> None:
        self.workspace, self.device, self.ask, self.commit = workspace, device, ask, commit
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
        asked = {
            "tool": name, "given": given, "run": self._runs.get(path), "spec": str(path),
            "author": os.environ.get("CODA_AGENT_AUTHOR") or f"mcp:{client}",
            "device": self.device, "commit": self.commit,
            "folder": str(self.workspace.root), "watched": True,
        }  # fmt: skip
        reply = answered(lambda: self.ask(asked, observer))
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
                desk.call, params.name, dict(params.arguments or {}), client, observer
            )
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=result.text)],
            structured_content={"run": run, **result.model_dump(mode="json")},
            is_error=result.failed,
        )

    told = {**prompt.instructions(), "specs": f"# The specs\n\n{_specs(desk.workspace)}"}
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
