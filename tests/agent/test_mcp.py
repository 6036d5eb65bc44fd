"""The MCP server as a client meets it: a real process, the protocol's own client library, and the real
judge from a wrong candidate to the commit."""

import os
import sys
from pathlib import Path
from typing import Any

import anyio
import pytest
from mcp import Client
from mcp.client.stdio import StdioServerParameters
from mcp_types import Implementation

from coda_agent.agent import workspace
from coda_agent.agent.events import read_events, summary
from coda_agent.agent.workbench import TOOLS

ROOT = Path(__file__).parents[2]
RIGHT = (ROOT / "generated" / "gemm_swiglu" / "kernel.py").read_text()


@pytest.fixture
def where(tmp_path: Path) -> workspace.Workspace:
    made, _ = workspace.init(tmp_path / "w")
    made.git("config", "user.name", "U")
    made.git("config", "user.email", "u@example.com")
    return made


def client(where: workspace.Workspace, *options: str) -> Client:
    passed = ("PATH", "HOME", "PYTHONPATH", "XDG_CACHE_HOME", "QUACK_CACHE_DIR")
    env = {name: os.environ[name] for name in passed if name in os.environ}
    env["ANTHROPIC_API_KEY"] = "sk-ant-canary"
    server = StdioServerParameters(
        command=sys.executable,
        args=["-m", "coda_agent.agent", "mcp", *options],
        env=env,
        cwd=where.root,
    )
    return Client(server, client_info=Implementation(name="tester", version="1"))


def said(result: Any) -> str:
    return result.content[0].text


def test_an_agent_writes_a_kernel(where: workspace.Workspace) -> None:
    told: list[tuple[float, str | None]] = []

    async def progress(progress: float, total: float | None, message: str | None) -> None:
        told.append((progress, message))

    async def talk() -> None:
        async with client(where, "--device", "cpu") as agent:
            listed = {tool.name: tool for tool in (await agent.list_tools()).tools}
            assert list(listed) == list(TOOLS)
            assert listed["check"].input_schema["required"] == ["spec", "level"]

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
            assert not refused.is_error and refused.structured_content["data"]["passed"] is False
            assert not (await call("edit_candidate", old="import os\n", new="")).is_error
            done = await call("submit")
            assert "accepted as proved" in said(done), said(done)
            over = await call("log_tip", text="t", tags=[], failing=1, passing=1)
            assert over.is_error and "a tip needs an attempt that failed" in said(over)

    anyio.run(talk)
    evidence = where.kernel("gemm_swiglu").evidence
    assert (evidence["author"], evidence["level"]) == ("mcp:tester", "proved")
    assert where.kernel("gemm_swiglu").program.read_text() == RIGHT
    assert where.git("rev-list", "--count", "HEAD") == "1"
    logs = list((where.root / "logs" / "runs").glob("*/events.jsonl"))
    (log,) = [read_events(path) for path in logs]
    assert (summary(log).outcome, summary(log).author) == ("passed", "mcp:tester")
    assert summary(log).commit == where.git("rev-parse", "HEAD")
    numbers = [number for number, _ in told]
    assert len(numbers) > 4 and any("compile" in str(message) for _, message in told)
    assert b"sk-ant-canary" not in logs[0].read_bytes()
