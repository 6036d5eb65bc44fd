"""A pool of warm compile workers, each a sandboxed child that is replaced when it fails."""

import logging
import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Self

from coda_agent.agent.execution.answers import Answer, Ok, Refused, read_answer
from coda_agent.agent.execution.child import START_TIMEOUT_S, Child, ChildError, Limits
from coda_agent.agent.judge.job import BuiltObject, CompileJob
from coda_agent.agent.sandbox import Sandbox, choose, reasons
from coda_agent.primitives.errors import CompileError, ProgramError
from coda_agent.primitives.objects import cache_directory
from coda_agent.primitives.program import Program

# A kernel was measured to take 1.2 to 6 s. Importing torch and the DSL takes up to 20 s on a loaded
# machine. A trace takes milliseconds.
TIMEOUTS_S = {"compile": 180.0, "load": 30.0}
# Nice workers: a host late by some microseconds spoils what another process times on a GPU.
LIMITS = Limits(
    address_space_bytes=32 << 30, file_bytes=1 << 30, open_files=1024, niceness=10
)  # fmt: skip
SIDE_BY_SIDE = "CODA_AGENT_SIDE_BY_SIDE"
"""Environment variable: how many processes of one command have a pool each and share the cores, by
default 1."""
# nvidia-cutlass-dsl 4.8.1 itself dies of SIGSEGV for sm_100a where both halves of a pair that was
# multiplied by a constant are added: `even, odd = pairs(acc * 0.7)`, then `even + odd`. It compiles
# `(even + odd) * 0.7` of `pairs(acc)`.
_HINTS = {
    "died": "if the compiler crashed, the same mathematics written otherwise may compile, as a "
    "factor after `pairs` instead of before"
}
MODULE = "coda_agent.agent.execution.compile_worker"


class CompilePool:
    """Runs jobs on up to `size` workers; a context manager that leaves no process behind.

    Raises:
        MachineError: a stronger sandbox is demanded than works here.
    """

    def __init__(
        self, size: int | None = None, *, sandbox: Sandbox | None = None, module: str = MODULE,
        environment: dict[str, str] | None = None, limits: Limits = LIMITS,
    ) -> None:  # fmt: skip
        self.sandbox = sandbox or choose()
        if self.sandbox.tier == "process":
            logging.getLogger("coda_agent").warning(
                "candidates are compiled without a sandbox: %s", reasons(self.sandbox.missing)
            )
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get(SIDE_BY_SIDE, 1))
        self.size = size or max(1, min(cores, 14))
        # Last in, first out, so that jobs one after the other start one worker only.
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()
        extra = {
            "CUDA_VISIBLE_DEVICES": "",
            "QUACK_CACHE_DIR": str(cache_directory().resolve()),
            "OMP_NUM_THREADS": "1",  # there is a worker for each core
        }
        extra |= environment or {}
        self._workers = [
            Child(module, environment=extra, wrap=self.sandbox.wrap, limits=limits)
            for _ in range(self.size)
        ]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def answer(
        self, job: dict[str, Any], timeout_s: float, *, first: dict[str, Any] | None = None
    ) -> Answer:
        """What a worker answers to one job, after another of which the time does not count.

        Raises:
            ChildError: none came; the worker is gone, and the next job starts it anew.
        """
        worker = self._idle.get()
        try:
            if first:
                worker.call(first, timeout_s=START_TIMEOUT_S)
            return read_answer(worker.call(job, timeout_s=timeout_s))
        finally:
            self._idle.put(worker)

    def run(self, job: dict[str, Any], timeout_s: float | None = None) -> Any:
        """One job's result, as data.

        Raises:
            CompileError: the job failed, died, or ran out of time; the message says which.
        """
        try:
            answer = self.answer(job, timeout_s or TIMEOUTS_S[job["kind"]])
        except ChildError as error:
            why = {
                "timeout": f"{error.detail}; the worker was killed",
                "died": f"the compile worker died: {error.detail}",
                "malformed": f"the compile worker was killed: {error.detail}",
            }
            raise CompileError(why[error.kind], hint=_HINTS.get(error.kind, "")) from error
        match answer:
            case Ok(result=result):
                return result
            case Refused(message=message, hint=hint):
                raise CompileError(message, hint=hint)
        raise CompileError(f"the compile worker answered {answer.kind}")

    def compile(self, job: CompileJob) -> BuiltObject:
        """A program's object.

        Raises:
            CompileError: it does not compile; else as `run`.
        """
        return BuiltObject.model_validate(self.run(job.model_dump(mode="json")))

    def load(self, text: str) -> dict[str, Program]:
        """A candidate's programs by name, traced in a worker.

        Raises:
            CompileError: the candidate's Python raised while it was traced, or what it left is no
                program.
        """
        records = self.run({"kind": "load", "text": text})
        try:
            programs = [Program.from_dict(data) for data in records.values()]
        except ProgramError as error:
            raise CompileError(error.message, hint=error.hint) from error
        return {program.name: program for program in programs}

    def map(
        self, jobs: Sequence[CompileJob], progress: Callable[[int, CompileJob], None]
    ) -> list[BuiltObject | CompileError]:
        """`compile` of all jobs, results or errors in order; `progress(done, job)` after each."""
        futures = {self._threads.submit(self.compile, job): i for i, job in enumerate(jobs)}
        results: dict[int, BuiltObject | CompileError] = {}
        for done, future in enumerate(as_completed(futures), 1):
            i = futures[future]
            try:
                results[i] = future.result()
            except CompileError as error:
                results[i] = error
            progress(done, jobs[i])
        return [results[i] for i in range(len(jobs))]

    def close(self) -> None:
        """Kill every worker."""
        self._threads.shutdown(wait=False, cancel_futures=True)
        for worker in self._workers:
            worker.close()
