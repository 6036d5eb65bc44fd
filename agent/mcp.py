"""The workbench over MCP on stdio: the same tools for any agent.

- Every tool may name a spec besides its own input; else it is about the spec of the call before.
  Each spec has one run, logged and judged like any other, under the author `mcp:<client>`, or the
  name in CODA_AGENT_AUTHOR. It belongs to workspace, spec and author: the next connection goes on
  with it. A run that is over, or whose spec is another by now, is followed by a new one at the next
  `read_spec`.
- `list_specs` and `new_spec` are about no run. What `new_spec` drafts is the spec of the next call.
- Calls are done one after the other, by a warm process (`calls.py`): one that the client cancels is
  killed with all that it started, and the next is answered meanwhile.
- A fault of ours ends its run and leaves the others open.
"""

import itertools
import json
import os
import re
import sys
import tomllib
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

from coda_agent.agent import prompt, references
from coda_agent.agent import runs as past
from coda_agent.agent.calls import Calls
from coda_agent.agent.device import Device
from coda_agent.agent.judge import Observer
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.reply import BUG, Reply, answered
from coda_agent.agent.session import Call, end
from coda_agent.agent.workbench import NEXT, TOOLS
from coda_agent.agent.workbench.registry import Result, registry, told, tool
from coda_agent.agent.workspace import Workspace, resolve_spec, spec_names
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import write_whole
from coda_agent.specs import load_spec
from coda_agent.specs.source import extracted

if TYPE_CHECKING:
    from mcp.server.lowlevel import Server

_SPEC = "A spec's name or path; else that of the last call. Other tools take it, too."
_WRITE = (
    "Write a kernel for the spec {spec} with coda-agent's tools: read_spec; compose, which may "
    "write all of it or leave holes; write_candidate or edit_candidate; check at level interpret "
    "until it passes; submit; then say what `use` says. Where it cannot be expressed, give_up with "
    "the reason."
)
_EYES = ("gate.started", "gate.progress")
"""Events a client is told of while it waits."""


class Connection:
    """The runs of one connection, by spec.

    Args:
        device, commit: Of runs that are opened.
        calls: What does the calls.
    """

    def __init__(self, workspace: Workspace, device: Device, calls: Calls, *, commit: bool) -> None:
        self.workspace, self.commit, self.calls = workspace, commit, calls
        self.device: Device = device
        self._runs: dict[Path, str] = {}
        self._last: Path | None = None

    def call(
        self, name: str, given: JsonObject, client: str, observer: Observer
    ) -> tuple[Result, str]:
        """Do one tool call: its result, and the run it belongs to."""
        if door := DOORS.get(name):
            reply = answered(lambda: Reply(door.function(self.workspace, **door.parsed(given))))
            if isinstance(result := reply.document, Result):
                if made := result.data.get("spec"):
                    self._last = resolve_spec(made, self.workspace)
                return result, ""
            return Result(ok=False, text=reply.text.removeprefix("error: ")), ""
        try:
            path = self._spec(given.pop("spec", None))
        except (CodaError, OSError) as error:
            return Result(ok=False, text=str(error)), ""
        author = os.environ.get("CODA_AGENT_AUTHOR") or f"mcp:{client}"
        if path not in self._runs and (left := self._left(path, author)):
            self._runs[path] = left
        run = self._runs.get(path)
        call = Call(name, given, run, str(path), author, self.device, self.commit)
        reply = answered(lambda: self.calls.perform(self.workspace, call, observer))
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

    def _left(self, path: Path, author: str) -> str | None:
        """Find the run of a spec that an earlier connection left open."""
        for run, state in past.open_ones(self.workspace):
            text = run.folder / "spec.md"
            mine = state.author == author and state.spec == path.stem
            whole = mine and not state.failure and text.is_file()
            if whole and text.read_text("utf-8") == load_spec(path).text:
                return run.id
        return None

    def _spec(self, name: object) -> Path:
        """Find the spec that is named, or that of the last call."""
        if name is not None:
            return resolve_spec(str(name), self.workspace)
        if self._last is None:
            raise CodaError("no run is open", hint="read_spec with a spec's name opens one")
        return self._last

    def close(self) -> None:
        """End the runs that are open; each can be taken up again."""
        self.calls.close()
        while self._runs:
            _, run = self._runs.popitem()
            try:
                end(self.workspace, past.find(self.workspace, run), "the client left")
            except Exception:
                traceback.print_exc()  # and the next one is ended all the same


@tool(reads=True)
def list_specs(workspace: Workspace, word: Annotated[str, told("Part of a name.")] = "") -> Result:
    """The specs, and which have a kernel."""
    done = {kernel.name for kernel in workspace.kernels()}
    names = sorted(spec_names(workspace))
    found = [f"{x}{' (has a kernel)' * (x in done)}" for x in names if word.lower() in x]
    return Result(text="\n".join(found) or f"no spec has {word!r} in its name")


@tool()
def new_spec(
    workspace: Workspace,
    function: Annotated[str, told("Its Python, with its imports.")],
    shapes: Annotated[
        list[str],
        told("An example for each argument: x=4096,4096 or t=4096:int64; x= is a number."),
    ],
    name: Annotated[str, told("Of the spec; else the function's.")] = "",
) -> Result:
    """Drafts a spec from a PyTorch function, in a sandbox; the next call is about it."""
    source = extracted(function, "function")
    path = references.new_spec(workspace.specs, source, shapes, name or None)
    said = f"{path.stem}: drafted, {path}\n\n{path.read_text('utf-8')}"
    return Result(text=said, data={"spec": path.stem})


