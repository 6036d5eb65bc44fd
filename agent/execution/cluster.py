"""Jobs on a Dask cluster: `--executor dask://HOST:PORT`, the scheduler's address.

- Compile jobs go to workers with the resource CPU. They are named by their digest, so a job that is
  asked for twice runs once.
- A gate that runs kernels goes to a worker with the resource GPU, which is one process with one
  thread for each GPU. The objects go with it, so the machines need no common file system.
- A lost worker's jobs are run again elsewhere, as often as the scheduler's allowed-failures says.
  What a job raises comes back as it would here.
- A worker with another judge refuses all jobs.
"""

import atexit
import contextlib
import hashlib
import json
import logging
import platform
import queue
import uuid
from collections.abc import Callable, Sequence
from operator import itemgetter
from pathlib import Path
from typing import Any, cast

from coda_agent.agent.execution.local import here
from coda_agent.agent.judge.job import BuiltObject, CompileJob, Job, PrepareJob, read_job
from coda_agent.agent.judge.machine import Gpu
from coda_agent.agent.judge.records import Outcome, Progress, ReportT
from coda_agent.primitives.errors import CompileError, MachineError
from coda_agent.primitives.objects import cache_directory, fingerprint

CONNECT_S = 10
_SOURCES = ("agent/judge", "agent/execution", "primitives", "specs", "runtime")
"""The folders that carry out a job."""
_SAME = "install the same coda-agent, and the same packages, on every machine"
_CPU = "start one with `dask worker tcp://HOST:PORT --nthreads 8 --resources CPU=8`"


class Cluster:
    """An `Executor` whose jobs run on a cluster's workers.

    Raises:
        MachineError: `distributed` is not installed, the cluster does not answer, no worker
            compiles, or a worker has another judge.
    """

    def __init__(self, address: str) -> None:
        try:
            from distributed import Client
        except ImportError:
            hint = "pip install 'coda-agent[dask]'"
            message = "an executor on Dask needs the package distributed"
            raise MachineError(message, hint=hint) from None
        # What Dask logs of a loss is said in one line here.
        logging.getLogger("distributed").setLevel(logging.CRITICAL)
        try:
            self._client = Client(f"tcp://{address}", timeout=CONNECT_S, set_as_default=False)
        except (OSError, ValueError) as error:
            message = f"no Dask scheduler answers at {address}"
            raise MachineError(message, hint="start one with `dask scheduler`") from error
        atexit.register(self.close)
        self._built: list[Any] = []
        self._environment: dict[str, Any] = {}
        self._local = here()
        try:
            self._check(address)
        except MachineError:
            self.close()
            raise

    def _check(self, address: str) -> None:
        if not self._workers("CPU"):
            raise MachineError(f"no worker of {address} has the resource CPU", hint=_CPU)
        for worker, digest in self._each(_judge).items():
            if digest != fingerprint(*_SOURCES):
                raise MachineError(f"worker {worker} has another judge", hint=_SAME)

    def _workers(self, resource: str) -> list[str]:
        known = self._client.scheduler_info(n_workers=-1)["workers"]
        return [name for name, worker in known.items() if worker["resources"].get(resource)]

    def gpu(self) -> Gpu | None:
        workers = self._workers("GPU")
        found = self._each(_gpu, workers) if workers else {}
        failed = {worker: gpu for worker, gpu in found.items() if isinstance(gpu, Exception)}
        if failed and len(failed) == len(found):
            worker, error = next(iter(failed.items()))
            raise MachineError(f"no GPU can be used on worker {worker}: {error}")
        return next((gpu for gpu in found.values() if isinstance(gpu, Gpu)), None)

    def _each(
        self, function: Callable[[], Any], workers: list[str] | None = None
    ) -> dict[str, Any]:
        """What a function returns or raises on each worker, at once, whatever runs there. A worker
        that is lost meanwhile is left out."""
        from distributed.comm.core import CommClosedError

        found = self._client.run(function, workers=workers, on_error="return")
        found = cast("dict[str, Any]", found)
        return {k: v for k, v in found.items() if not isinstance(v, CommClosedError)}

    def start(self, *, gpu: bool, ahead: PrepareJob | None = None) -> None:
        """The workers' children are warm after their first job."""

    def map(
        self, jobs: Sequence[CompileJob], progress: Callable[[int, CompileJob], None]
    ) -> list[BuiltObject | CompileError]:
        from distributed import as_completed

        judge = fingerprint(*_SOURCES)
        self._built = [
            self._client.submit(
                _compile, data, judge, key=f"compile-{_digest(data)}", resources={"CPU": 1}
            )
            for data in (job.model_dump(mode="json") for job in jobs)
        ]
        # Only the reports come here; the objects stay where they are until a GPU needs them.
        reports = [
            self._client.submit(itemgetter(0), b, key=f"report-{b.key}", resources={"CPU": 1})
            for b in self._built
        ]
        named = {future.key: job for future, job in zip(reports, jobs, strict=True)}
        with self._client.as_current():
            for done, future in enumerate(as_completed(reports), 1):
                progress(done, named[future.key])
        return [_result(future) for future in reports]

    def grade(self, job: Job[ReportT], progress: Progress) -> Outcome[ReportT]:
        if job.kind == "sanitize":
            return self._local.grade(job, progress)
        resource, objects = ("CPU", []) if job.device == "cpu" else ("GPU", self._built)
        topic, told = f"{job.kind}-{uuid.uuid4().hex}", queue.SimpleQueue[tuple[Any, ...]]()
        self._client.subscribe_topic(topic, lambda event: told.put(event[1]))
        try:
            future = self._client.submit(
                _grade, job.model_dump(mode="json"), fingerprint(*_SOURCES), topic, objects,
                key=topic, resources={resource: 1},
            )  # fmt: skip
            while not future.done():
                with contextlib.suppress(queue.Empty):
                    progress(*told.get(timeout=0.1))
            outcome, self._environment = _result(future)
            return job.answer.model_validate(outcome)
        finally:
            self._client.unsubscribe_topic(topic)

    def close(self) -> None:
        """Leave the cluster, which forgets this client's jobs."""
        self._client.close()

    def environment(self, device: str) -> dict[str, Any]:
        local = self._local.environment("cpu")
        return {**local, **self._environment, "device": device}


