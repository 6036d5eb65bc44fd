"""What a child can reach that runs what is not ours, where bubblewrap confines it."""

from __future__ import annotations

import contextlib
import json
import os
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from coda_agent.agent.cli import app
from coda_agent.agent.execution import confinement
from coda_agent.agent.execution.child import Child, ChildError

ROOT = Path(__file__).parents[3]
HERE = str(Path(__file__).parent)


@pytest.mark.parametrize("confined", [True, False])
def test_what_a_child_can_do(tmp_path: Path, confined: bool) -> None:
    """Unconfined it can do all of it, so that the probe is known to be able to fail."""
    if confined and (reason := confinement.missing()):
        pytest.skip(reason)
    child = Child("faulty_child", environment={"PYTHONPATH": HERE}, confine=confined)
    with socket.create_server(("127.0.0.1", 0)) as server:
        job = {
            "kind": "probe", "root": str(ROOT), "folder": str(tmp_path),
            "parent": os.getpid(), "port": server.getsockname()[1],
        }  # fmt: skip
        try:
            answers = child.call(job, timeout_s=20)["result"]
        finally:
            child.close()
            (ROOT / "probe").unlink(missing_ok=True)
    refused = {name for name, answer in answers.items() if answer != "yes"}
    others = {"write the repository", "write a folder", "see its parent", "connect"}
    assert refused == (others if confined else set()), answers


@pytest.fixture
def path(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A folder that is the whole of PATH."""
    monkeypatch.setenv("PATH", str(tmp_path))
    confinement.missing.cache_clear()
    yield tmp_path
    confinement.missing.cache_clear()


def test_why_it_is_missing_is_said_in_one_line(path: Path) -> None:
    assert confinement.missing() == "bwrap was not found; the package bubblewrap has it"
    assert confinement.confined(["true"], "/tmp") == ["true"]
    items = json.loads(CliRunner().invoke(app, ["doctor", "--json"]).stdout)["items"]
    found = next(item for item in items if item["name"] == "bubblewrap")
    assert found["value"] is None and found["hint"] == confinement.missing()
    (path / "bwrap").write_text("#!/bin/sh\necho 'no namespaces here' >&2\nexit 1\n")
    (path / "bwrap").chmod(0o755)
    confinement.missing.cache_clear()
    assert confinement.missing() == "no namespaces here"


def live_in(group: int) -> list[str]:
    """The states of a group's processes, those left out that ended and that nobody asked after."""
    found = []
    for path in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):  # it ended meanwhile
            found.append(path.read_text().rpartition(")")[2].split())
    return [state for state, _, leader, *_ in found if leader == str(group) and state not in "ZX"]


def test_a_child_in_it_says_how_it_died_and_leaves_no_process() -> None:
    if reason := confinement.missing():
        pytest.skip(reason)
    child = Child("faulty_child", environment={"PYTHONPATH": HERE}, confine=True)
    try:
        with pytest.raises(ChildError, match="died: killed by SIGSEGV"):
            child.call({"kind": "kill"}, timeout_s=20)
        assert child.call({"kind": "echo", "value": 1}, timeout_s=20)["result"] == 1
        assert child._process is not None
        group = child._process.pid
        assert len(live_in(group)) > 1
    finally:
        child.close()
    deadline = time.monotonic() + 5
    while live_in(group):
        assert time.monotonic() < deadline
        time.sleep(0.01)
