"""A pool of warm compile workers, each a killable process group."""

from __future__ import annotations

import contextlib
import json
import os
import queue
import secrets
import select
import signal
import subprocess
import sys
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, as_completed
from types import TracebackType
from typing import Any

from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.target import cache_directory

# Measured: 1.2 to 6 s a kernel, and up to 20 s to import torch and the DSL on a loaded machine.
JOB_TIMEOUT_S = 180.0
_PASSED = (
    "PATH",
    "HOME",
    "LANG",
    "LD_LIBRARY_PATH",
    "PYTHONPATH",
    "VIRTUAL_ENV",
    "CUDA_HOME",
    "TMPDIR",
)


class Worker:
    """One warm child process; replaced after a crash or a timeout."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None
        self._results = -1
        self._buffer = b""

    def call(self, job: dict[str, Any], timeout_s: float = JOB_TIMEOUT_S) -> Any:
        """Run one job.

        Raises:
            CompileError: the job failed, died, or ran out of time; the message says which.
        """
        process = self._started()
        nonce = secrets.token_hex(8)
        assert process.stdin is not None
        try:
            process.stdin.write(json.dumps({**job, "nonce": nonce}) + "\n")
            process.stdin.flush()
            answer = json.loads(self._line(timeout_s))
        except (BrokenPipeError, EOFError, json.JSONDecodeError) as error:
            self.close()
            raise CompileError("the compile worker died") from error
        except TimeoutError as error:
            self.close()
            raise CompileError(
                f"no result within {timeout_s:.0f} s; the worker was killed"
            ) from error
        if answer.get("nonce") != nonce:
            self.close()
            raise CompileError("the compile worker answered out of turn and was killed")
        if "ok" in answer:
            return answer["ok"]
        raise CompileError(answer["error"], hint=answer["hint"])

    def close(self) -> None:
        """Kill the worker and everything it started."""
        if self._process is None:
            return
        with contextlib.suppress(ProcessLookupError):
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        os.close(self._results)
        self._process, self._buffer = None, b""

    def _started(self) -> subprocess.Popen[str]:
        if self._process is not None and self._process.poll() is None:
            return self._process
        self.close()
        reader, writer = os.pipe()
        environment = {k: os.environ[k] for k in _PASSED if k in os.environ}
        environment.update(
            CUDA_VISIBLE_DEVICES="", QUACK_CACHE_DIR=str(cache_directory()), PYTHONUNBUFFERED="1"
        )
        self._process = subprocess.Popen(
            [sys.executable, "-m", "coda_agent.agent.judge.worker", str(writer)],
            stdin=subprocess.PIPE,
            stdout=subprocess.DEVNULL,
            stderr=subprocess.DEVNULL,
            text=True,
            env=environment,
            pass_fds=(writer,),
            start_new_session=True,
        )
        os.close(writer)
        self._results = reader
        return self._process

    def _line(self, timeout_s: float) -> bytes:
        while b"\n" not in self._buffer:
            ready, _, _ = select.select([self._results], [], [], timeout_s)
            if not ready:
                raise TimeoutError
            chunk = os.read(self._results, 1 << 16)
            if not chunk:
                raise EOFError
            self._buffer += chunk
        line, _, self._buffer = self._buffer.partition(b"\n")
        return line


class CompilePool:
    """Runs jobs on up to `size` workers; a context manager that leaves no process behind."""

    def __init__(self, size: int | None = None) -> None:
        cores = len(os.sched_getaffinity(0))
        self.size = size or max(1, min(cores, 14))
        self._idle: queue.SimpleQueue[Worker] = queue.SimpleQueue()
        self._workers = [Worker() for _ in range(self.size)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.size)

    def __enter__(self) -> CompilePool:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self.close()

    def run(self, job: dict[str, Any]) -> Any:
        """One job, result or CompileError."""
        worker = self._idle.get()
        try:
            return worker.call(job)
        finally:
            self._idle.put(worker)

    def map(
        self, jobs: Sequence[dict[str, Any]], progress: Callable[[int, dict[str, Any]], None]
    ) -> list[Any | CompileError]:
        """All jobs, results or errors in order; `progress(done, job)` after each."""
        futures: dict[Future[Any], int] = {
            self._threads.submit(self.run, job): i for i, job in enumerate(jobs)
        }
        results: list[Any] = [None] * len(jobs)
        for done, future in enumerate(as_completed(futures), 1):
            i = futures[future]
            error = future.exception()
            if error is not None and not isinstance(error, CompileError):
                raise error
            results[i] = error or future.result()
            progress(done, jobs[i])
        return results

    def close(self) -> None:
        """Kill every worker."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
