"""Recordings of a function that no other thread sees."""

from __future__ import annotations

import logging
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

from coda_agent.primitives.deferred import torch

_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo.convert_frame",
)
_QUIET = ContextVar("_QUIET", default=False)
_LOCK = threading.RLock()


def _heard(_: logging.LogRecord) -> bool:
    return not _QUIET.get()


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_heard)


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what this thread logs of errors met while recording."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)


@contextmanager
def alone() -> Iterator[None]:
    """Let make_fx run as it does while Dynamo compiles.

    It tells the whole process that Python is traced into symbols, and what torch.compile made
    raises then, in other threads too, unless something is being compiled. It also patches calls of
    modules, and two runs at once would each put back what the other one did.
    """
    dynamo = sys.modules.get("torch._dynamo.convert_frame")
    with dynamo.compile_lock if dynamo else _LOCK:
        before, torch.compiler._is_compiling_flag = torch.compiler._is_compiling_flag, True
        try:
            yield
        finally:
            torch.compiler._is_compiling_flag = before
