"""The supervisor of a GPU, whose own process never touches it.

- Kernels run in a warm child (`device_worker.py`). Whoever sends jobs there holds the GPU against
  other coda-agent processes meanwhile (`exclusive`).
- A job without an answer costs the child. It is killed, the GPU is probed, and the job goes on
  without the tile whose launch was in flight.
- A job that is lost with no launch in flight is tried once more. Lost again, it is the machine's
  fault.
"""

import fcntl
import os
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import reduce
from pathlib import Path
from typing import Any

from coda_agent.agent.execution.answers import Bug, Fault, Ok, Refused, read_answer
from coda_agent.agent.execution.child import Child, ChildError
from coda_agent.agent.execution.faulted_tiles import FaultMemory, Launch, TileFault
from coda_agent.agent.judge.job import Job, NumericsJob
from coda_agent.agent.judge.machine import CONTENDED, DEVICE_CHILD, Gpu, demanded, smi
from coda_agent.agent.judge.records import (
    Finding,
    JsonObject,
    Key,
    Outcome,
    Progress,
    RefusedTile,
    ReportT,
    Tiles,
)
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.objects import cache_directory
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.specs import Spec

HANG_S = 20.0  # silence after which a launch hangs; what is judged takes milliseconds
IDLE_S = 300.0  # silence otherwise; torch.compile of a baseline is what takes longest
LOCK_S = 1800.0
SETTLE_S = 30.0
PROBE_S = 30.0
MAX_FAULTS = 4
"""Tiles of one program and type that may fault before the program is refused."""
_SLACK_MIB = 512
# Not the user's own TMPDIR, since the lock is between users, too.
LOCKS = Path("/tmp")


def find_gpus() -> list[Gpu]:
    """List the GPUs to use, in order.

    They are that of `CODA_AGENT_GPU` (an index or a UUID), else what `CUDA_VISIBLE_DEVICES` leaves,
    else all.

    Raises:
        MachineError: the GPU of `CODA_AGENT_GPU` is not there.
    """
    rows = smi("gpu=index,uuid,name,compute_cap")
    asked = os.environ.get("CODA_AGENT_GPU")
    wanted = asked or os.environ.get("CUDA_VISIBLE_DEVICES", ",".join(row[0] for row in rows))
    names = [name.strip() for name in wanted.split(",") if name.strip()]
    found = [
        Gpu(uuid, name, capability)
        for n in names
        for index, uuid, name, capability in rows
        if n == index or uuid.startswith(n)
    ]
    if asked and not found:
        known = ", ".join(f"{row[0]} ({row[1]})" for row in rows) or "none"
        raise MachineError(f"CODA_AGENT_GPU={asked} names no GPU here; there are: {known}")
    return found


def _used(uuid: str) -> tuple[int, int]:
    """Measure memory in use in MiB and utilization in percent, else zeros."""
    row = next(iter(smi("gpu=memory.used,utilization.gpu", "-i", uuid)), [])
    memory, busy = (int(cell) if cell.isdigit() else 0 for cell in [*row, "", ""][:2])
    return memory, busy


