"""A child with faults, for test_pool, test_sandbox and test_faults. Each job is one fault or probe."""

from __future__ import annotations

import json
import os
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import coda_agent.agent

# The judge's package without its __init__, which imports pydantic: most of the time to start.
_judge = ModuleType("coda_agent.agent.judge")
_judge.__path__ = [f"{coda_agent.agent.__path__[0]}/judge"]
sys.modules.setdefault(_judge.__name__, _judge)

from coda_agent.agent.execution.child import serve  # noqa: E402

RESULTS = int(sys.argv[1]) if len(sys.argv) > 1 else -1


def daemon() -> None:
    """A grandchild in a session of its own, of a parent that is gone."""
    if os.fork() == 0:
        os.setsid()
        if os.fork() == 0:
            signal.signal(signal.SIGTERM, signal.SIG_IGN)
            time.sleep(600)
        os._exit(0)
    os.wait()


def bomb(depth: int) -> None:
    """Twice as many processes at each level, each in its own session: 2 ** depth in all."""
    for level in range(depth):
        for _ in range(2):
            if os.fork() == 0:
                os.setsid()
                break
        else:
            time.sleep(600)
        del level
    time.sleep(600)


def fill(folder: Path) -> str:
    """Write until something says no."""
    path = folder / "big"
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        with path.open("wb") as file:
            for _ in range(1 << 14):
                file.write(bytes(1 << 20))
    except OSError as error:
        return type(error).__name__ + f" {path.stat().st_size}"
    return "no limit"


def forge(*records: Any) -> None:
    """Records that were never asked for."""
    for record in records:
        os.write(RESULTS, json.dumps(record).encode() + b"\n")


def write_all(fd: int, size: int) -> None:
    for _ in range(size >> 20):
        os.write(fd, b"x" * (1 << 20))


def attempt(action: Callable[[], Any]) -> str:
    """`yes` where an action was possible, else the name of the error."""
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "yes"


def probe(job: dict[str, Any]) -> dict[str, str]:
    """What a sandboxed child can do."""
    tried: dict[str, Callable[[], Any]] = {
        "write the repository": lambda: Path(job["root"], f"probe-{os.getpid()}").touch(),
        "write .git": lambda: Path(job["root"], ".git", f"probe-{os.getpid()}").touch(),
        "write the home": lambda: Path(job["home"], f"probe-{os.getpid()}").touch(),
        "read a file in /tmp": lambda: Path(job["secret"]).read_text(),
        "read .git": lambda: Path(job["root"], ".git", "HEAD").read_bytes(),
        "read its parent": lambda: Path(f"/proc/{job['judge']}/environ").read_bytes(),
        "read its parent's command": lambda: Path(f"/proc/{job['judge']}/cmdline").read_bytes(),
        "list its parent": lambda: os.listdir(f"/proc/{job['judge']}"),
        "list its parent's files": lambda: os.listdir(f"/proc/{job['judge']}/fd"),
        "list processes": lambda: os.listdir("/proc"),
        "list its launcher's files": lambda: os.listdir(f"/proc/{os.getppid()}/fd"),
        "signal its parent": lambda: os.kill(job["judge"], 0),
        "read a disk": lambda: Path(job["disk"]).open("rb").close(),
        "open a socket": lambda: socket.socket(socket.AF_INET).close(),
        "write the cache": lambda: Path(os.environ["QUACK_CACHE_DIR"], "probe").touch(),
        "write its TMPDIR": lambda: Path(os.environ["TMPDIR"], "probe").touch(),
        "start a tool": lambda: os.waitpid(os.posix_spawn("/bin/true", ["true"], {}), 0),
    }
    return {name: attempt(action) for name, action in tried.items()}


def ok(result: Any) -> dict[str, Any]:
    return {"kind": "ok", "result": result}


def handle(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> Any:
    fault = job["kind"]
    if fault == "progress":
        for i in range(3):
            tell({"done": i})
    elif fault == "hang":
        time.sleep(600)
    elif fault == "daemon and hang":
        daemon()
        tell({})
        time.sleep(600)
    elif fault == "bomb":
        bomb(job["depth"])
    elif fault == "allocate":
        return ok(len(bytearray(10 << 30)))
    elif fault == "fill":
        return ok(fill(Path(os.environ["TMPDIR"])))
    elif fault == "exit":
        os._exit(job["status"])
    elif fault == "raise":
        raise RuntimeError("what went wrong")
    elif fault == "close":
        os.close(RESULTS)
        time.sleep(600)
    elif fault == "flood":
        write_all(1, 64 << 20)
    elif fault == "flood results":
        write_all(RESULTS, 64 << 20)
    elif fault == "forge":
        forge({"nonce": "0" * 32, "answer": ok("forged")})
    elif fault == "late record":
        threading.Timer(0.1, forge, [{"nonce": "0" * 32, "answer": ok("late")}]).start()
    elif fault == "forge no record":
        forge(["answer"])
    elif fault == "nest":
        os.write(RESULTS, b"[" * 200_000 + b"\n")
    elif fault == "probe":
        return ok(probe(job))
    elif fault == "environment":
        return ok(dict(os.environ))
    return ok(job.get("value"))


def twice(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> Any:
    """As `handle`; but a job "twice" has its answer sent a second time, nonce and all."""
    if job["kind"] != "twice":
        return handle(job, tell)
    write = os.write

    def doubled(fd: int, data: bytes) -> int:
        return write(fd, bytes(data) * 2) // 2 if fd == RESULTS else write(fd, data)

    os.write = doubled
    return ok(1)


if __name__ == "__main__":
    serve(twice)
