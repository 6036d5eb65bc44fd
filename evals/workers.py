"""Where trials run: in this process, or in processes of their own."""

import multiprocessing
import os
import threading
from collections.abc import Callable
from concurrent.futures import Executor, Future, ProcessPoolExecutor
from typing import Any

from coda_agent.agent.execution.pool import SIDE_BY_SIDE
from coda_agent.agent.keys import KEYS


class _Here(Executor):
    """Runs what it is given at once, in this process."""

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        future: Future[Any] = Future()
        future.set_result(fn(*args, **kwargs))
        return future


def workers(count: int) -> Executor:
    """Make what runs trials: this process for one, else `count` others."""
    if count == 1:
        return _Here()
    return ProcessPoolExecutor(
        # Forked, a worker would share this process's threads' locks, and a GPU it may hold.
        count, multiprocessing.get_context("spawn"), _begin_worker, (KEYS.take(), count)
    )  # fmt: skip


def _begin_worker(secrets: dict[str, str], count: int) -> None:
    os.environ.update(secrets)  # until the first run takes them out again
    os.environ[SIDE_BY_SIDE] = str(count)
    # Threads of several processes spin while they wait for one another: seconds became minutes.
    os.environ["OMP_NUM_THREADS"] = str(max(1, len(os.sched_getaffinity(0)) // count))

    leave_with_parent()


def leave_with_parent() -> None:
    """End this process when the one that spawned it does.

    A worker whose parent was killed would wait for work for ever.
    """
    if (parent := multiprocessing.parent_process()) is None:
        return

    def wait() -> None:
        parent.join()
        os._exit(1)

    threading.Thread(target=wait, daemon=True).start()
