"""The child without GPU that compiles programs, which come as data."""

import importlib

from coda_agent.agent.execution.answers import answered
from coda_agent.agent.execution.child import Limits, serve
from coda_agent.agent.judge.job import CompileJob
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.imports import import_quack

# Nice workers: a host late by some microseconds spoils what another process times on a GPU.
LIMITS = Limits(memory_bytes=32 << 30, file_bytes=1 << 30, niceness=10)


def handle(job: JsonObject) -> JsonObject:
    """Do one `CompileJob`."""
    return answered(lambda: CompileJob.model_validate(job).run().model_dump()).model_dump()


def _import_compiler() -> None:
    import_quack()
    importlib.import_module("coda_agent.primitives.stores")


if __name__ == "__main__":
    LIMITS.take()
    serve(lambda job, _: handle(job), first=_import_compiler)
