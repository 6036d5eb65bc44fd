"""Calls of tools in a process that is killed to stop one.

A thread cannot be stopped within a gate. A killed call loses nothing, since the log is on disk
before each step. The process stays warm between calls, and what it started, as compilers and the
GPU's child, ends with it.
"""

import importlib
import os
import threading
from collections.abc import Callable
from dataclasses import asdict
from pathlib import Path

from coda_agent.agent.execution.child import Child, ChildError, serve
from coda_agent.agent.execution.local import here
from coda_agent.agent.execution.pool import CompilePool
from coda_agent.agent.judge import Observer
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.plain import plain
from coda_agent.agent.reply import Reply, answered
from coda_agent.agent.session import Call, perform
from coda_agent.agent.workspace import Workspace
from coda_agent.primitives.errors import CodaError

_LONGEST_S = 86_400.0
"""What a call does has limits of its own."""
_SOON_S = 1.0


class Calls:
    """Does calls in a child, which writes to this process's stderr."""

    def __init__(self) -> None:
        self._child = Child(__name__, environment=dict(os.environ), mute=False)

    def start(self) -> None:
        """Begin to start the child, while an agent reads."""
        self._child.start()

    def perform(self, workspace: Workspace, call: Call, observer: Observer) -> Reply:
        """Do a call as `session.perform`; what it raised is a reply too.

        Raises:
            CodaError: the call was stopped, or its process died.
        """
        job = {"root": str(workspace.root), "top": str(workspace.top), "call": asdict(call)}
        try:
            said = self._child.call(
                job, timeout_s=_LONGEST_S, progress=lambda event: observer(*event)
            )
        except ChildError as error:
            raise CodaError(f"this call did not finish: {error.detail}") from error
        return Reply(**said)

    def stop(self) -> None:
        """End the call that is under way; be ready for the next."""
        self._child.close()
        self._child.start()

    def close(self) -> None:
        """End the call that is under way, and the child."""
        self._child.close()


def _handle(job: JsonObject, tell: Callable[[object], None]) -> JsonObject:
    """Do one call."""
    workspace = Workspace(Path(job["root"]), Path(job["top"]))
    call = Call(**job["call"])
    return vars(answered(lambda: perform(workspace, call, lambda *event: tell(plain(event)))))


def _warm(pool: CompilePool) -> None:
    """Import what gates need, here and in a worker that compiles."""
    pool.start()
    importlib.import_module("torch")


if __name__ == "__main__":
    # After the first call, if that is waited for already: it would take part of its time.
    warming = threading.Timer(_SOON_S, _warm, [here().pool()])
    warming.daemon = True
    serve(_handle, first=warming.start)
