"""Trials on a Dask cluster: `eval run --dask HOST:PORT`, the scheduler's address.

A worker is a process with one thread, and with one GPU where it has any. It has the same program as
the command, and sees the workspace at the same path; logs are written there.
"""

import logging
from collections.abc import Callable
from concurrent.futures import BrokenExecutor, Executor, Future
from pathlib import Path
from typing import Any, cast

from coda_agent.agent.execution.local import here
from coda_agent.agent.judge.machine import Gpu
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.objects import fingerprint

CONNECT_S = 10
_SOURCES = ("agent", "primitives", "specs", "runtime", "demos", "evals")


class Cluster(Executor):
    """The workers of a Dask scheduler.

    Raises:
        MachineError: `distributed` is not installed, the scheduler does not answer, it has no
            worker, or a worker has another program or does not see `root`.
    """

    def __init__(self, address: str, root: Path) -> None:
        try:
            from distributed import Client
        except ImportError:
            hint = "pip install 'coda-agent[dask]'"
            raise MachineError("--dask needs the package distributed", hint=hint) from None
        # What Dask logs of a loss is said in one line here.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        try:
            self._client = Client(f"tcp://{address}", timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            message = f"no Dask scheduler answers at {address}"
            raise MachineError(message, hint="start one with `dask scheduler`") from error
        try:
            self._check(address, root)
        except MachineError:
            self.shutdown()
            raise
        self._pool = self._client.get_executor(pure=False)

    def _check(self, address: str, root: Path) -> None:
        workers = cast(
            "dict[str, tuple[str, bool, Gpu | None]]", self._client.run(_about, str(root))
        )
        if not workers:
            hint = f"start one with `dask worker tcp://{address} --nthreads 1`"
            raise MachineError(f"the scheduler at {address} has no worker", hint=hint)
        for worker, (program, sees, _) in workers.items():
            if program != fingerprint(*_SOURCES):
                hint = "install the same coda-agent on every machine"
                raise MachineError(f"worker {worker} has another program", hint=hint)
            if not sees:
                hint = "its folder is to be on a file system that all machines share"
                raise MachineError(f"worker {worker} does not see {root}", hint=hint)
        self._gpus = [gpu for _, _, gpu in workers.values() if gpu]

    def gpu(self) -> Gpu | None:
        """Name the GPU of a worker."""
        return self._gpus[0] if self._gpus else None

    def submit(self, fn: Callable[..., Any], /, *args: Any, **kwargs: Any) -> Future[Any]:
        """Run a function on a worker; its loss is a `BrokenExecutor`."""
        from distributed import KilledWorker

        result: Future[Any] = Future()

        def pass_on(done: Future[Any]) -> None:
            error = None if done.cancelled() else done.exception()
            if done.cancelled() or isinstance(error, KilledWorker):
                why = "the scheduler is gone" if done.cancelled() else "each that had it died"
                result.set_exception(BrokenExecutor(f"the cluster lost a trial: {why}"))
            elif error:
                result.set_exception(error)
            else:
                result.set_result(done.result())

        self._pool.submit(fn, *args, **kwargs).add_done_callback(pass_on)
        return result

    def shutdown(self, wait: bool = True, *, cancel_futures: bool = False) -> None:
        """Leave the cluster, which forgets this command's trials."""
        self._client.close()


def _about(root: str) -> tuple[str, bool, Gpu | None]:
    """Tell a worker's program, whether it sees a folder, and its GPU."""
    return fingerprint(*_SOURCES), Path(root).is_dir(), here().gpu()
