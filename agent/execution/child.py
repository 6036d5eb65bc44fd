"""A warm child process that answers jobs; both sides of the conversation.

Jobs go in on the child's stdin, and records come out on a descriptor of their own. What the child
prints goes to a third pipe, whose last lines are kept for the error message.

A child leads a group of processes, its compilers among them. `close()` kills the group; where the
process that started it was killed instead, the child notices that nobody can send jobs any more,
and kills the group itself. Its scratch folder goes with it either way.

A child can be a fork of another one, which has imported what takes seconds: it opens the fork's
pipes, and says how the fork ended.
"""

import contextlib
import io
import json
import os
import resource
import select
import shutil
import signal
import struct
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self

from coda_agent.agent.execution.confinement import confined
from coda_agent.agent.judge.records import JsonObject

START_TIMEOUT_S = 120.0  # imports: 5 s alone, 20 s on a loaded machine
MAX_LOG_BYTES = 4000
_SCRATCH = "coda-agent-"
_PASSED = (
    "PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME",
    "CUDA_PATH", "QUACK_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip
_LENGTH = struct.Struct(">Q")
_FORK, _WAIT, _WAIT_S = "fork", "wait", 10.0
"""Jobs of a child that others are forks of: the pipes of a new one, the number of one that ends."""


class ChildError(Exception):
    """The child gave no answer: `kind` says how, `detail` why."""

    def __init__(self, kind: Literal["timeout", "died"], detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Limits:
    """What each process of a child may use; None sets no limit.

    Attributes:
        memory_bytes: Private memory that can be written.
        file_bytes: The size of a file.
        niceness: Added to the process's own.
    """

    memory_bytes: int | None = None
    file_bytes: int | None = None
    niceness: int = 0

    def take(self) -> None:
        """Hold this process to the limits, and what it starts."""
        # Not RLIMIT_AS: CUDA reserves more addresses than there is memory.
        found = {resource.RLIMIT_DATA: self.memory_bytes, resource.RLIMIT_FSIZE: self.file_bytes}
        for limit, value in {resource.RLIMIT_CORE: 0, **found}.items():
            if value is not None:
                hard = resource.getrlimit(limit)[1]
                value = value if hard == resource.RLIM_INFINITY else min(value, hard)
                resource.setrlimit(limit, (value, value))
        os.nice(self.niceness)
        with contextlib.suppress(OSError):  # some containers have no such file
            # When memory runs out, the kernel ends this process rather than the command.
            Path("/proc/self/oom_score_adj").write_text("1000")


class Child:
    """One warm process, started when needed, and again after it ended.

    Args:
        module: What runs in it, by `python -m`; its main calls `serve`.
        environment: Variables set beside the few that are passed on.
        prefix: What the command begins with, a tool that runs Python.
        confine: Whether it has no network, and may write its scratch folder, $TMPDIR, alone, where
            that can be had.
        mute: Whether the end of what it writes to stderr is kept for the error message; else it
            goes to this process's.
        origin: A child that it is a fork of, in the place of a process that begins anew.
    """

    def __init__(
        self,
        module: str,
        *,
        origin: "Child | None" = None,
        environment: Mapping[str, str] | None = None,
        prefix: Sequence[str] = (),
        confine: bool = False,
        mute: bool = True,
    ) -> None:
        self._module, self._extra = module, dict(environment or {})
        self._prefix, self._confine, self._mute = prefix, confine, mute
        self._origin = origin
        self._using = threading.RLock()
        self._process: subprocess.Popen[bytes] | _Fork | None = None
        self._scratch = ""
        self._jobs = self._results = self._output = -1
        self._buffer = bytearray()
        self._log = self._unsent = b""
        self._ready = self._over = False

    def start(self) -> None:
        """Begin to start the child; its imports overlap with other work.

        Raises:
            ChildError: it was closed for good, or what it is to be a fork of is gone.
        """
        with self._using:
            self._check_open()
            if self._process is not None:
                if not self._ready or not select.select([self._results], [], [], 0)[0]:
                    return
                self.close()  # it ended while it was idle
            stdin, self._jobs = os.pipe()
            self._results, out = os.pipe()
            self._output, log = os.pipe()
            os.set_blocking(self._jobs, False)
            self._scratch = tempfile.mkdtemp(prefix=_SCRATCH)
            command = [*self._prefix, sys.executable, "-P", "-m", self._module, str(out)]
            if self._confine:
                command = confined(command, self._scratch)
            try:
                if self._origin is not None:
                    self._process = _Fork.of(self._origin, (stdin, out, log), self._scratch)
                else:
                    self._process = subprocess.Popen(
                        command, stdin=stdin, stdout=log, stderr=log if self._mute else None,
                        pass_fds=(out,), cwd="/", start_new_session=True,
                        env=_scrubbed({"TMPDIR": self._scratch, **self._extra}),
                    )  # fmt: skip
            finally:
                for fd in (stdin, out, log):
                    os.close(fd)
                if self._process is None:
                    self._forget()
            self._check_open()  # whoever ended it meanwhile saw no process

    def _check_open(self) -> None:
        if self._over:
            self.close()
            raise ChildError("died", "it was closed")

    def call(
        self,
        job: JsonObject,
        *,
        timeout_s: float,
        progress: Callable[[Any], None] | None = None,
    ) -> Any:
        """Send a job and wait for its answer; imports do not count.

        Raises:
            ChildError: it gave none; the child is gone.
        """
        body = json.dumps(job).encode()
        with self._using:
            try:
                self.start()
                if not self._ready:
                    self._record(time.monotonic() + START_TIMEOUT_S, "it did not start within")
                    self._ready = True
                self._unsent = _LENGTH.pack(len(body)) + body
                deadline = time.monotonic() + timeout_s
                while True:
                    record = self._record(deadline, f"no answer within {timeout_s:g} s")
                    if "answer" in record:
                        return record["answer"]
                    if progress is not None:
                        progress(record["progress"])
            except BaseException:  # an interrupt too: what it left unread is no later job's answer
                self.close()
                raise

    def close(self) -> None:
        """Kill the child and its group, and wait; from any thread."""
        if (process := self._process) is not None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        with self._using:  # a call in another thread has noticed, and ended
            self._forget()

    def end(self) -> None:
        """Close it for good; who waits for its imports waits no more."""
        self._over = True
        self.close()

    @property
    def ready(self) -> bool:
        """Whether its imports are done."""
        return self._ready

    def _forget(self) -> None:
        for fd in (self._jobs, self._results, self._output):
            if fd >= 0:
                os.close(fd)
        if self._scratch:
            shutil.rmtree(self._scratch, ignore_errors=True)
        self._process, self._scratch = None, ""
        self._jobs = self._results = self._output = -1
        self._buffer = bytearray()
        self._log = self._unsent = b""
        self._ready = False

    def _record(self, deadline: float, late: str) -> JsonObject:
        """Read the next record; meanwhile send jobs, and keep the last prints."""
        while (end := self._buffer.find(b"\n")) < 0:
            left = deadline - time.monotonic()
            if left <= 0:
                raise ChildError("timeout", late)
            reading = [fd for fd in (self._results, self._output) if fd >= 0]
            writing = [self._jobs] if self._unsent else []
            readable, writable, _ = select.select(reading, writing, [], left)
            if writable:
                try:
                    self._unsent = self._unsent[os.write(self._jobs, self._unsent) :]
                except BrokenPipeError:
                    self._unsent = b""  # the end of its results will say why
            if self._output in readable:
                self._read_log()
            if self._results in readable:
                if not (chunk := os.read(self._results, 1 << 16)):
                    raise ChildError("died", self._death())
                self._buffer += chunk
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        return json.loads(line)

    def _read_log(self) -> None:
        if chunk := os.read(self._output, 1 << 16):
            self._log = (self._log + chunk)[-MAX_LOG_BYTES:]
        else:
            os.close(self._output)
            self._output = -1

    def _death(self) -> str:
        """Say how the child ended, and the last line it wrote."""
        assert self._process is not None
        try:
            status = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return "it closed its results"
        while self._output >= 0 and select.select([self._output], [], [], 0.2)[0]:
            self._read_log()
        lines = [line.strip() for line in self._log.decode(errors="replace").split("\n")]
        said = next((line for line in reversed(lines) if line), "")[:300]
        number = -status if status < 0 else status - 128  # bubblewrap gives 128 and the signal
        how = f"exit status {status}"
        if number > 0:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(number).name}"
        return f"{how}: {said}" if said else how


@dataclass(frozen=True)
class _Fork:
    """A child's fork, as a process."""

    origin: Child
    pid: int

    @classmethod
    def of(cls, origin: Child, pipes: Sequence[int], scratch: str) -> Self:
        """Fork a child.

        Args:
            pipes: The fork's ends of this process's pipes: jobs, results, and what it prints.
            scratch: Its folder for files.

        Raises:
            ChildError: the child is gone.
        """
        places = [f"/proc/{os.getpid()}/fd/{pipe}" for pipe in pipes]
        job = {_FORK: places, "scratch": scratch}
        return cls(origin, origin.call(job, timeout_s=START_TIMEOUT_S))

    def wait(self, timeout: float = _WAIT_S) -> int:
        """Wait for its exit status; it ends with its origin.

        Raises:
            subprocess.TimeoutExpired: it runs.
        """
        end = time.monotonic() + timeout
        while self.origin.ready:
            with contextlib.suppress(ChildError):
                status = self.origin.call({_WAIT: self.pid}, timeout_s=_WAIT_S)
                if status is not None:
                    return status
            if time.monotonic() > end:
                raise subprocess.TimeoutExpired(str(self.pid), timeout)
            time.sleep(0.01)
        return -signal.SIGKILL


def _scrubbed(extra: Mapping[str, str]) -> dict[str, str]:
    """Make a child's environment: few variables of this one, and `extra`."""
    kept = {name: os.environ[name] for name in _PASSED if name in os.environ}
    if path := kept.get("PYTHONPATH"):  # a child starts in /
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


def serve(
    handler: Callable[[JsonObject, Callable[[object], None]], object],
    first: Callable[[], object] = lambda: None,
) -> None:
    """Answer jobs until the parent is gone: a child's main loop.

    `handler(job, tell)` returns the answer as JSON data; `tell` sends a record of progress. What
    it raises ends the child, so a failure that is an answer is returned. `first` imports what takes
    seconds, which ends with the parent, too.
    """
    jobs, results = os.dup(0), int(sys.argv[1])
    os.set_inheritable(results, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)
    _watch(jobs)
    first()
    while (pipe := _converse(jobs, results, handler)) is not None:
        jobs = pipe
        _watch(jobs)


def _watch(jobs: int) -> None:
    # A descriptor of its own: on a loaded machine the thread polls for the first time after a job
    # raised and `jobs` was closed.
    threading.Thread(target=_end_with_parent, args=(os.dup(jobs),), daemon=True).start()


def _converse(
    jobs: int,
    results: int,
    handler: Callable[[JsonObject, Callable[[object], None]], object],
) -> int | None:
    """Answer jobs until nobody sends any; in a fork return its pipe."""

    def send(record: JsonObject) -> None:
        data = json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(results, data) :]

    send({"answer": "ready"})
    with io.FileIO(jobs) as raw, io.BufferedReader(raw) as pipe:
        while head := pipe.read(_LENGTH.size):
            (size,) = _LENGTH.unpack(head)
            job = json.loads(pipe.read(size))
            if _FORK in job:
                own, out, log = (
                    os.open(x, os.O_CLOEXEC | (os.O_WRONLY if i else os.O_RDONLY))
                    for i, x in enumerate(job[_FORK])
                )
                pid = os.fork()
                os.setpgid(pid, pid)  # on both sides: whoever knows it may kill its group
                if not pid:
                    for fd, place in (log, 1), (log, 2), (out, results):
                        os.dup2(fd, place, inheritable=place < 3)
                    os.environ["TMPDIR"], tempfile.tempdir = job["scratch"], None
                for fd in (out, log, own)[: 3 if pid else 2]:
                    os.close(fd)
                if not pid:
                    return own
                send({"answer": pid})
            elif _WAIT in job:
                pid, status = -1, signal.SIGKILL
                with contextlib.suppress(ChildProcessError):  # of one that was before this
                    pid, status = os.waitpid(job[_WAIT], os.WNOHANG)
                send({"answer": os.waitstatus_to_exitcode(status) if pid else None})
            else:
                send({"answer": handler(job, lambda record: send({"progress": record}))})
    return None


def _end_with_parent(jobs: int) -> None:
    """Kill this process and its group once nobody holds `jobs`' other end."""
    poll = select.poll()
    poll.register(jobs, 0)
    poll.poll()
    if (scratch := Path(os.environ.get("TMPDIR", "/"))).name.startswith(_SCRATCH):
        with contextlib.suppress(OSError):  # whoever would have removed it is gone
            subprocess.Popen(["rm", "-rf", scratch], start_new_session=True)
    os.kill(0, signal.SIGKILL)
