"""A child with faults, for test_child, test_pool and test_confinement. Each job is one of them."""

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coda_agent.agent.execution.child import Limits, serve

LIMITS = Limits(memory_bytes=2 << 30, file_bytes=8 << 20, niceness=10)


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


def attempt(action: Callable[[], Any]) -> str:
    """`yes` where an action was possible, else the name of the error."""
    try:
        action()
    except OSError as error:
        return type(error).__name__
    return "yes"


def probe(job: dict[str, Any]) -> dict[str, str]:
    """What a child can do."""
    tried: dict[str, Callable[[], Any]] = {
        "write the repository": lambda: Path(job["root"], "probe").touch(),
        "write a folder": lambda: Path(job["folder"], "probe").touch(),
        "write its TMPDIR": lambda: Path(os.environ["TMPDIR"], "probe").touch(),
        "read the repository": lambda: Path(job["root"], "README.md").read_bytes(),
        "see its parent": lambda: os.kill(job["parent"], 0),
        "connect": lambda: socket.create_connection(("127.0.0.1", job["port"]), 2).close(),
        "start a tool": lambda: subprocess.run(["/bin/true"], check=True),
    }
    return {name: attempt(action) for name, action in tried.items()}


def ok(result: Any) -> dict[str, Any]:
    return {"kind": "ok", "result": result}


def handle(job: dict[str, Any], tell: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    match job["kind"]:
        case "killed once":
            if not (mark := Path(job["mark"])).exists():
                if mark.parent.is_dir():
                    mark.touch()
                os.kill(os.getpid(), signal.SIGKILL)
            return ok("done")
        case "progress":
            for i in range(3):
                tell({"done": i})
        case "hang":
            time.sleep(600)
        case "tool and hang":
            with subprocess.Popen(["/bin/sleep", "600"]) as tool:
                tell({"pids": [os.getpid(), tool.pid]})
                time.sleep(600)
        case "allocate":
            return ok(len(bytearray(10 << 30)))
        case "fill":
            return ok(fill(Path(os.environ["TMPDIR"])))
        case "exit":
            os._exit(job["status"])
        case "kill":
            os.kill(os.getpid(), signal.SIGSEGV)
        case "raise":
            raise RuntimeError("what went wrong")
        case "flood":
            for _ in range(64):
                os.write(1, b"x" * (1 << 20))
        case "close":
            os.close(int(sys.argv[1]))
            time.sleep(600)
        case "probe":
            return ok(probe(job))
        case "about":
            nice = os.getpriority(os.PRIO_PROCESS, 0)
            place = {"folder": os.getcwd(), "pid": os.getpid()}
            return ok({"environment": dict(os.environ), "niceness": nice, **place})
    return ok(job.get("value"))


if __name__ == "__main__":
    time.sleep(float(os.environ.get("FAULTY_START_S", "0")))
    LIMITS.take()
    serve(handle)
