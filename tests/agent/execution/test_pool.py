"""Compile workers: results and errors in place, and what is said of a worker that fails."""

from __future__ import annotations

import time
from concurrent.futures import wait
from pathlib import Path
from typing import Any

import pytest

from coda_agent.agent.execution.pool import CompilePool
from coda_agent.primitives.errors import CompileError

FAULTY: Any = {"module": "faulty_child", "environment": {"PYTHONPATH": str(Path(__file__).parent)}}


def test_map_keeps_order_and_returns_errors_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []
    jobs: Any = [{"kind": "echo", "value": 1}, {"kind": "kill"}, {"kind": "echo", "value": 2}]
    with CompilePool(2, **FAULTY) as pool:
        monkeypatch.setattr(pool, "compile", pool.run)
        first, error, last = pool.map(jobs, lambda done, _: seen.append(done))
    assert (first, last) == (1, 2) and isinstance(error, CompileError)
    assert seen == [1, 2, 3]


def test_a_worker_that_fails_is_an_error_of_its_job_alone() -> None:
    with CompilePool(1, **FAULTY) as pool:
        for job, timeout_s, message, hint in (
            ({"kind": "kill"}, 20, "the compile worker died: killed by SIGSEGV", "may compile"),
            ({"kind": "hang"}, 0.3, "no answer within 0.3 s; the worker was killed", ""),
        ):
            with pytest.raises(CompileError) as caught:
                pool.run(job, timeout_s)
            assert caught.value.message == message and hint in caught.value.hint
            assert pool.run({"kind": "echo", "value": 5}, 20) == 5


def test_a_worker_that_the_machine_kills_is_tried_again(tmp_path: Path) -> None:
    mark = tmp_path / "mark"
    with CompilePool(1, **FAULTY) as pool:
        assert pool.run({"kind": "killed once", "mark": str(mark)}, 20) == "done"
        with pytest.raises(CompileError, match="killed by SIGKILL"):
            pool.run({"kind": "killed once", "mark": str(tmp_path / "no" / "mark")}, 20)


def test_a_pool_that_is_closed_waits_for_no_imports() -> None:
    slow = {**FAULTY["environment"], "FAULTY_START_S": "30"}
    with CompilePool(3, module="faulty_child", environment=slow) as pool:
        jobs: Any = [{"kind": "echo", "value": i} for i in range(6)]
        running = [pool._threads.submit(pool.run, job) for job in jobs]
        start = time.perf_counter()
    assert time.perf_counter() - start < 5
    wait(running, 5)
    assert all(x.cancelled() or isinstance(x.exception(), CompileError) for x in running)
    with pytest.raises(CompileError, match="it was closed"):
        pool.run(jobs[0])
