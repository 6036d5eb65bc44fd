"""A pool of warm compile workers, each replaced when it fails."""

import os
import queue
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from typing import Any, Self

from coda_agent.agent.execution.answers import Ok, Refused, read_answer
from coda_agent.agent.execution.child import Child, ChildError
from coda_agent.agent.judge.job import BuiltObject, CompileJob
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.objects import writable_cache

# A kernel was measured to take 1.2 to 6 s. Importing torch and the DSL takes up to 20 s on a loaded
# machine.
TIMEOUT_S = 180.0
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
    """Runs jobs on up to `size` workers; leaves no process behind."""

    def __init__(
        self, size: int | None = None, *, module: str = MODULE,
        environment: dict[str, str] | None = None,
    ) -> None:  # fmt: skip
        cores = len(os.sched_getaffinity(0)) // int(os.environ.get(SIDE_BY_SIDE, 1))
        self.size = size or max(1, min(cores, 14))
        # Last in, first out, so that jobs one after the other start one worker only.
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()
        extra = {
            "CUDA_VISIBLE_DEVICES": "",
            "QUACK_CACHE_DIR": str(writable_cache()),
            "OMP_NUM_THREADS": "1",  # there is a worker for each core
        }
        extra |= environment or {}
        # Imports take 5 to 10 s of a core: one child imports, and workers are forks of it.
        self._origin = Child(module, environment=extra)
        self._workers = [Child(module, origin=self._origin) for _ in range(self.size)]
        for worker in self._workers:
            self._idle.put(worker)
        self._threads = ThreadPoolExecutor(self.size)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def start(self) -> None:
        """Begin to import, beside other work."""
        self._origin.start()

    def run(self, job: JsonObject, timeout_s: float = TIMEOUT_S) -> Any:
        """Run one job; its result as data.

        Raises:
            CompileError: the job failed, died, or ran out of time; the message says which.
        """
        worker = self._idle.get()
        try:
            try:
                answer = read_answer(worker.call(job, timeout_s=timeout_s))
            except ChildError as error:
                if "SIGKILL" not in error.detail:
                    raise
                # As by the kernel, for memory that another process may have taken.
                answer = read_answer(worker.call(job, timeout_s=timeout_s))
        except ChildError as error:
            why = {
                "timeout": f"{error.detail}; the worker was killed",
                "died": f"the compile worker died: {error.detail}",
            }
            raise CompileError(why[error.kind], hint=_HINTS.get(error.kind, "")) from error
        finally:
            self._idle.put(worker)  # the next job starts it anew where it is gone
        match answer:
            case Ok(result=result):
                return result
            case Refused(message=message, hint=hint):
                raise CompileError(message, hint=hint)
        raise CompileError(f"the compile worker answered {answer.kind}")

    def compile(self, job: CompileJob) -> BuiltObject:
        """Compile a program's object.

        Raises:
            CompileError: it does not compile; else as `run`.
        """
        return BuiltObject.model_validate(self.run(job.model_dump(mode="json")))

    def map(
        self, jobs: Sequence[CompileJob], progress: Callable[[int, CompileJob], None]
    ) -> list[BuiltObject | CompileError]:
        """Compile all jobs, telling `progress`; results or errors in order."""
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
        if not self._origin.ready:
            self._origin.end()
        for worker in self._workers:
            worker.close()
        self._origin.end()