def _lock(gpu: Gpu) -> int | None:
    """Lock the GPU by a descriptor; None where another process holds it."""
    path = LOCKS / f"coda-agent-{gpu.uuid}.lock"
    try:  # any user makes the file and all lock it, which needs no right to write
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW)
    except FileNotFoundError:
        fd = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_CREAT, 0o644)
        os.fchmod(fd, 0o644)  # whatever the umask
    try:
        fcntl.flock(fd, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        os.close(fd)
        return None
    return fd


def is_free(gpu: Gpu) -> bool:
    """Tell whether no other coda-agent process holds the GPU now."""
    fd = _lock(gpu)
    if fd is not None:
        os.close(fd)
    return fd is not None


@contextmanager
def exclusive(
    gpus: Sequence[Gpu], progress: Progress = lambda *_: None, *, wait_s: float | None = None
) -> Iterator[Gpu]:
    """Hold the first free GPU against other coda-agent processes here.

    Raises:
        MachineError: there is none, or other processes gave none up within `wait_s`, by default
            `LOCK_S`.
    """
    begun = time.monotonic()
    demanded(next(iter(gpus), None))
    names = " and ".join(sorted({gpu.name for gpu in gpus}))
    while True:
        for gpu in gpus:
            fd = _lock(gpu)
            if fd is None:
                continue
            try:
                yield gpu
            finally:
                os.close(fd)
            return
        waited = time.monotonic() - begun
        if waited > (LOCK_S if wait_s is None else wait_s):
            raise MachineError(
                f"another coda-agent process has held {names} for {waited:.0f} s",
                hint="wait for it, or choose another GPU by CODA_AGENT_GPU",
            )
        progress(0, 0, f"waiting {waited:.0f} s: another coda-agent process uses {names}")
        time.sleep(0.1)


def environment(gpu: Gpu) -> dict[str, str]:
    """Give the variables of a child on `gpu`, beside every child's."""
    cache = cache_directory().resolve()
    return {
        "CUDA_VISIBLE_DEVICES": gpu.uuid,
        "CODA_AGENT_GPU": gpu.uuid,
        "QUACK_CACHE_DIR": str(cache),
        # Commands side by side, each with a thread for every core, would spin and wait for others.
        "OMP_NUM_THREADS": "4",
        "TORCHINDUCTOR_COMPILE_THREADS": "4",
        # Its folder for temporary files, where torch would keep this, goes with the child.
        "TORCHINDUCTOR_CACHE_DIR": str(cache.parent / "inductor"),
        **{name: os.environ[name] for name in (CONTENDED,) if name in os.environ},
    }


class Lost(Exception):
    """A job got no answer; the suspect is the launch in flight."""

    def __init__(self, fault: str, detail: str, launch: Launch | None) -> None:
        super().__init__(fault)
        self.fault, self.detail, self.launch = fault, detail, launch


class Device:
    """A GPU and its child, whose main module is `module`."""

    def __init__(self, gpu: Gpu, module: str = DEVICE_CHILD) -> None:
        self.gpu = gpu
        self._child = Child(module, environment=environment(gpu))
        self._idle_mib = 0

    def start(self) -> None:
        """Begin to start the child; its imports overlap with other work."""
        self._idle_mib = self._idle_mib or _used(self.gpu.uuid)[0]
        self._child.start()

    def close(self) -> None:
        """Kill the child."""
        self._child.close()

    def grade(self, job: Job[ReportT], progress: Progress) -> Outcome[ReportT]:
        """Run a gate's kernels; numerics a job for each program and type.

        Returns:
            What the jobs found together. Tiles that fault are among the refused ones. A fault of
            the default tile, or of `MAX_FAULTS` tiles, is a finding and ends the gate.

        Raises:
            MachineError: the GPU is not usable, or a job is lost and no launch is the suspect.
            CodaError: what a job raises.
        """
        # One job for all that is timed: what it times of one program depends on the others.
        split = isinstance(job, NumericsJob)
        units = [{key: tiles} for key, tiles in job.tiles.items()] if split else [job.tiles]
        found: list[Outcome[ReportT]] = []
        for unit in units:
            found.append(self._unit(job, unit, progress))
            if found[-1].report is None and found[-1].findings:
                break  # the unit was given up
        return reduce(Outcome.joined, found)

    def _unit(self, job: Job[ReportT], tiles: Tiles, progress: Progress) -> Outcome[ReportT]:
        """Run one job without tiles that fault; given up, return the faults."""
        past = {key: FaultMemory(self.gpu.name, job.programs[key[0]], key[1]) for key in tiles}
        faults = {(k, c): f for k in tiles for c, f in past[k].known(tiles[k]).items()}
        while True:
            # In a call the function chooses the tile, so there is no going on without it.
            last = (c == DEFAULT_CONFIGS["sm_90a"] or job.kind == "call" for _, c in faults)
            found = [_finding(*item) for item in faults.items()]
            if any(last) or len(faults) >= MAX_FAULTS:
                return Outcome(findings=tuple(found))
            left = {k: tuple(c for c in tiles[k] if (k, c) not in faults) for k in tiles}
            work = job.model_copy(update={"tiles": left}).model_dump(mode="json")
            try:
                outcome = job.answer.model_validate(self._tried(work, progress))
                return outcome.refusing(map(RefusedTile.of, found))
            except Lost as lost:
                assert lost.launch is not None
                key, config = _culprit(job.spec, lost.launch, left)
                about = TileFault(fault=lost.fault, detail=lost.detail, launch=lost.launch)
                faults[key, config] = past[key].add(config, about)

    def _tried(self, job: JsonObject, progress: Progress) -> Any:
        """Run a job, and again where it is lost without a suspect.

        Raises:
            Lost: a launch was in flight.
            MachineError: it was lost twice without a suspect, or the GPU does not recover.
        """
        timeout_s = IDLE_S * (1 + sum(len(configs) for *_, configs in job["tiles"]))
        for last in (False, True):
            try:
                return self._answer(job, timeout_s, progress)
            except Lost as lost:
                self._recover(lost, progress)
                if lost.launch is not None:
                    raise
                if last:
                    said = f"the {job['kind']} gate was lost twice on {self.gpu.name}: {lost.fault}"
                    raise MachineError(f"{said}; {lost.detail}") from lost
        raise AssertionError("unreachable")

    def _answer(self, job: JsonObject, timeout_s: float, progress: Progress) -> Any:
        """Run a job, and kill the child that is silent too long.

        Raises:
            CodaError: what the job raised in the child.
            Lost: the GPU failed, or there was no answer.
        """
        launch: Launch | None = None
        heard, hung, over = time.monotonic(), 0.0, threading.Event()

        def record(told: JsonObject) -> None:
            nonlocal heard, launch
            heard = time.monotonic()
            if "launch" in told:
                launch = told["launch"] and Launch.model_validate(told["launch"])
            else:
                progress(told["done"], told["total"], told["note"])

        def watch() -> None:
            nonlocal hung
            while not over.wait(0.2):
                limit = HANG_S if launch else IDLE_S
                if time.monotonic() - heard > limit:
                    hung = limit
                    self._child.close()
                    return

        watcher = threading.Thread(target=watch, daemon=True)
        watcher.start()
        try:
            said = self._child.call(job, timeout_s=timeout_s, progress=record)
        except ChildError as error:
            if hung or error.kind == "timeout":
                silence = f"no sign of life for {hung:g} s" if hung else error.detail
                raise Lost("hangs", silence, launch) from error
            # SIGKILL is the system's doing (memory) or the user's, and no launch's.
            suspect = None if "SIGKILL" in error.detail else launch
            raise Lost("the device child died", error.detail, suspect) from error
        finally:
            over.set()
            watcher.join()
        match read_answer(said):
            case Ok(result=result):
                return result
            case Refused() as refused:
                raise refused.raised()
            case Fault(fault=fault, detail=detail):
                raise Lost(fault, detail, None if fault == "out of memory" else launch)
            case Bug(trace=trace):
                raise RuntimeError(f"in the device child:\n{trace}")

    def _recover(self, lost: Lost, progress: Progress) -> None:
        """Start a new child on a GPU that is idle and multiplies.

        Raises:
            MachineError: the GPU does not come to that within `SETTLE_S` and `PROBE_S`.
        """
        self._child.close()
        progress(0, 0, f"{lost.fault}; looking after {self.gpu.name}")
        self._child.start()  # it imports while the GPU settles, and takes none of it before a job
        fault = f"after a fault ({lost.fault}) {self.gpu.name} ({self.gpu.uuid})"
        hint = "see nvidia-smi and the kernel's log for Xid; nvidia-smi --gpu-reset may mend it"
        end = time.monotonic() + SETTLE_S
        while True:
            memory, busy = _used(self.gpu.uuid)
            if memory <= self._idle_mib + _SLACK_MIB and busy < 50:
                break
            if smi("compute-apps=pid", "-i", self.gpu.uuid):
                break  # someone else's work, which is theirs to do
            if time.monotonic() > end:
                state = f"{memory - self._idle_mib} MiB more in use than before, {busy} % busy"
                raise MachineError(f"{fault} stays {state}, with no process on it", hint=hint)
            time.sleep(0.5)
        try:
            answer = read_answer(self._child.call({"kind": "probe"}, timeout_s=PROBE_S))
        except ChildError as error:
            raise MachineError(f"{fault} does not answer: {error.detail}", hint=hint) from error
        match answer:
            case Ok(result=True):
                return
            case Fault(detail=said) | Bug(trace=said) | Refused(message=said):
                last = said.strip().splitlines()[-1]
            case _:
                last = "it multiplies wrongly"
        raise MachineError(f"{fault} is not in order: {last}", hint=hint)


def _culprit(spec: Spec, launch: Launch, left: Tiles) -> tuple[Key, TileConfig]:
    """Find whose launch was in flight, whatever the tile's rasterisation order."""
    ran = launch.config
    for (name, element), configs in left.items():
        dtype = spec.dtype_of(spec.gemm[0], dict.fromkeys(spec.types, element))
        if (name, dtype) == (launch.program, launch.dtype):
            for config in configs:
                if config == ran or replace(config, swizzle=ran.swizzle) == ran:
                    return (name, element), config
    raise AssertionError(f"{launch} was never asked for")


def _finding(tile: tuple[Key, TileConfig], fault: TileFault) -> Finding:
    (program, element), config = tile
    sizes = fault.launch.model_dump(include={"m", "n", "k"})
    where = {"program": program, "dtype": element, "sizes": sizes, "tile": config.label}
    return Finding(message=f"{fault.fault}: {fault.detail}", where=where)
