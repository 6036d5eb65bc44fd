"""Compile workers: results, errors in place, and the conversation with a child."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent.execution.child import Child, ChildError
from coda_agent.agent.execution.pool import CompilePool
from coda_agent.agent.sandbox import launcher
from coda_agent.primitives.errors import CompileError

GOOD = "from coda_agent.primitives import Tile, epilogue\n@epilogue(O=Tile)\ndef k(acc):\n    return {'O': acc}\n"


@pytest.fixture
def child() -> Iterator[Child]:
    child = Child("faulty_child", environment={"PYTHONPATH": str(Path(__file__).parent)})
    yield child
    child.close()


def test_a_candidate_is_traced_in_the_child_and_comes_back_as_data() -> None:
    with CompilePool(1) as pool:
        programs = pool.run({"kind": "load", "text": GOOD})
    assert programs["k"]["outputs"] == {"O": ["Tile", 0]}


def test_a_function_that_never_returns_ends_with_the_launcher_of_its_worker() -> None:
    others = launcher.below(os.getpid())
    with CompilePool(1) as pool:
        pool.run({"kind": "load", "text": GOOD})
        known = launcher.below(os.getpid())
        first = next(p for p in known if p not in others)
        endless = {"kind": "load", "text": "while True: pass"}

        def run() -> None:
            with pytest.raises(CompileError):
                pool.run(endless)

        call = threading.Thread(target=run)
        call.start()
        while not (begun := [p for p in launcher.below(os.getpid()) if p not in known]):
            time.sleep(0.01)
        os.kill(first, signal.SIGKILL)
        call.join(10)
        assert not call.is_alive()
        deadline = time.monotonic() + 10
        while any(Path(f"/proc/{p}/cmdline").exists() for p in begun):
            assert time.monotonic() < deadline
            time.sleep(0.01)


ORPHAN = """
import os, time
from coda_agent.agent.sandbox import launcher
reader, writer = os.pipe()
if os.fork() == 0:
    parent = os.getpid()
    if os.fork() == 0:
        while os.getppid() == parent:
            time.sleep(0.01)
        launcher.die_with(parent)
        os.write(writer, b"lives on")
    os._exit(0)
os.close(writer)
os.wait()
print(os.read(reader, 99))
"""


def test_a_process_whose_parent_is_gone_already_ends_as_well() -> None:
    assert subprocess.check_output([sys.executable, "-c", ORPHAN], text=True) == "b''\n"


def test_map_keeps_order_and_returns_errors_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    texts = (GOOD, "1 / 0", "import os", "open('/tmp/x', 'w')", GOOD)
    with CompilePool(2) as pool:
        monkeypatch.setattr(pool, "compile", pool.load)  # which takes milliseconds
        jobs: Any = texts
        found: Any = pool.map(jobs, lambda done, _: seen.append(done))
    first, *errors, last = found
    assert not isinstance(first, CompileError) and not isinstance(last, CompileError)
    assert first["k"].name == last["k"].name == "k"
    assert [type(error) for error in errors] == [CompileError] * 3
    assert "ZeroDivisionError" in str(errors[0])
    assert "import of 'os' is not allowed" in str(errors[1])  # past the static gate, too
    assert "NameError" in str(errors[2])
    assert seen == [1, 2, 3, 4, 5]


def test_a_child_is_warm_tells_progress_and_takes_large_jobs(child: Child) -> None:
    told: list[dict[str, int]] = []
    assert child.call({"kind": "progress"}, timeout_s=5, progress=told.append) == {
        "kind": "ok",
        "result": None,
    }
    assert told == [{"done": 0}, {"done": 1}, {"done": 2}]
    large = "y" * 3_000_000  # more than a pipe holds, both ways
    assert child.call({"kind": "echo", "value": large}, timeout_s=5) == {
        "kind": "ok",
        "result": large,
    }
    start = time.perf_counter()
    child.call({"kind": "echo"}, timeout_s=5)
    assert time.perf_counter() - start < 0.2  # starting it takes longer


def test_start_returns_at_once_and_the_start_is_not_time_of_the_job(child: Child) -> None:
    start = time.perf_counter()
    child.start()
    assert time.perf_counter() - start < 0.2
    assert child.call({"kind": "echo", "value": 1}, timeout_s=0.2) == {"kind": "ok", "result": 1}


def test_close_from_another_thread_ends_a_call(child: Child) -> None:
    child.call({"kind": "echo"}, timeout_s=5)
    timer = threading.Timer(0.3, child.close)
    timer.start()
    with pytest.raises(ChildError, match="died"):
        child.call({"kind": "hang"}, timeout_s=30)
    timer.join()
    assert child.call({"kind": "echo", "value": 2}, timeout_s=5) == {"kind": "ok", "result": 2}
