"""Where the judge's jobs run: on this machine, or on a Dask cluster (`cluster.py`).

Jobs are data: programs as graphs, a spec's text, tiles. A candidate's Python, and the author, stay
with the command that was started; so do keys and logs.
"""

from __future__ import annotations

import contextlib
import os
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache
from typing import Any, Protocol

from coda_agent.agent.judge.device import Device, Gpu, exclusive, find_gpus, is_free
from coda_agent.agent.judge.job import Job, Progress
from coda_agent.agent.judge.pool import warm_pool
from coda_agent.primitives.errors import CodaError, CompileError

VARIABLE = "CODA_AGENT_EXECUTOR"
"""Environment variable: `dask://HOST:PORT`; unset, jobs run on this machine."""
HOPPER = "9.0"


class Executor(Protocol):
    """Runs the jobs of a trial; the same job gives the same answer wherever it runs."""

    def gpu(self) -> Gpu | None:
        """A Hopper GPU that jobs can have; None where there is none."""
        ...

    def start(self, ahead: Job | None) -> None:
        """Told that a GPU will be needed soon, and what it can do by then."""
        ...

    def map(
        self, jobs: Sequence[dict[str, Any]], progress: Callable[[int, dict[str, Any]], None]
    ) -> list[Any | CompileError]:
        """Compile jobs, results or errors in order; `progress(done, job)` after each."""
        ...

    def grade(self, job: Job, progress: Progress) -> dict[str, Any]:
        """The record of a gate, as `Device.grade` gives it."""
        ...

    def environment(self, device: str) -> dict[str, Any]:
        """The machine that the last gate ran on, as evidence names it."""
        ...


class Local:
    """This machine: a pool of compile workers, and a child for each GPU.

    A gate gets the first GPU that no other coda-agent process uses, so commands side by side
    spread over the GPUs that `CUDA_VISIBLE_DEVICES` leaves.
    """

    def __init__(self) -> None:
        self._found: list[Gpu] | None = None
        self._devices: dict[Gpu, Device] = {}
        self._used: Gpu | None = None
        self._ahead: threading.Thread | None = None

    def gpu(self) -> Gpu | None:
        return next(iter(self._gpus()), None)

    def _gpus(self) -> list[Gpu]:
        """Hopper GPUs, those with a warm child first. No CUDA context is made here."""
        if self._found is None:  # nvidia-smi takes a while to answer
            self._found = [gpu for gpu in find_gpus() if gpu.capability == HOPPER]
            if self._found:
                from torch.version import cuda

                self._found = self._found if cuda else []
        return sorted(self._found, key=lambda gpu: gpu not in self._devices)

    def _device(self, gpu: Gpu) -> Device:
        import atexit

        if gpu not in self._devices:
            self._devices[gpu] = made = Device(gpu)
            atexit.register(made.close)
        return self._devices[gpu]

    def start(self, ahead: Job | None) -> None:
        if self._ahead and self._ahead.is_alive():
            return
        if gpu := next(filter(is_free, self._gpus()), None):
            device = self._device(gpu)
            device.start()
            if ahead:
                self._ahead = threading.Thread(target=_prepare, args=(device, ahead), daemon=True)
                self._ahead.start()

    def map(
        self, jobs: Sequence[dict[str, Any]], progress: Callable[[int, dict[str, Any]], None]
    ) -> list[Any | CompileError]:
        return warm_pool().map(jobs, progress)

    def grade(self, job: Job, progress: Progress) -> dict[str, Any]:
        if job.kind == "interpret":
            return _interpreted(job, progress)
        if self._ahead:
            self._ahead.join()
        with exclusive(self._gpus(), progress) as gpu:
            self._used = gpu
            return self._device(gpu).grade(job, progress)

    def environment(self, device: str) -> dict[str, Any]:
        from coda_agent.agent.judge.provenance import environment

        return environment(device, (self._used or self.gpu()) if device == "cuda" else None)


def _prepare(device: Device, job: Job) -> None:
    # What fails here fails in the gate, too, and is told there.
    with contextlib.suppress(Exception), exclusive([device.gpu], wait_s=0):
        device.prepare(job)


def _interpreted(job: Job, progress: Progress) -> dict[str, Any]:
    from coda_agent.agent.judge.device_worker import as_record
    from coda_agent.agent.judge.numerics import check_numerics

    report = check_numerics(job.spec, job.programs, job.tiles, device="cpu", progress=progress)
    return as_record(report)


def executor() -> Executor:
    """What `VARIABLE` names.

    Raises:
        CodaError: it names nothing known.
        MachineError: a cluster that does not answer, or cannot be used.
    """
    return _executor(os.environ.get(VARIABLE, ""))


@lru_cache(maxsize=1)
def _executor(name: str) -> Executor:
    if not name:
        return Local()
    kind, _, address = name.partition("://")
    if kind != "dask" or ":" not in address:
        raise CodaError(f"no executor {name!r}", hint="expected dask://HOST:PORT")
    from coda_agent.agent.judge.cluster import Cluster

    return Cluster(address)
