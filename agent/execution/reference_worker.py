"""The child that runs a user's function: to draft a spec of it, or to admit one with it."""

import importlib
import sys
import warnings
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from typing import Any

from pydantic import TypeAdapter

from coda_agent.agent.execution.answers import answered
from coda_agent.agent.execution.child import Limits, serve
from coda_agent.primitives.errors import SpecError
from coda_agent.specs.admission import admit
from coda_agent.specs.effects import forbidden
from coda_agent.specs.load import load_spec
from coda_agent.specs.source import Example, Source, extracted

LIMITS = Limits(memory_bytes=16 << 30)
_SOURCE, _EXAMPLES = TypeAdapter(Source), TypeAdapter(dict[str, Example])


class _Mute(StringIO):
    """Refuse what a function prints. The child's own, since it holds for a whole process."""

    def write(self, text: str, /) -> int:
        raise SpecError("the function prints; a reference only computes: leave the output out")


def _draft(job: dict[str, Any]) -> str:
    from coda_agent.specs.draft import draft  # it imports torch

    source = _SOURCE.validate_python(job["source"])
    with forbidden(), redirect_stdout(_Mute()), warnings.catch_warnings(action="ignore"):
        return draft(source, _EXAMPLES.validate_python(job["examples"]), job["name"])


def _admit(job: dict[str, Any]) -> str:
    with forbidden():
        admit(load_spec(job["where"], text=job["text"]))
    return ""


@lru_cache
def _import(module: str) -> str:
    """Import what a user's function needs, and what that imports at its first run."""
    imported = importlib.import_module(module)
    # At its first cast to float16 torch reads what the processor is.
    sys.modules["torch"].zeros(1).half()
    if module == "coda_agent.specs.draft":
        source = extracted("def relu(x, w):\n    return (x @ w.T).relu()", "here")
        imported.draft(source, {"x": Example((64, 8)), "w": Example((32, 8))}, "relu")
    return ""


def handle(job: dict[str, Any]) -> dict[str, Any]:
    """One job: a module to import, a function to draft a spec from, or a spec to admit."""
    match job["kind"]:
        case "import":
            return answered(lambda: _import(job["module"])).model_dump()
        case "draft":
            return answered(lambda: _draft(job)).model_dump()
    return answered(lambda: _admit(job)).model_dump()


if __name__ == "__main__":
    LIMITS.take()
    serve(lambda job, _: handle(job))
