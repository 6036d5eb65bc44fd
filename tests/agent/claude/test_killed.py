"""SIGKILL at two hundred random points; every run ends in the same commit."""

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from bench import KEY, RIGHT, WRONG
from server import Reply, Serve, call

from coda_agent.agent.judge.records import JsonObject

STEPS = [
    ("write_candidate", {"text": WRONG}),
    ("check", {"level": "static"}),
    ("write_candidate", {"text": RIGHT}),
    ("check", {"level": "interpret"}),
    ("submit", {}),
]
KILLS = 200


def script(body: JsonObject, number: int) -> Reply:
    """The next step whose result is not there yet; what was interrupted is done again."""
    blocks = [b for m in body["messages"] if m["role"] == "user" for b in m["content"]]
    good = sum(b["type"] == "tool_result" and not b.get("is_error") for b in blocks)
    name, given = STEPS[good]
    return Reply([call(name, given, f"t{len(body['messages'])}")])


@pytest.fixture
def folder(tmp_path: Path) -> Iterator[Path]:
    """A folder in memory, where there is one: each event is synced, and no test turns power off."""
    memory = Path("/dev/shm")
    with tempfile.TemporaryDirectory(dir=memory if memory.is_dir() else tmp_path) as made:
        yield Path(made)


@pytest.mark.slow
def test_two_hundred_kills_end_in_the_same_commit(serve: Serve, folder: Path) -> None:
    server = serve(script)
    server.keep = False
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "ANTHROPIC_API_KEY": KEY}
    command = [sys.executable, str(Path(__file__).with_name("killed.py"))]
    command += [str(folder), str(KILLS // 2), "1", "2"]
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done
    reports = [json.loads(path.read_text()) for path in folder.glob("report-*.json")]
    assert [report["faults"] for report in reports] == [[], [], []], done
    assert sum(report["kills"] for report in reports) >= KILLS
    runs = [run for report in reports for run in report["runs"]]
    assert len(runs) >= 6
    assert all(run == runs[0] for run in runs), [run for run in runs if run != runs[0]]
    (commit,) = runs[0]["commits"]
    assert commit.startswith("Store gemm_swiglu (proved)")
    assert runs[0]["contiguous"] and runs[0]["outcome"] == "passed" and runs[0]["status"] == ""
    assert runs[0]["folders"] == [".gitkeep", "gemm_swiglu"]
