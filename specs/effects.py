"""Refusal of all that a reference does beside computing."""

from __future__ import annotations

import os
import sys
import threading
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from functools import lru_cache

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
    "os.kill": "signals a process",
    "os.killpg": "signals a process",
    "shutil.rmtree": "removes a folder",
    "ctypes.dlopen": "calls native code",
    "ctypes.dlsym": "calls native code",
}
"""Audit events of CPython (PEP 578), and what a function does that raises one."""
_WRITING = os.O_WRONLY | os.O_RDWR | os.O_CREAT | os.O_TRUNC | os.O_APPEND


_computing = 0
"""The thread that computes; 0 outside of `forbidden`."""


@contextmanager
def forbidden() -> Iterator[None]:
    """Let this thread, within, neither start programs nor change files.

    It is no sandbox: it says what a function does beside computing, where one that means no harm
    does it.

    Raises:
        SpecError: out of whatever tries.
    """
    global _computing
    _install()
    before, sys.dont_write_bytecode = sys.dont_write_bytecode, True
    _computing = threading.get_ident()
    try:
        yield
    finally:
        sys.dont_write_bytecode, _computing = before, 0


@contextmanager
def unchanged() -> Iterator[None]:
    """Let nothing within replace a function or a setting of torch."""
    before = _shared()
    yield
    after = _shared()
    if changed := [name for name, value in before.items() if after.get(name) != value]:
        raise SpecError(f"the function changes {changed[0]}", hint="a reference only computes")


def _shared() -> Mapping[str, object]:
    """List functions and settings that all code shares, by name."""
    import builtins
    import math

    import torch

    places = (torch, torch.Tensor, torch.nn.functional, torch.linalg, torch.special, math, builtins)
    found = {
        f"{place.__name__}.{name}": getattr(place, name)
        for place in places
        for name in dir(place)
        if name[0] != "_" or name[:2] == "__"
    }
    return {name: value for name, value in found.items() if callable(value)} | {
        "torch's random numbers": torch.get_rng_state().tolist(),
        "torch's default type": torch.get_default_dtype(),
        "whether torch records gradients": torch.is_grad_enabled(),
    }


@lru_cache(maxsize=1)
def _install() -> None:
    """Add the audit hook, which nothing takes away again."""
    sys.addaudithook(_refuse)


def _refuse(event: str, args: tuple[object, ...]) -> None:
    if threading.get_ident() != _computing:
        return
    if event == "open" and args[0] != os.devnull and isinstance(args[2], int):
        did = "opens a file for writing" if args[2] & _WRITING else ""
    else:
        did = _EVENTS.get(event, "")
    if did:
        raise SpecError(f"the function {did}", hint="a reference only computes")