def _digest(job: dict[str, Any]) -> str:
    text = json.dumps([job, fingerprint(*_SOURCES)], sort_keys=True)
    return hashlib.sha256(text.encode()).hexdigest()


def _result(future: Any) -> Any:
    """What a job returned or raised.

    Raises:
        MachineError: it is lost, with its workers or with the scheduler.
    """
    from distributed import KilledWorker
    from distributed.client import FutureCancelledError

    try:
        return future.result()
    except (KilledWorker, FutureCancelledError) as error:
        kind = future.key.rpartition("-")[0].removeprefix("report-")
        killed = isinstance(error, KilledWorker)
        who = "each worker that had it died" if killed else "the scheduler is gone"
        message = f"the cluster lost a job of kind {kind}: {who}"
        raise MachineError(message, hint="the same command tries it again") from error


# What follows runs on workers.


def _gpu() -> Gpu | None:
    return here().gpu()


def _judge() -> str:
    return fingerprint(*_SOURCES)


def _require(judge: str) -> None:
    """
    Raises:
        MachineError: the judge here is another.
    """
    if judge != _judge():
        raise MachineError(f"worker {platform.node()} has another judge", hint=_SAME)


def _compile(data: dict[str, Any], judge: str) -> tuple[BuiltObject | CompileError, str, bytes]:
    """What a compile job gave, and the object it left in the cache, by name."""
    _require(judge)
    try:
        built = BuiltObject.model_validate(here().pool().run(data))
    except CompileError as error:
        return error, "", b""
    path = Path(built.object)
    return built, path.relative_to(cache_directory().resolve()).as_posix(), path.read_bytes()


def _grade(
    data: dict[str, Any], judge: str, topic: str, objects: list[tuple[Any, str, bytes]]
) -> tuple[dict[str, Any], dict[str, Any]]:
    """The outcome of a gate, and the environment it ran in."""
    from distributed import get_worker

    _require(judge)
    for _, name, image in objects:
        _keep(name, image)
    worker, local, job = get_worker(), here(), read_job(data)

    def tell(done: int, total: int, note: str) -> None:
        worker.log_event(topic, (done, total, note))

    return local.grade(job, tell).model_dump(mode="json"), local.environment(job.device)


def _keep(name: str, data: bytes) -> None:
    """An object in this machine's cache, where quack looks for it."""
    path = cache_directory() / name
    if name and not path.exists():
        path.parent.mkdir(parents=True, exist_ok=True)
        part = path.with_suffix(f".{uuid.uuid4().hex}")
        part.write_bytes(data)
        part.rename(path)
