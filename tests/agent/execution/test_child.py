"""A child process: its answers, its limits, and how it ends, with all that it started."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent.execution.child import Child, ChildError

HERE = str(Path(__file__).parent)
Fault = Callable[..., str]


@pytest.fixture(scope="module", params=["new", "fork"])
def shared(request: pytest.FixtureRequest) -> Iterator[Child]:
    """A child that began anew, or as a fork of another one."""
    origin = child = Child("faulty_child", environment={"PYTHONPATH": HERE})
    if request.param == "fork":
        child = Child("faulty_child", origin=origin)
    yield child
    child.close()
    origin.close()


@pytest.fixture
def child(shared: Child) -> Iterator[Child]:
    """One that answers after the test as before it, with as many descriptors open here."""
    assert answer(shared, "echo", value=7) == 7
    before = len(os.listdir("/proc/self/fd"))
    yield shared
    assert answer(shared, "echo", value=8) == 8
    assert len(os.listdir("/proc/self/fd")) == before


def answer(child: Child, kind: str, timeout_s: float = 20, **more: Any) -> Any:
    found = child.call({"kind": kind, **more}, timeout_s=timeout_s)
    assert found["kind"] == "ok"
    return found["result"]


def fault(child: Child, kind: str, timeout_s: float = 20, **more: Any) -> str:
    with pytest.raises(ChildError) as caught:
        child.call({"kind": kind, **more}, timeout_s=timeout_s)
    return str(caught.value)


def wait_for_end(pids: list[int]) -> None:
    """All of some processes have ended: there is none, or a zombie whose parent is slow."""
    deadline = time.monotonic() + 5
    for pid in pids:
        while (path := Path(f"/proc/{pid}/cmdline")).exists() and path.read_bytes():
            assert time.monotonic() < deadline
            time.sleep(0.01)


def test_it_is_warm_tells_progress_and_takes_large_jobs(child: Child) -> None:
    told: list[dict[str, int]] = []
    child.call({"kind": "progress"}, timeout_s=5, progress=told.append)
    assert told == [{"done": 0}, {"done": 1}, {"done": 2}]
    large = "y" * 3_000_000  # more than a pipe holds, both ways
    assert answer(child, "echo", value=large) == large
    first = answer(child, "about")["pid"]
    assert first == answer(child, "about")["pid"] != os.getpid()


def test_start_returns_at_once_and_the_start_is_not_time_of_the_job() -> None:
    child = Child("faulty_child", environment={"PYTHONPATH": HERE, "FAULTY_START_S": "1.5"})
    try:
        start = time.perf_counter()
        child.start()
        assert time.perf_counter() - start < 1.5
        assert answer(child, "echo", 1, value=1) == 1
    finally:
        child.close()


def test_ways_to_end(child: Child) -> None:
    assert fault(child, "exit", status=0) == "died: exit status 0"
    assert fault(child, "exit", status=3) == "died: exit status 3"
    assert fault(child, "kill") == "died: killed by SIGSEGV"
    assert fault(child, "raise") == "died: exit status 1: RuntimeError: what went wrong"
    assert fault(child, "close") == "died: it closed its results"
    assert fault(child, "hang", 0.3) == "timeout: no answer within 0.3 s"


def test_limits_of_memory_files_and_time_on_a_core(child: Child) -> None:
    before = os.getpriority(os.PRIO_PROCESS, 0)
    assert answer(child, "about")["niceness"] == min(before + 10, 19)
    assert answer(child, "fill") == f"OSError {8 << 20}"
    assert fault(child, "allocate") == "died: exit status 1: MemoryError"


def test_what_it_prints_does_not_matter(child: Child) -> None:
    assert answer(child, "flood", value=3) == 3


def test_the_environment_is_scrubbed_and_the_scratch_folder_ends_with_it(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("ANTHROPIC_API_KEY", "sk-1")
    monkeypatch.setenv("AWS_SECRET_ACCESS_KEY", "2")
    child = Child("faulty_child", environment={"PYTHONPATH": HERE, "OWN": "3"})
    try:
        about = answer(child, "about")
        assert about["folder"] == "/" and about["environment"]["OWN"] == "3"
        assert not {"ANTHROPIC_API_KEY", "AWS_SECRET_ACCESS_KEY"} & set(about["environment"])
        scratch = Path(about["environment"]["TMPDIR"])
        assert scratch.is_dir() and scratch.name.startswith("coda-agent-")
    finally:
        child.close()
    assert not scratch.exists()


def test_close_from_another_thread_ends_a_call(child: Child) -> None:
    timer = threading.Timer(0.3, child.close)
    timer.start()
    assert fault(child, "hang").startswith("died: killed by SIGKILL")
    timer.join()


def test_one_that_ended_while_it_was_idle_is_started_again(child: Child) -> None:
    assert child._process is not None
    os.kill(child._process.pid, signal.SIGKILL)
    child._process.wait()


def test_what_it_started_ends_with_its_job(child: Child) -> None:
    told: list[dict[str, Any]] = []
    with pytest.raises(ChildError, match="no answer within 1 s"):
        child.call({"kind": "tool and hang"}, timeout_s=1, progress=told.append)
    wait_for_end(told[0]["pids"])


KILLED = """
import sys
from coda_agent.agent.execution.child import Child
child = Child("faulty_child", environment={"PYTHONPATH": sys.argv[1]})
tell = lambda record: print(*record["pids"], flush=True)
child.call({"kind": "tool and hang"}, timeout_s=600, progress=tell)
"""


def test_all_ends_with_a_parent_that_is_killed(tmp_path: Path) -> None:
    command, environment = (
        [sys.executable, "-c", KILLED, HERE],
        {**os.environ, "TMPDIR": str(tmp_path)},
    )
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True, env=environment) as parent:
        assert parent.stdout is not None
        pids = [int(pid) for pid in parent.stdout.readline().split()]
        assert len(pids) == 2 and all(Path(f"/proc/{pid}").exists() for pid in pids)
        assert [x.name.startswith("coda-agent-") for x in tmp_path.iterdir()] == [True]
        parent.kill()
    wait_for_end(pids)
    end = time.monotonic() + 10
    while any(tmp_path.iterdir()) and time.monotonic() < end:
        time.sleep(0.01)
    assert not any(tmp_path.iterdir())


def test_a_fork_outlives_what_it_is_a_fork_of() -> None:
    origin = Child("faulty_child", environment={"PYTHONPATH": HERE})
    first, second = (Child("faulty_child", origin=origin) for _ in range(2))
    try:
        pids = [answer(x, "about")["pid"] for x in (first, origin)]
        os.kill(pids[1], signal.SIGKILL)
        assert answer(first, "echo", value=1) == 1
        origin.close()
        assert answer(second, "echo", value=2) == 2  # of another one
        before = answer(origin, "about")["pid"]
        first.close()
        assert answer(origin, "about")["pid"] == before
        wait_for_end(pids)
    finally:
        for child in (first, second, origin):
            child.close()
