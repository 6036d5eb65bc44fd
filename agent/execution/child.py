"""A warm child process that answers jobs, and the child's side of the conversation.

A child has four pipes. Jobs go in on stdin. Records come out on a descriptor of their own. What the
child prints goes to a third pipe, whose last lines are kept for the error message. The fourth is
the lifeline, held by `sandbox/launcher.py`, which starts the child and owns its tree. It closes by
`close()`, or because this process was killed. Then all that the child started dies, double forks
and new sessions included.

A record cannot be forged:

- Each job has a fresh nonce, and each of its records must carry it. The nonce lies behind the job
  in the pipe. It is read once the answer is formed, or the first progress is told, so no frame and
  no memory holds it while a job's own Python runs.
- That Python does not run in the process that serves. `forked` gives it a process of its own, which
  has neither pipe open and cannot look into its parent. It may write to nothing but the pipe for
  its answer. It is gone, with all it started, before the nonce is read.
- What it can forge is its own answer, and that is checked as data by whoever asked.
"""

import contextlib
import io
import json
import os
import secrets
import select
import signal
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

from coda_agent.agent.sandbox import launcher

START_TIMEOUT_S = 120.0  # imports: 5 s alone, 20 s on a loaded machine
MAX_RECORD_BYTES = 16 << 20
MAX_LOG_BYTES = 4000
_PASSED = (
    "PATH", "HOME", "LANG", "LD_LIBRARY_PATH", "PYTHONPATH", "VIRTUAL_ENV", "CUDA_HOME",
    "CUDA_PATH", "TMPDIR", "QUACK_CACHE_DIR", "XDG_CACHE_HOME",
)  # fmt: skip
_LENGTH = struct.Struct(">Q")
_NONCE_BYTES = 32  # as hexadecimal text


class ChildError(Exception):
    """The child gave no answer: `kind` says how it failed, `detail` is one line about it."""

    def __init__(self, kind: Literal["timeout", "died", "malformed"], detail: str) -> None:
        super().__init__(f"{kind}: {detail}")
        self.kind, self.detail = kind, detail


@dataclass(frozen=True)
class Limits:
    """What each process of a child may use; None leaves a limit as it is. No process dumps core.
    `niceness` is added to the process's own."""

    address_space_bytes: int | None = None
    file_bytes: int | None = None
    open_files: int | None = None
    niceness: int | None = None


