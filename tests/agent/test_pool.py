"""Compile workers: results, errors, deaths and time-outs."""

from __future__ import annotations

import os
import signal

import pytest

from coda_agent.agent.judge.pool import CompilePool, Worker
from coda_agent.primitives.errors import CompileError

GOOD = "from coda_agent.primitives import Tile, epilogue\n@epilogue(O=Tile)\ndef k(acc):\n    return {'O': acc}\n"


def test_a_candidate_is_traced_in_the_child_and_comes_back_as_data() -> None:
    with CompilePool(1) as pool:
        programs = pool.run({"kind": "load", "text": GOOD})
    assert programs["k"]["outputs"] == {"O": ["Tile", 0]}


def test_imports_and_builtins_are_out_of_reach_even_past_the_static_gate() -> None:
    worker = Worker()
    try:
        with pytest.raises(CompileError, match="import of 'os' is not allowed"):
            worker.call({"kind": "load", "text": "import os"})
        with pytest.raises(CompileError, match="NameError"):
            worker.call({"kind": "load", "text": "open('/tmp/x', 'w')"})
    finally:
        worker.close()


def test_a_hang_is_killed_and_the_worker_replaced() -> None:
    worker = Worker()
    try:
        worker.call({"kind": "load", "text": GOOD})
        with pytest.raises(CompileError, match="no result within 1 s"):
            worker.call({"kind": "load", "text": "while True: pass"}, timeout_s=1)
        assert worker.call({"kind": "load", "text": GOOD})["k"]["name"] == "k"
    finally:
        worker.close()


def test_a_killed_worker_is_an_error_and_the_next_job_runs() -> None:
    worker = Worker()
    try:
        worker.call({"kind": "load", "text": GOOD})
        assert worker._process is not None
        os.kill(worker._process.pid, signal.SIGKILL)
        worker._process.wait()
        assert worker.call({"kind": "load", "text": GOOD})["k"]["name"] == "k"
    finally:
        worker.close()


def test_map_keeps_order_and_returns_errors_in_place() -> None:
    seen: list[int] = []
    jobs = [{"kind": "load", "text": t} for t in (GOOD, "1 / 0", GOOD)]
    with CompilePool(2) as pool:
        results = pool.map(jobs, lambda done, _: seen.append(done))
    first, error, last = results
    assert not isinstance(first, CompileError) and not isinstance(last, CompileError)
    assert first["k"]["name"] == last["k"]["name"] == "k"
    assert isinstance(error, CompileError) and "ZeroDivisionError" in str(error)
    assert seen == [1, 2, 3]
