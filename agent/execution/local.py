"""The judge's jobs on this machine: compile workers, a child a GPU."""

import atexit
import contextlib
import threading
from collections.abc import Callable, Sequence
from functools import lru_cache

from coda_agent.agent.execution.device import Device, exclusive, find_gpus, is_free
from coda_agent.agent.execution.pool import CompilePool
from coda_agent.agent.execution.sanitize import sanitize
from coda_agent.agent.judge.job import BuiltObject, CompileJob, Job, PrepareJob
from coda_agent.agent.judge.machine import Gpu, demanded, environment
from coda_agent.agent.judge.records import JsonObject, Outcome, Progress, ReportT
from coda_agent.agent.judge.runners import one_thread
from coda_agent.primitives.errors import CompileError

HOPPER = "9.0"


class Local:
    """An `Executor` of this machine.

    A gate gets the first GPU that no other coda-agent process uses, so commands side by side
    spread over the GPUs that `CUDA_VISIBLE_DEVICES` leaves.
    """

    def __init__(self) -> None:
        self._found: list[Gpu] | None = None
        self._pool: CompilePool | None = None
        self._devices: dict[Gpu, Device] = {}
        self._used: Gpu | None = None
        self._ahead: threading.Thread | None = None

    def gpu(self) -> Gpu | None:
        return next(iter(self._gpus()), None)

    def _gpus(self) -> list[Gpu]:
        """List Hopper GPUs, warm ones first; no CUDA context is made."""
        if self._found is None:  # nvidia-smi takes a while to answer
            self._found = [gpu for gpu in find_gpus() if gpu.capability == HOPPER]
            if self._found:
                from torch.version import cuda

                self._found = self._found if cuda else []
        return sorted(self._found, key=lambda gpu: gpu not in self._devices)

    def _device(self, gpu: Gpu) -> Device:
        if gpu not in self._devices:
            self._devices[gpu] = made = Device(gpu)
            atexit.register(made.close)
        return self._devices[gpu]

    def pool(self) -> CompilePool:
        """Return workers that stay warm until this process ends."""
        if self._pool is None:
            self._pool = CompilePool()
            atexit.register(self._pool.close)
        return self._pool

    def start(self, *, gpu: bool, ahead: PrepareJob | None = None) -> None:
        self.pool().start()
        if not gpu or (self._ahead and self._ahead.is_alive()):
            return
        if free := next(filter(is_free, self._gpus()), None):
            device = self._device(free)
            device.start()
            if ahead:
                self._ahead = threading.Thread(target=_prepare, args=(device, ahead), daemon=True)
                self._ahead.start()

    def map(
        self, jobs: Sequence[CompileJob], progress: Callable[[int, CompileJob], None]
    ) -> list[BuiltObject | CompileError]:
        return self.pool().map(jobs, progress)

    def grade(self, job: Job[ReportT], progress: Progress) -> Outcome[ReportT]:
        if job.device == "cpu":
            with one_thread():
                return job.run(progress)
        if job.tool:
            return sanitize(demanded(self.gpu()), job, progress)
        if self._ahead:
            self._ahead.join()
        with exclusive(self._gpus(), progress) as gpu:
            self._used = gpu
            return self._device(gpu).grade(job, progress)

    def environment(self, device: str) -> JsonObject:
        return environment(device, (self._used or self.gpu()) if device == "cuda" else None)


@lru_cache(maxsize=1)
def here() -> Local:
    """Return this machine, for what runs here whatever the executor."""
    return Local()


def _prepare(device: Device, job: PrepareJob) -> None:
    # What fails here fails in the gate, too, and is told there.
    with contextlib.suppress(Exception), exclusive([device.gpu], wait_s=0):
        device.grade(job, lambda *_: None)
