"""The child that runs a user's function, to draft or admit specs."""

import importlib
import json
import os
import sys
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO

from pydantic import TypeAdapter

from coda_agent.agent.execution.answers import Answer, Ok, Refused, answered, read_answer
from coda_agent.agent.execution.child import Limits, serve
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import SpecError
from coda_agent.specs.admission import admit, answers
from coda_agent.specs.effects import forbidden, unchanged
from coda_agent.specs.load import load_spec
from coda_agent.specs.source import Example, Source, extracted

LIMITS = Limits(memory_bytes=16 << 30)
_SOURCE, _EXAMPLES = TypeAdapter(Source), TypeAdapter(dict[str, Example])


class _Mute(StringIO):
    """Refuses what a function prints, for the child's whole process."""

    def write(self, text: str, /) -> int:
        raise SpecError("the function prints; a reference only computes: leave the output out")


def _draft(job: JsonObject) -> str:
    from coda_agent.specs.draft import draft  # it imports torch

    source = _SOURCE.validate_python(job["source"])
    with forbidden(), redirect_stdout(_Mute()), warnings.catch_warnings(action="ignore"):
        return draft(source, _EXAMPLES.validate_python(job["examples"]), job["name"])


def _admit(job: JsonObject) -> dict[str, str]:
    spec = load_spec(job["where"], text=job["text"])
    with unchanged(), forbidden():
        if not job["backwards"]:
            admit(spec)
        return answers(spec, backwards=job["backwards"])


def _admit_twice(job: JsonObject) -> Answer:
    """Admit a spec; run its reference again elsewhere in the other order."""
    one, other = (_apart(lambda b=b: _admit({**job, "backwards": b})) for b in (False, True))
    if not isinstance(one, Ok) or not isinstance(other, Ok):
        return other if isinstance(one, Ok) else one
    if differs := [name for name, digest in one.result.items() if other.result[name] != digest]:
        message = (
            f"{job['where']}: the reference gives another {differs[0]} in another order of calls"
        )
        hint = "a reference computes with its arguments alone"
        return Refused(error="SpecError", message=message, hint=hint)
    return Ok(result="")


def _apart(function: Callable[[], object]) -> Answer:
    """Call `function` in a process of its own, with which changes end."""
    out, into = os.pipe()
    if not (child := os.fork()):
        with open(into, "w") as pipe:
            pipe.write(answered(function).model_dump_json())
        os._exit(0)
    os.close(into)
    with open(out) as pipe:
        said = pipe.read()
    status = os.waitpid(child, 0)[1]
    if os.WIFSIGNALED(status):  # as it ended, so does this one, and its parent says how
        os.kill(os.getpid(), os.WTERMSIG(status))
    if not said:
        os._exit(os.WEXITSTATUS(status))
    return read_answer(json.loads(said))


@lru_cache
def _import(module: str) -> str:
    """Import what a function needs, and what its first run imports."""
    imported = importlib.import_module(module)
    # At its first cast to float16 torch reads what the processor is.
    sys.modules["torch"].zeros(1).half()
    if module == "coda_agent.specs.draft":
        source = extracted("def relu(x, w):\n    return (x @ w.T).relu()", "here")
        imported.draft(source, {"x": Example((64, 8)), "w": Example((32, 8))}, "relu")
    return ""


def handle(job: JsonObject) -> JsonObject:
    """Do one job: import a module, draft a spec, or admit one."""
    match job["kind"]:
        case "import":
            return answered(lambda: _import(job["module"])).model_dump()
        case "draft":
            return answered(lambda: _draft(job)).model_dump()
    return _admit_twice(job).model_dump()


if __name__ == "__main__":
    LIMITS.take()
    serve(lambda job, _: handle(job))
