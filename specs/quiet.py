"""Errors that are caught, without the tracebacks that torch logs of them."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar

_LOGGERS = (
    "torch._subclasses.fake_tensor",
    "torch.fx.experimental.symbolic_shapes",
    "torch._dynamo.convert_frame",
)
_QUIET = ContextVar("_QUIET", default=False)


def _heard(_: logging.LogRecord) -> bool:
    return not _QUIET.get()


for _name in _LOGGERS:
    logging.getLogger(_name).addFilter(_heard)


@contextmanager
def quiet() -> Iterator[None]:
    """Drop what this thread logs of errors met while recording; others log as before."""
    token = _QUIET.set(True)
    try:
        yield
    finally:
        _QUIET.reset(token)
