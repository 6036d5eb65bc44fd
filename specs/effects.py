"""A reference only computes: a process that runs one refuses what else it tries to do."""

from __future__ import annotations

import os
import sys
from typing import Any

from coda_agent.primitives.errors import SpecError

_EVENTS = {
    "os.system": "starts a program",
    "os.exec": "starts a program",
    "os.posix_spawn": "starts a program",
    "os.fork": "starts a process",
    "os.forkpty": "starts a process",
    "subprocess.Popen": "starts a program",
    "socket.connect": "opens a connection",
    "os.remove": "removes a file",
    "os.rmdir": "removes a folder",
    "os.rename": "renames a file",
    "shutil.rmtree": "removes a folder",
}
"""Audit events of CPython (PEP 578), and what a function does that raises one."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


def forbid_effects() -> None:
    """From here on this process neither starts programs nor changes files from Python.

    No hook can be taken away again, so this is for a forked process. It is no sandbox: it says what
    a function does beside computing, where one that means no harm does it.

    Raises:
        SpecError: later, out of whatever tries.
    """

    def refuse(event: str, args: tuple[Any, ...]) -> None:
        if event == "open" and args[0] != os.devnull and isinstance(args[2], int):
            did = "opens a file for writing" if args[2] & _WRITING else ""
        else:
            did = _EVENTS.get(event, "")
        if did:
            raise SpecError(f"the function {did}", hint="a reference only computes")

    sys.dont_write_bytecode = True
    sys.addaudithook(refuse)