DOORS = registry(sys.modules[__name__])
"""Tools that are about no run."""


def server(connection: Connection) -> "Server[Any]":
    """Make the MCP server of a connection."""
    import anyio
    import mcp_types as types
    from mcp.server.lowlevel import Server

    turn = anyio.Lock()

    async def list_tools(context: object, params: object) -> types.ListToolsResult:
        names = [*DOORS, *TOOLS]
        return types.ListToolsResult(tools=[types.Tool(**described(name)) for name in names])

    async def list_prompts(context: object, params: object) -> types.ListPromptsResult:
        spec = types.PromptArgument(name="spec", description="Its name.", required=True)
        about = {"description": "Write a kernel for a spec.", "arguments": [spec]}
        return types.ListPromptsResult(prompts=[types.Prompt(name="write_kernel", **about)])

    async def get_prompt(
        context: object, params: types.GetPromptRequestParams
    ) -> types.GetPromptResult:
        text = _WRITE.format(spec=(params.arguments or {}).get("spec", ""))
        said = types.TextContent(type="text", text=text)
        return types.GetPromptResult(messages=[types.PromptMessage(role="user", content=said)])

    async def call_tool(context: Any, params: types.CallToolRequestParams) -> types.CallToolResult:
        about = context.session.client_params
        client = re.sub(r"[^\w.@/+ -]", "_", about.client_info.name)[:70] if about else "unknown"
        counted = itertools.count(1)  # the protocol wants a number that grows; the gates start over

        def observer(type: str, data: JsonObject) -> None:
            if type in _EYES:
                count = f" {data['done']}/{data['total']}" if "done" in data else ""
                note = f"{data.get('gate')}{count} {data.get('note') or ''}".strip()
                anyio.from_thread.run(context.session.report_progress, next(counted), None, note)

        given = params.name, dict(params.arguments or {}), client, observer
        async with turn:
            try:
                result, run = await anyio.to_thread.run_sync(
                    connection.call, *given, abandon_on_cancel=True
                )
            except anyio.get_cancelled_exc_class():
                connection.calls.stop()
                raise
        return types.CallToolResult(
            content=[types.TextContent(type="text", text=result.text)],
            structured_content={"run": run, **result.model_dump(mode="json")},
            is_error=result.failed,
        )

    return Server(
        "coda-agent",
        instructions=prompt.joined(prompt.instructions()),
        on_list_tools=list_tools,
        on_call_tool=call_tool,
        on_list_prompts=list_prompts,
        on_get_prompt=get_prompt,
    )


def described(name: str) -> JsonObject:
    """Describe a tool as MCP lists it, the spec another field.

    A model reads the whole list before it begins, so what each tool would repeat is said once.
    """
    known = DOORS.get(name) or TOOLS[name]
    schema = known.schema()
    del schema["additionalProperties"]  # what is misspelt is refused, with its name
    if name in TOOLS:
        spec = {"type": "string"} | ({"description": _SPEC} if name == "read_spec" else {})
        schema["properties"] = {"spec": spec, **schema["properties"]}
    output, closing = {"type": "object"}, name in ("submit", "give_up")
    hints = {"read_only_hint": True} if known.reads else {"destructive_hint": closing}
    about = {"description": known.description, "input_schema": schema, "output_schema": output}
    return {"name": name, "annotations": hints, **about}


def serve(connection: Connection) -> None:
    """Serve on stdin and stdout until the client leaves."""
    import anyio
    from mcp.server.stdio import stdio_server

    async def main() -> None:
        made = server(connection)
        async with stdio_server() as (read, write):
            await made.run(read, write, made.create_initialization_options())

    connection.calls.start()
    try:
        anyio.run(main)
    finally:
        connection.close()


def install(client: str, workspace: Workspace) -> str:
    """Write the server into a client's configuration, beside what is there.

    Raises:
        CodaError: the configuration cannot be read.
    """
    command = {"command": sys.executable, "args": ["-m", "coda_agent.agent", "mcp"]}
    codex = client == "codex"
    path = Path.home() / ".codex" / "config.toml" if codex else workspace.root / ".mcp.json"
    text = path.read_text("utf-8") if path.is_file() else ""
    try:
        if codex:
            text += _table(command, tomllib.loads(text), workspace)
        else:
            known = json.loads(text or "{}")
            known.setdefault("mcpServers", {})["coda-agent"] = command
            text = json.dumps(known, indent=2) + "\n"
    except (ValueError, AttributeError, TypeError) as error:
        raise CodaError(f"{path} is no configuration of servers: {error}") from error
    path.parent.mkdir(parents=True, exist_ok=True)
    write_whole(path, text)
    return f"{path}: coda-agent is a server; start {client} in {workspace.root}"


def _table(command: JsonObject, known: JsonObject, workspace: Workspace) -> str:
    """Write what a configuration of Codex lacks.

    It is a user's, and names one workspace.

    Raises:
        CodaError: it names another.
    """
    # A check compiles, and a submit compiles every tile.
    own = {**command, "cwd": str(workspace.root), "tool_timeout_sec": 900}
    if there := known.get("mcp_servers", {}).get("coda-agent"):
        if (other := there.get("cwd")) != own["cwd"]:
            said = f"in Codex's configuration coda-agent serves {other} already"
            raise CodaError(said, hint="take that table out first")
        return ""
    lines = [f"{key} = {json.dumps(value)}" for key, value in own.items()]
    return "\n".join(["\n[mcp_servers.coda-agent]", *lines, ""])
