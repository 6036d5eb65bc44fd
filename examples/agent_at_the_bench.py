"""Make a kernel as an agent does, by the tools over MCP.

    python examples/agent_at_the_bench.py

A model would choose these calls; here they are written down. `coda-agent mcp --install claude`
gives the same tools to Claude Code.
"""

from __future__ import annotations

import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import anyio
from mcp import Client, StdioServerParameters

FUNCTION = """
import torch

def squared_relu(x, w):
    return torch.relu(x @ w.T) ** 2
"""
WRONG = """
from coda_agent.primitives import Tile, epilogue, relu

@epilogue(out=Tile)
def squared_relu(acc):
    return {"out": relu(acc)}
"""
RIGHT = {"old": 'return {"out": relu(acc)}', "new": 'x = relu(acc)\n    return {"out": x * x}'}


async def work(command: str, workspace: Path) -> None:
    """Make a kernel: a wrong candidate, the judge's word, a right one."""
    server = StdioServerParameters(command=command, args=["mcp"], cwd=workspace)
    async with Client(server) as bench:

        async def call(tool: str, **given: Any) -> None:
            result: Any = await bench.call_tool(tool, given)
            print(f"\n> {tool} {', '.join(given)}\n{result.content[0].text}", flush=True)

        await call("new_spec", function=FUNCTION, shapes=["x=4096,4096", "w=4096,4096"])
        await call("read_spec", spec="squared_relu")
        await call("write_candidate", text=WRONG)
        await call("check", level="interpret")
        await call("edit_candidate", **RIGHT)
        await call("check", level="interpret")
        await call("submit")
        await call("use")


def main() -> None:
    """Work in a scratch workspace, which is left to look at."""
    command = str(Path(sys.executable).with_name("coda-agent"))
    workspace = Path(tempfile.mkdtemp(prefix="coda-agent-"))
    subprocess.run(["git", "init", "-q"], cwd=workspace, check=True)
    for name in ("user.name", "user.email"):  # git may have none, and this is a scratch repository
        subprocess.run(["git", "config", name, "example"], cwd=workspace, check=True)
    subprocess.run([command, "init", "."], cwd=workspace, check=True)
    anyio.run(work, command, workspace)


if __name__ == "__main__":
    main()
