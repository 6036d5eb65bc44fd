"""The process of a bench: `python -m coda_agent.agent.bench.server SOCKET`, started by a client.

- Calls run one after the other in the main thread: the judge, torch and signals all expect that.
- It ends when it is idle for long, when its code is not the client's, at SIGTERM, and when a client
  leaves in the middle of a call, which is what Ctrl-C does there.
- Its children (compile workers, the GPU's) end with it, however it ends.
"""

import contextlib
import fcntl
import io
import os
import select
import signal
import socket
import sys
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from coda_agent.agent.bench.client import IDLE_S, ROOMS, received, send
from coda_agent.agent.keys import KEYS
from coda_agent.agent.reply import INTERRUPTED, answered
from coda_agent.primitives.objects import fingerprint


def main() -> None:
    KEYS.take()
    path, mine = Path(sys.argv[1]), fingerprint(*ROOMS)
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(0))
    with path.with_suffix(".lock").open("ab") as lock, socket.socket(socket.AF_UNIX) as listener:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return  # another one is there
        path.unlink(missing_ok=True)
        listener.bind(str(path))
        listener.listen(64)
        # An exception of a handler may be lost, and a signal that comes just before a wait does not
        # end it: of 38 SIGTERMs right after a call 12 ended nothing.
        signalled, wake = socket.socketpair()
        wake.setblocking(False)
        signal.set_wakeup_fd(wake.fileno())
        try:
            _warm()
            on = _served(listener, signalled, mine)
            _aside(_compile_something)
            while on:
                on = _served(listener, signalled, mine)
        finally:
            path.unlink(missing_ok=True)


def _warm() -> None:
    """What the first call would wait for."""
    import torch  # noqa: F401


def _compile_something() -> None:
    """What the first check would wait for: a worker that has imported the compiler."""
    from coda_agent.agent import execution
    from coda_agent.agent.judge.job import CompileJob
    from coda_agent.demos import demos
    from coda_agent.primitives.tiles import DEFAULT_CONFIGS

    program, *_ = demos()[0].programs
    job = CompileJob.of(program, DEFAULT_CONFIGS["sm_90a"], "sm_90a", None, "bfloat16")
    execution.executor().map([job], lambda *_: None)


def _aside(work: Callable[[], Any]) -> None:
    def run() -> None:
        with contextlib.suppress(Exception):  # a call that needs it will say what is wrong
            work()

    threading.Thread(target=run, daemon=True).start()


def _served(listener: socket.socket, signalled: socket.socket, mine: str) -> bool:
    """Serves the next client; whether to serve another one."""
    ready, _, _ = select.select([listener, signalled], [], [], IDLE_S)
    if listener not in ready or signalled in ready:
        return False
    connection, _ = listener.accept()
    try:
        with connection, connection.makefile("rwb") as file:
            connection.settimeout(IDLE_S)
            if (asked := next(received(file), None)) is None:
                return True
            if asked.pop("sources", None) != mine:
                send(file, {"stale": mine})
                return False
            send(file, {"begun": os.getpid()})
            with _ended_by_leaving(connection):
                reply = _replied(file, asked)
            if reply["code"] == INTERRUPTED:
                return False
            send(file, {"reply": reply})
    except KeyboardInterrupt:
        return False
    except OSError:  # he is gone, after his call was done or before it began
        pass
    return True


def _replied(file: Any, asked: dict[str, Any]) -> dict[str, Any]:
    """The reply to a call, with what it printed."""
    from coda_agent.agent.bench.desk import Call, replied

    def tell(type: str, data: Any) -> None:
        send(file, {"event": [type, data]})

    printed = io.StringIO()
    with contextlib.redirect_stderr(printed), contextlib.redirect_stdout(printed):
        call = Call.model_validate(asked)
        os.chdir(call.folder)
        try:
            reply = answered(lambda: replied(call, tell if call.watched else lambda *_: None))
        finally:
            os.chdir("/")
    return {**vars(reply), "printed": printed.getvalue()}


@contextlib.contextmanager
def _ended_by_leaving(connection: socket.socket) -> Iterator[None]:
    """Interrupts the main thread where the client closes its end meanwhile."""
    done, finished = os.pipe()

    def watch() -> None:
        readable, _, _ = select.select([connection, done], [], [])
        if done not in readable:
            signal.pthread_kill(threading.main_thread().ident or 0, signal.SIGINT)

    watching = threading.Thread(target=watch, daemon=True)
    watching.start()
    try:
        yield
    finally:
        os.close(finished)
        watching.join()
        os.close(done)


if __name__ == "__main__":
    main()
