"""The MCP server as a client meets it, through the protocol's own client library: a real process with
the real judge from a wrong candidate to the commit, and in this process the ends of runs."""

import json
import os
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, TextIO

import anyio
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters, stdio_client
from mcp_types import Implementation

from coda_agent.agent import judge, references, workspace
from coda_agent.agent.calls import Calls
from coda_agent.agent.events import Event
from coda_agent.agent.judge import GateResult, Observer, Verdict
from coda_agent.agent.judge.provenance import digests
from coda_agent.agent.log import read_events
from coda_agent.agent.mcp import Connection, install, server
from coda_agent.agent.reply import Reply, answered
from coda_agent.agent.session import INTERRUPTED, Call, perform
from coda_agent.agent.state import RunState
from coda_agent.agent.workbench import TOOLS
from coda_agent.primitives.errors import CodaError

ROOT = Path(__file__).parents[2]
SPEC = (ROOT / "specs" / "gemm_swiglu.md").read_text()
REFUSED = SPEC.replace("O: {shape: [M, N/2], dtype: T}", "O: {shape: [M, N/2], dtype: float32}")
"""A spec whose reference returns O in T."""
RIGHT = (ROOT / "generated" / "gemm_swiglu" / "kernel.py").read_text()


@pytest.fixture
def where(tmp_path: Path) -> workspace.Workspace:
    made, _ = workspace.init(tmp_path / "w")
    made.git("config", "user.name", "U")
    made.git("config", "user.email", "u@example.com")
    return made


def client(where: workspace.Workspace, stderr: TextIO, *options: str) -> Client:
    passed = ("PATH", "HOME", "PYTHONPATH", "XDG_CACHE_HOME", "QUACK_CACHE_DIR")
    env = {name: os.environ[name] for name in passed if name in os.environ}
    env["ANTHROPIC_API_KEY"] = "sk-ant-canary"
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "coda_agent.agent", "mcp", *options],
        env=env,
        cwd=where.root,
    )
    about = Implementation(name="tester", version="1")
    return Client(stdio_client(server, errlog=stderr), client_info=about)


class Here(Calls):
    """Does calls in this process, where a test puts another judge."""

    def perform(self, workspace: workspace.Workspace, call: Call, observer: Observer) -> Reply:
        return answered(lambda: perform(workspace, call, observer))


def proved(spec: Any, text: str, *_: Any, **__: Any) -> Verdict:
    """A judge that passes whatever it is given."""
    gate = GateResult(name="static", passed=True)
    return Verdict(passed=True, level="proved", gates=[gate], digests=digests(spec, text))


def said(result: Any) -> str:
    return result.content[0].text


def logs(where: workspace.Workspace) -> dict[str, list[Event]]:
    """The events of the workspace's runs, by run."""
    found = sorted((where.root / "logs" / "runs").glob("*/events.jsonl"))
    return {path.parent.name: read_events(path) for path in found}


def ends(events: list[Event]) -> list[Any]:
    """How a run ended, as often as it did."""
    return [e.data.get("reason") for e in events if e.type in ("run.finished", "run.failed")]