class Child:
    """One warm child process. Started when needed, and again after it died or was closed.

    Args:
        module: What runs in it, by `python -m`; its main calls `serve`.
        environment: Variables set beside the few that are passed on.
        wrap: Puts the child's command into a sandbox.
        limits: Of each process in it.
    """

    def __init__(
        self,
        module: str,
        *,
        environment: Mapping[str, str] | None = None,
        wrap: Callable[[list[str]], list[str]] | None = None,
        limits: Limits | None = None,
    ) -> None:
        self._module, self._extra = module, dict(environment or {})
        self._wrap, self._limits = wrap or (lambda command: command), limits or Limits()
        self._using = threading.RLock()
        self._process: subprocess.Popen[bytes] | None = None
        self._lifeline: io.FileIO | None = None
        self._jobs = self._results = self._output = -1
        self._buffer, self._seen = bytearray(), 0
        self._log = self._unsent = b""
        self._ready = False

    def start(self) -> None:
        """Begin to start the child, so that its imports overlap with other work."""
        with self._using:
            if self._process is not None:
                if self._process.poll() is None and not self._readable_when_idle():
                    return
                self.close()
            stdin, self._jobs = os.pipe()
            self._results, out = os.pipe()
            self._output, log = os.pipe()
            life, held = os.pipe()
            self._lifeline = io.FileIO(held, "w")
            os.set_blocking(self._jobs, False)
            command = self._wrap([sys.executable, "-P", "-m", self._module, str(out)])
            try:
                self._process = subprocess.Popen(
                    launcher.supervised(command, life, asdict(self._limits)),
                    stdin=stdin, stdout=log, stderr=log, env=scrubbed(self._extra),
                    pass_fds=(out, life), start_new_session=True, cwd="/",
                )  # fmt: skip
            finally:
                for fd in (stdin, out, log, life):
                    os.close(fd)
                if self._process is None:
                    self._forget()

    def call(
        self,
        job: dict[str, Any],
        *,
        timeout_s: float,
        progress: Callable[[dict[str, Any]], None] | None = None,
    ) -> Any:
        """What the child's handler returns for `job`; its imports do not count as time of the job.

        Raises:
            ChildError: no answer, or none that may be believed; the child is gone.
        """
        nonce = secrets.token_hex(_NONCE_BYTES // 2)
        body = json.dumps(job).encode()
        with self._using:
            try:
                self.start()
                if not self._ready:
                    self._expect("", time.monotonic() + START_TIMEOUT_S, "it did not start within")
                    self._ready = True
                self._unsent = _LENGTH.pack(len(body)) + body + nonce.encode()
                deadline = time.monotonic() + timeout_s
                while True:
                    record = self._expect(nonce, deadline, f"no answer within {timeout_s:g} s")
                    if "progress" in record:
                        if progress is not None:
                            progress(record["progress"])
                    elif self._buffer:
                        raise ChildError("malformed", "it answered more than once")
                    else:
                        return record["answer"]
            except BaseException:  # an interrupt too: what it left unread is no later job's answer
                self.close()
                raise

    def close(self) -> None:
        """Kill the child and all it started; returns when all of it is gone. From any thread."""
        process, lifeline = self._process, self._lifeline
        if process is not None and lifeline is not None:
            lifeline.close()
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:  # the launcher itself was stopped: do its work
                launcher.kill_below(process.pid)
                process.kill()
                process.wait()
        with self._using:  # a call in another thread has noticed, and ended
            self._forget()

    def _forget(self) -> None:
        if self._lifeline is not None:
            self._lifeline.close()
        for fd in (self._jobs, self._results, self._output):
            if fd >= 0:
                os.close(fd)
        self._process = self._lifeline = None
        self._jobs = self._results = self._output = -1
        self._buffer, self._seen = bytearray(), 0
        self._log = self._unsent = b""
        self._ready = False

    def _readable_when_idle(self) -> bool:
        """Whether an idle child has said something unasked, or closed its results."""
        return self._ready and bool(select.select([self._results], [], [], 0)[0])

    def _expect(self, nonce: str, deadline: float, late: str) -> dict[str, Any]:
        """The next record, which must carry `nonce`."""
        try:
            record = json.loads(self._line(deadline, late))
        except (ValueError, RecursionError) as error:
            raise ChildError("malformed", "its answer is no JSON") from error
        if not isinstance(record, dict) or record.pop("nonce", None) != nonce:
            raise ChildError("malformed", "its answer does not carry the nonce of the job")
        if list(record) not in (["answer"], ["progress"]):
            raise ChildError("malformed", f"its answer has the fields {sorted(record)[:5]}")
        return record

    def _line(self, deadline: float, late: str) -> bytes:
        """The next line of results. Meanwhile it sends what is to be sent, and keeps the end of
        what the child prints."""
        while (end := self._buffer.find(b"\n", self._seen)) < 0:
            self._seen = len(self._buffer)
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
                if len(self._buffer) > MAX_RECORD_BYTES:
                    raise ChildError("malformed", f"its answer exceeds {MAX_RECORD_BYTES} bytes")
        line = bytes(self._buffer[:end])
        del self._buffer[: end + 1]
        self._seen = 0
        return line

    def _read_log(self) -> None:
        if chunk := os.read(self._output, 1 << 16):
            self._log = (self._log + chunk)[-MAX_LOG_BYTES:]
        else:
            os.close(self._output)
            self._output = -1

    def _death(self) -> str:
        """How the child ended, and the last line it wrote."""
        assert self._process is not None
        try:
            status = self._process.wait(2)
        except subprocess.TimeoutExpired:
            return "it closed its results"
        # Whoever could write there is dead, or about to be where the launcher was killed.
        while self._output >= 0 and select.select([self._output], [], [], 1)[0]:
            self._read_log()
        lines = [line.strip() for line in self._log.decode(errors="replace").split("\n")]
        said = next((line for line in reversed(lines) if line), "")[:300]
        how = f"exit status {status}"
        if status > 128:
            with contextlib.suppress(ValueError):
                how = f"killed by {signal.Signals(status - 128).name}"
        return f"{how}: {said}" if said else how


def scrubbed(extra: Mapping[str, str]) -> dict[str, str]:
    """The environment of a child: the few variables that are passed on, and `extra`."""
    kept = {name: os.environ[name] for name in _PASSED if name in os.environ}
    if path := kept.get("PYTHONPATH"):  # a child starts in /
        kept["PYTHONPATH"] = os.pathsep.join(map(os.path.abspath, path.split(os.pathsep)))
    return {**kept, "PYTHONUNBUFFERED": "1", **extra}


def serve(handler: Callable[[dict[str, Any], Callable[[dict[str, Any]], None]], Any]) -> None:
    """Answer jobs until the parent is gone: the main loop of a child's module.

    `handler(job, tell)` returns the answer as JSON data; `tell` sends a record of progress. What
    it raises ends the child, so a failure that is an answer is returned.
    """
    jobs, results = os.dup(0), int(sys.argv[1])
    os.set_inheritable(results, False)
    null = os.open(os.devnull, os.O_RDONLY)
    os.dup2(null, 0)
    os.close(null)

    def exactly(size: int) -> bytes:
        data = b""
        while len(data) < size:
            if not (chunk := os.read(jobs, size - len(data))):
                raise SystemExit(0)
            data += chunk
        return data

    def send(record: dict[str, Any]) -> None:
        data = json.dumps(record).encode() + b"\n"
        while data:
            data = data[os.write(results, data) :]

    send({"nonce": "", "answer": "ready"})
    while True:
        (size,) = _LENGTH.unpack(exactly(_LENGTH.size))
        nonce = ""

        def say(record: dict[str, Any]) -> None:
            nonlocal nonce
            nonce = nonce or exactly(_NONCE_BYTES).decode()
            send({"nonce": nonce, **record})

        answer = handler(json.loads(exactly(size)), lambda record: say({"progress": record}))
        say({"answer": answer})


def forked(function: Callable[[], Any], address_space_bytes: int) -> Any:
    """`function()`, which returns JSON data, in a process of its own that can do nothing else.

    The process is forked from this one, so nothing is imported again. It starts no process, opens
    nothing for writing, has no descriptor but its answer's, and may use `address_space_bytes` on
    top of what this process has.

    Raises:
        ChildError: it gave no answer.
    """
    launcher.be_subreaper()
    launcher.hide_from_children()
    reader, writer = os.pipe()
    limit = launcher.mapped_bytes() + address_space_bytes
    own, pid = os.getpid(), os.fork()
    if pid == 0:
        try:
            # Where the launcher itself is killed, nobody else ends a function that never returns.
            launcher.die_with(own)
            os.dup2(writer, 3)
            os.closerange(4, os.sysconf("SC_OPEN_MAX"))
            launcher.lock_down(limit)
            data = memoryview(json.dumps(function()).encode())
            while data:
                data = data[os.write(3, data) :]
            os._exit(0)
        finally:
            os._exit(1)
    os.close(writer)
    answer = bytearray()
    with io.FileIO(reader) as pipe:
        while len(answer) <= MAX_RECORD_BYTES and (chunk := pipe.read(1 << 16)):
            answer += chunk
    os.kill(pid, signal.SIGKILL)  # it may have closed the pipe and live on
    with contextlib.suppress(PermissionError):  # tier landlock shows no process, and it starts none
        launcher.kill_below(os.getpid())
    _, status = os.waitpid(pid, 0)
    code = os.waitstatus_to_exitcode(status)
    if code or not answer:
        how = f"killed by {signal.Signals(-code).name}" if code < 0 else f"exit status {code}"
        raise ChildError("died", how)
    if len(answer) > MAX_RECORD_BYTES:
        raise ChildError("malformed", f"its answer exceeds {MAX_RECORD_BYTES} bytes")
    try:
        return json.loads(answer)
    except (ValueError, RecursionError) as error:
        raise ChildError("malformed", "its answer is no JSON") from error
