"""The side of the bench that a command imports: it finds the workspace's bench, starts one where
there is none, and has it carry out one call.

- It is thin, since it is what every call of a shell waits for: no pydantic, no torch, no judge.
- A bench answers on a Unix socket in a folder that is its user's alone. The socket's name is a
  digest of the workspace, the interpreter and the settings in the environment, so that each
  setting has a bench of its own.
- A message is a line of JSON. The request is answered by `begun`, by `event`s that were asked for,
  and by `reply`. A bench that ends before `begun` has not done the call, so another one gets it.
  One that ends later has, in part: the call is not repeated, and its run is ended.
"""

import contextlib
import hashlib
import json
import os
import select
import signal
import socket
import stat
import struct
import sys
import time
from collections.abc import Callable, Iterator
from io import BufferedRWPair
from pathlib import Path
from typing import Any

from coda_agent.primitives.errors import CodaError, MachineError
from coda_agent.primitives.objects import fingerprint

VARIABLE = "CODA_AGENT_BENCH"
"""Environment variable: "off" has each command do its calls itself. Any other value is a name:
calls under one name wait for each other, and those of another name have a bench of their own."""
IDLE_S = 600.0
_SETTINGS = ("CODA_AGENT_", "CUDA_", "QUACK_", "GIT_", "XDG_CACHE_")
ROOMS = ("agent", "primitives", "specs", "runtime", "generated", "demos", "evals")
_START_S, _BUSY_S = 60.0, 2.0
_KILLED = "the bench was killed: another one takes its place"
_OTHER_CODE = "the bench has other code than this command: another one takes its place"

Notice = Callable[[str], None]
Stream = BufferedRWPair


class Lost(MachineError):
    """The bench ended in the middle of a call."""


def send(file: Stream, message: dict[str, Any]) -> None:
    """Writes one message."""
    file.write(json.dumps(message).encode() + b"\n")
    file.flush()


def received(file: Stream) -> Iterator[dict[str, Any]]:
    """The messages that come, until the other side ends; a torn one is none."""
    with contextlib.suppress(ConnectionError):
        for line in file:
            if line.endswith(b"\n"):
                yield json.loads(line)


class Bench:
    """The bench of a workspace, as its clients see it.

    Args:
        root: The workspace's folder.
        notice: Told, in a line, of what goes on beside the call.

    Raises:
        MachineError: there is no folder for its socket that is this user's alone.
    """

    def __init__(self, root: Path, notice: Notice) -> None:
        settings = {k: v for k, v in sorted(os.environ.items()) if k.startswith(_SETTINGS)}
        about = repr((str(root), sys.executable, __file__, settings)).encode()
        name = hashlib.sha256(about).hexdigest()[:16]
        self.root, self.notice = root, notice
        self.socket = _folder() / f"{name}.sock"

    def call(
        self, asked: dict[str, Any], observer: Callable[[str, Any], None] = lambda *_: None
    ) -> dict[str, Any]:
        """Has one call done; its reply.

        Raises:
            Lost: the bench ended in the middle of it.
            MachineError: no bench starts.
        """
        since = time.time()
        for _ in range(3):
            (connection, fresh), begun = self._connected(), False
            # What could not be sent is tried again when `file` closes.
            gone = contextlib.suppress(ConnectionError)
            with connection, gone, connection.makefile("rwb") as file:
                with contextlib.suppress(ConnectionError):
                    send(file, {"sources": fingerprint(*ROOMS), **asked})
                if not fresh and not select.select([connection], [], [], _BUSY_S)[0]:
                    self.notice("the bench is at another call; this one waits")
                for message in received(file):
                    match message:
                        case {"reply": reply}:
                            return reply
                        case {"event": [kind, data]}:
                            observer(kind, data)
                        case {"begun": _}:
                            begun = True
                        case _:
                            self.notice(_OTHER_CODE)
            if begun:
                raise self._lost(str(asked.get("tool")), since)
        raise MachineError("the bench ends before it does a call", hint=f"see {self._log}")

    def stop(self) -> bool:
        """Ends it, and what it is at; whether there was one."""
        try:
            with self._connection() as connection:
                format = "3i"
                about = connection.getsockopt(
                    socket.SOL_SOCKET, socket.SO_PEERCRED, struct.calcsize(format)
                )
        except (FileNotFoundError, ConnectionRefusedError):
            return False
        os.kill(struct.unpack(format, about)[0], signal.SIGTERM)
        for _ in range(200):
            if not self.socket.exists():
                return True
            time.sleep(0.05)
        raise MachineError("the bench does not end", hint=f"see {self._log}")

    @property
    def _log(self) -> Path:
        return self.socket.with_suffix(".log")

    def _connection(self) -> socket.socket:
        connection = socket.socket(socket.AF_UNIX)
        try:
            connection.connect(str(self.socket))
        except BaseException:
            connection.close()
            raise
        return connection

    def _connected(self) -> tuple[socket.socket, bool]:
        """A connection to the bench, which is started where there is none, and whether it was."""
        until = time.monotonic() + _START_S
        started = None
        while time.monotonic() < until:
            try:
                return self._connection(), started is not None
            except FileNotFoundError:
                pass
            except ConnectionRefusedError:
                if started is None:
                    self.notice(_KILLED)
            if started is None or started.poll() is not None:
                started = self._start()
            time.sleep(0.02)
        raise MachineError("the bench does not start", hint=f"see {self._log}")

    def _start(self) -> Any:
        """A new bench, which ends at once where another one was faster."""
        import subprocess

        from coda_agent.agent.keys import KEYS

        with self._log.open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-P", "-m", "coda_agent.agent.bench.server", str(self.socket)],
                stdin=subprocess.DEVNULL, stdout=log, stderr=log, cwd=self.root,
                env=os.environ | KEYS.take(), start_new_session=True,
            )  # fmt: skip

    def _lost(self, tool: str, since: float) -> Lost:
        from coda_agent.agent.bench.desk import end_lost

        ended = end_lost(self.root, since)
        what = f"the bench was killed in the middle of {tool}; what it had done is kept"
        return Lost(what, hint=f"go on with --run {ended[0]}" if ended else "call it again")


def _folder() -> Path:
    """The folder of this user's sockets.

    Raises:
        MachineError: it is not this user's alone.
    """
    user = os.geteuid()
    runtime = os.environ.get("XDG_RUNTIME_DIR") or f"{os.environ.get('TMPDIR') or '/tmp'}"
    folder = Path(runtime) / f"coda-agent-{user}"
    try:
        folder.mkdir(mode=0o700, exist_ok=True)
        found = folder.lstat()
    except OSError as error:
        raise _unusable(f"{folder} cannot be used: {error.strerror}") from error
    if not stat.S_ISDIR(found.st_mode) or found.st_uid != user or found.st_mode & 0o077:
        raise _unusable(f"{folder} is not this user's alone")
    if len(str(folder)) > 80:  # of 107 that the address of a socket may have
        raise _unusable(f"{folder} is too long for the address of a socket")
    return folder


def _unusable(what: str) -> CodaError:
    hint = f"set XDG_RUNTIME_DIR to a folder of yours; {VARIABLE}=off does without a bench"
    return MachineError(what, hint=hint)