def test_an_agent_writes_a_kernel(where: workspace.Workspace) -> None:
    told: list[tuple[float, str | None]] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    stderr = where.root / "stderr"

    async def talk() -> None:
        async with client(where, stderr.open("w"), "--device", "cpu") as agent:
            listed = {tool.name: tool for tool in (await agent.list_tools()).tools}
            assert list(listed) == ["list_specs", "new_spec", *TOOLS]
            assert listed["check"].input_schema["required"] == ["level"]

            async def call(name: str, **given: Any) -> Any:
                given = {"spec": "gemm_swiglu", **given}
                return await agent.call_tool(name, given, progress_callback=progress)

            lost = await agent.call_tool("read_spec", {"spec": "gemm_swigl"})
            assert lost.is_error and "did you mean gemm_swiglu" in said(lost)
            assert "- gemm_swiglu: operands" in said(await call("read_spec"))
            assert "swiglu" in said(await call("list_primitives"))
            early = await call("submit")
            assert early.is_error and "there is no candidate yet" in said(early)
            await call("write_candidate", text=RIGHT.replace("silu", "silu_"))
            assert (await call("check", level="deep")).is_error
            gpu = await call("check", level="gpu")
            assert gpu.is_error and "needs a Hopper GPU" in said(gpu)
            await call("write_candidate", text="import os\n" + RIGHT)
            refused = await call("check", level="static")
            assert refused.is_error and refused.structured_content["data"]["passed"] is False
            assert not (await call("edit_candidate", old="import os\n", new="")).is_error
            done = await call("submit")
            assert "accepted as proved" in said(done), said(done)
            over = await call("log_tip", text="t", failing=1, passing=1)
            assert over.is_error and "a tip needs an attempt that failed" in said(over)
            await agent.call_tool("read_spec", {"spec": "gemm_rmsnorm"})

    anyio.run(talk)
    evidence = where.kernel("gemm_swiglu").evidence
    assert (evidence.author, evidence.level) == ("mcp:tester", "proved")
    assert where.kernel("gemm_swiglu").program.read_text() == RIGHT
    assert where.git("rev-list", "--count", "HEAD") == "1"
    assert "Traceback" not in stderr.read_text()
    log, other = sorted(logs(where).values(), key=len, reverse=True)
    assert (ends(log), ends(other)) == (["proved"], ["the client left"])
    assert (RunState.of(log).outcome, RunState.of(log).author) == ("passed", "mcp:tester")
    assert RunState.of(log).commit == where.git("rev-parse", "HEAD")
    numbers = [number for number, _ in told]
    assert len(numbers) > 4 and any("compile" in str(message) for _, message in told)
    assert "sk-ant-canary" not in str(log)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Any spec is admitted and any candidate passes: what follows is about runs."""
    monkeypatch.setattr(judge, "judge_candidate", proved)
    monkeypatch.setattr(references, "admitted", lambda spec: None)


def talk_to(connection: Connection, body: Callable[[Callable[..., Any]], Any]) -> None:
    """Has a client in this process talk to the server of a connection, and leave."""

    async def talk() -> None:
        async with Client(server(connection)) as agent:

            async def call(name: str, spec: str, **given: Any) -> Any:
                return await agent.call_tool(name, {"spec": spec, **given})

            await body(call)

    try:
        anyio.run(talk)
    finally:
        connection.close()


def test_each_run_ends_once_and_the_next_begins_with_read_spec(
    where: workspace.Workspace, quick: None
) -> None:

    async def body(call: Callable[..., Any]) -> None:
        await call("read_spec", "gemm_swiglu")
        assert "--run" not in said(await call("read_spec", "gemm_rope"))
        await call("write_candidate", "gemm_swiglu", text=RIGHT)
        submitted = await call("submit", "gemm_swiglu")
        assert "accepted as proved" in said(submitted)
        for name, given in [("write_candidate", {"text": RIGHT}), ("submit", {})]:
            late = await call(name, "gemm_swiglu", **given)
            assert late.is_error and said(late) == (
                "this run is over: proved (read_spec with the spec's name opens a new one)"
            )
        again = await call("read_spec", "gemm_swiglu")
        assert again.structured_content["run"] != submitted.structured_content["run"]
        assert not (await call("give_up", "gemm_swiglu", reason="enough")).is_error
        late = await call("check", "gemm_swiglu", level="static")
        assert late.is_error and said(late).startswith("this run is over: gave up: enough (read_sp")

    talk_to(Connection(where, "cpu", Here(), commit=True), body)
    assert sorted(str(ends(log)) for log in logs(where).values()) == [
        "['gave up: enough']", "['proved']", "['the client left']"
    ]  # fmt: skip


def test_a_fault_of_ours_ends_its_run_and_no_other(
    where: workspace.Workspace, quick: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    def broken(*_: Any, **__: Any) -> Any:
        raise RuntimeError("oops")

    monkeypatch.setattr(judge, "judge_candidate", broken)

    async def body(call: Callable[..., Any]) -> None:
        for spec in ("gemm_swiglu", "gemm_rope"):
            await call("write_candidate", spec, text=RIGHT)
        fault = await call("check", "gemm_swiglu", level="static")
        assert fault.is_error and "RuntimeError: oops" in said(fault)
        assert not (await call("read_spec", "gemm_rope")).is_error
        assert not (await call("write_candidate", "gemm_swiglu", text=RIGHT)).is_error

    talk_to(Connection(where, "cpu", Here(), commit=True), body)
    assert sorted(str(ends(log)) for log in logs(where).values()) == [
        "['the client left']", "['the client left']", "[None]"
    ]  # fmt: skip


def test_the_next_connection_goes_on_with_the_run(where: workspace.Workspace, quick: None) -> None:
    """Of the same client, spec and text; what another author has open is its own."""
    text = RIGHT + "# mine\n"

    async def first(call: Callable[..., Any]) -> None:
        await call("write_candidate", "gemm_swiglu", text=text)

    async def second(call: Callable[..., Any]) -> None:
        early = await call("read_candidate", "gemm_rope")
        assert early.is_error and "no candidate yet" in said(early)
        found = await call("read_candidate", "gemm_swiglu")
        assert said(found).startswith(text) and said(found).endswith("(not judged yet)")
        assert "gemm_swiglu has no kernel yet" in said(await call("use", "gemm_swiglu"))
        assert "accepted as proved" in said(await call("submit", "gemm_swiglu"))
        how = said(await call("use", "gemm_swiglu"))
        assert "load_kernel(Path(" in how and "D, O = gemm_swiglu(A, B)" in how

    for body in (first, second):
        talk_to(Connection(where, "cpu", Here(), commit=True), body)
    by_spec = sorted((log[0].data["spec"], ends(log)) for log in logs(where).values())
    assert by_spec == [
        ("gemm_rope", ["the client left"]), ("gemm_swiglu", ["the client left", "proved"])
    ]  # fmt: skip


def test_a_call_that_is_cancelled_stops_and_the_next_is_answered(
    where: workspace.Workspace,
) -> None:
    """With a gate at work; the candidate is there, and was not judged."""

    async def talk() -> None:
        async with client(where, sys.stderr, "--device", "cpu") as agent:
            with anyio.CancelScope() as waiting:

                async def told(progress: float, total: float | None, message: str | None) -> None:
                    if "compile" in str(message):
                        waiting.cancel()

                given = {"spec": "gemm_rmsnorm_rope"}
                await agent.call_tool("compose", given)
                await agent.call_tool("check", {"level": "interpret"}, progress_callback=told)
            assert waiting.cancelled_caught
            found = await agent.call_tool("read_candidate", {})
            assert said(found).endswith("(not judged yet)"), said(found)

    anyio.run(talk)
    ((_, log),) = logs(where).items()
    assert ("tool.finished", "check", INTERRUPTED) in [
        (e.type, e.data.get("name"), e.data.get("text")) for e in log
    ]
    assert "judged" not in [e.type for e in log] and ends(log) == ["the client left"]


FUNCTION = """
import torch

def squared_relu(x, w):
    return torch.relu(x @ w.T) ** 2
"""


def test_from_a_function_to_a_kernel_without_a_shell(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(judge, "judge_candidate", proved)
    received = 0

    async def talk() -> None:
        nonlocal received
        async with Client(server(Connection(where, "cpu", Here(), commit=True))) as agent:
            listed = await agent.list_tools()
            received += len(listed.model_dump_json(by_alias=True, exclude_none=True))
            assert agent.instructions and "# The language" in agent.instructions
            received += len(agent.instructions)

            async def call(name: str, **given: Any) -> str:
                nonlocal received
                result = await agent.call_tool(name, given)
                assert not result.is_error, said(result)
                assert result.structured_content["text"] == said(result)
                received += len(said(result))
                return said(result)

            assert "gemm_rope" in await call("list_specs", word="rope")
            shapes = ["x=4096,4096", "w=4096,4096"]
            early = await agent.call_tool("compose", {})
            assert early.is_error and "no run is open" in said(early)
            assert "squared_relu: drafted" in await call(
                "new_spec", function=FUNCTION, shapes=shapes
            )
            assert "Programs to define:\n- squared_relu" in await call("read_spec")
            assert "names and shapes fit the spec" in await call("compose")
            assert "x = relu(acc)" in await call("read_candidate")
            assert "accepted as proved" in await call("submit")
            assert "squared_relu(x, w)" in await call("use")
            tools: dict[str, Any] = {t.name: t for t in listed.tools}
            reads = {x for x, tool in tools.items() if tool.annotations.read_only_hint}
            assert {"list_specs", "read_spec", "check", "evaluate"} <= reads
            assert not {"submit", "write_candidate", "new_spec", "compose"} & reads
            assert tools["submit"].annotations.destructive_hint
            (known,) = (await agent.list_prompts()).prompts
            asked: Any = await agent.get_prompt(known.name, {"spec": "squared_relu"})
            assert "the spec squared_relu" in asked.messages[0].content.text

    anyio.run(talk)
    assert where.kernel("squared_relu").evidence.level == "proved"
    assert received < 15_000


@pytest.mark.parametrize(
    ("shapes", "name", "message"),
    [
        (["x=2,2"], "", "nothing says what w is (give its shape, w=SIZES, or a default)"),
        (["x=2;2"], "", "shape 'x=2;2' is no example (expected NAME=SIZES"),
        (["x=2,2", "w=2,2"], "a-b", "letters, digits and _ (give another name)"),
        (["x=2,2", "w=2,2"], "silu", "'silu' is a primitive's name (name it gemm_silu)"),
        (["x=2,2", "w=2,2"], "there", "is there already (give another name, or overwrite it)"),
    ],
)
def test_what_new_spec_refuses_names_no_option_of_a_shell(
    where: workspace.Workspace, shapes: list[str], name: str, message: str
) -> None:
    (where.specs / "there.md").touch()

    async def talk() -> None:
        async with Client(server(Connection(where, "cpu", Here(), commit=True))) as agent:
            given = {"function": FUNCTION, "shapes": shapes, "name": name}
            wrong = await agent.call_tool("new_spec", given)
            assert wrong.is_error and message in said(wrong) and "--" not in said(wrong)

    anyio.run(talk)


def test_the_composers_draft_is_a_tool(where: workspace.Workspace, quick: None) -> None:

    async def body(call: Callable[..., Any]) -> None:
        draft = await call("compose", "gemm_probit")
        assert "HOLE_1(0.999 * tanh(0.5 * (acc + bias)))" in said(draft)
        assert draft.structured_content["data"] == {"composed": False}

    talk_to(Connection(where, "cpu", Here(), commit=True), body)


@pytest.mark.parametrize("twice", [False, True])
def test_a_client_is_configured_beside_what_it_has(
    where: workspace.Workspace, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, twice: bool
) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    toml, other = tmp_path / ".codex" / "config.toml", {"command": "other"}
    toml.parent.mkdir()
    toml.write_text('model = "m"\n')
    (where.root / ".mcp.json").write_text(json.dumps({"mcpServers": {"other": other}}))
    for _ in range(1 + twice):
        for client_name in ("claude", "codex"):
            install(client_name, where)
    servers = json.loads((where.root / ".mcp.json").read_text())["mcpServers"]
    entry = tomllib.loads(toml.read_text())
    assert servers["other"] == other and entry["model"] == "m"
    ours = entry["mcp_servers"]["coda-agent"]
    assert servers["coda-agent"]["args"] == ours["args"] == ["-m", "coda_agent.agent", "mcp"]
    assert ours["cwd"] == str(where.root)
    toml.write_text(toml.read_text().replace(str(where.root), "/elsewhere"))
    with pytest.raises(CodaError, match="coda-agent serves /elsewhere already"):
        install("codex", where)
    toml.write_text("[")
    with pytest.raises(CodaError, match="is no configuration"):
        install("codex", where)
    (where.root / ".mcp.json").write_text("[")
    with pytest.raises(CodaError, match="is no configuration"):
        install("claude", where)


def test_read_spec_of_a_spec_that_was_changed_opens_a_run_of_what_it_is_now(
    where: workspace.Workspace, quick: None
) -> None:
    path = where.specs / "gemm_swiglu.md"
    path.write_text(SPEC)

    async def body(call: Callable[..., Any]) -> None:
        await call("write_candidate", "gemm_swiglu", text=RIGHT)
        path.write_text(SPEC.replace("target: 0.97", "target: 0.98"))
        stale = await call("submit", "gemm_swiglu")
        assert stale.is_error and f"spec gemm_swiglu is not what {path} holds" in said(stale)
        assert "target: 0.98" in said(await call("read_spec", "gemm_swiglu"))
        await call("write_candidate", "gemm_swiglu", text=RIGHT)
        assert "accepted as proved" in said(await call("submit", "gemm_swiglu"))

    talk_to(Connection(where, "cpu", Here(), commit=True), body)
    assert where.kernel("gemm_swiglu").spec.read_text() == path.read_text()
    assert sorted(str(ends(log)) for log in logs(where).values()) == [
        "['its spec was changed']", "['proved']"
    ]  # fmt: skip


def test_what_cannot_be_opened_is_said_and_leaves_no_run(where: workspace.Workspace) -> None:
    async def body(call: Callable[..., Any]) -> None:
        for spec in ("gemm_swigl", "", "/" + "x" * 10_000, str(where.root / "refused.md")):
            lost = await call("read_spec", spec)
            assert lost.is_error and len(said(lost).splitlines()) == 1
        assert "output 'O' is bfloat16 [77, 136]; expected float32" in said(lost)

    (where.root / "refused.md").write_text(REFUSED.replace("gemm_swiglu", "refused"))
    talk_to(Connection(where, "cpu", Here(), commit=True), body)
    assert logs(where) == {}
