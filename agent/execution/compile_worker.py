"""The compile worker: a child without GPU that runs the compiler, candidates' Python and users'
functions, so that the command that was started never does.

It is served by `child.serve` inside the sandbox that `pool.CompilePool` chose. Python that is not
ours runs in a process of its own, forked for that job (`child.forked`): it cannot touch the
compiler or the object cache, and what it leaves behind is data.
"""

import builtins
import importlib
import sys
import traceback
import warnings
from collections.abc import Callable
from contextlib import redirect_stdout
from functools import lru_cache
from io import StringIO
from typing import Any

from pydantic import TypeAdapter

from coda_agent.agent.execution.answers import Answer, Ok, Refused, read_answer
from coda_agent.agent.execution.child import ChildError, forked, serve
from coda_agent.agent.judge.job import CompileJob
from coda_agent.primitives.errors import CodaError, ProgramError, SpecError
from coda_agent.primitives.program import Program
from coda_agent.specs.admission import admit
from coda_agent.specs.effects import forbid_effects
from coda_agent.specs.load import load_spec
from coda_agent.specs.source import Example, Source, extracted

_CANDIDATE = "<candidate>"
_SOURCE, _EXAMPLES = TypeAdapter(Source), TypeAdapter(dict[str, Example])


def load_programs(text: str) -> dict[str, Any]:
    """Run a statically admitted candidate and return its programs, serialised, by name."""

    def restricted(name: str, *args: Any, **kwargs: Any) -> Any:
        if name != "coda_agent.primitives":
            raise ImportError(f"import of {name!r} is not allowed")
        return builtins.__import__(name, *args, **kwargs)

    namespace: dict[str, Any] = {
        "__builtins__": {"__import__": restricted},
        "__name__": "candidate",
    }
    code = compile(text, _CANDIDATE, "exec", dont_inherit=True)  # admitted by the static gate
    try:
        exec(code, namespace)
    except ProgramError as error:
        steps = traceback.walk_tb(error.__traceback__)
        *_, line = (n for frame, n in steps if frame.f_code.co_filename == _CANDIDATE)
        raise ProgramError(f"line {line}: {error.message}", hint=error.hint) from error
    return {k: v.to_dict() for k, v in namespace.items() if isinstance(v, Program)}


def _draft(job: dict[str, Any]) -> str:
    from coda_agent.specs.draft import draft  # it imports torch

    class Mute(StringIO):
        def write(self, text: str, /) -> int:
            raise SpecError("the function prints; a reference only computes: leave the output out")

    forbid_effects()
    source = _SOURCE.validate_python(job["source"])
    with redirect_stdout(Mute()), warnings.catch_warnings(action="ignore"):
        return draft(source, _EXAMPLES.validate_python(job["examples"]), job["name"])


def _admit(job: dict[str, Any]) -> str:
    forbid_effects()
    admit(load_spec(job["where"], text=job["text"]))
    return ""


@lru_cache
def _import(module: str) -> None:
    """Import what a user's function needs, once and not in every fork: that takes 2 s, and a fork
    could open nothing for writing."""
    imported = importlib.import_module(module)
    # At its first cast to float16 torch reads what the processor is, which a fork may not open.
    sys.modules["torch"].zeros(1).half()
    if module == "coda_agent.specs.draft":
        source = extracted("def relu(x, w):\n    return (x @ w.T).relu()", "here")
        imported.draft(source, {"x": Example((64, 8)), "w": Example((32, 8))}, "relu")


_FORKED: dict[str, tuple[Callable[[dict[str, Any]], Any], type, int]] = {
    "load": (lambda job: load_programs(job["text"]), dict, 2 << 30),
    "draft": (_draft, str, 4 << 30),
    "admit": (_admit, str, 4 << 30),
}
"""By kind of a job with Python that is not ours: what runs it, what that returns, and the bytes
that it may use."""


def answered(function: Callable[[], Any]) -> Answer:
    """What `function` returns, JSON data, or what a candidate or a compiler raised."""
    try:
        return Ok(result=function())
    except CodaError as error:
        return Refused.of(error)
    except Exception as error:
        first = next((s for s in str(error).splitlines() if s.strip()), "")
        return Refused(error="CompileError", message=f"{type(error).__name__}: {first}")


def handle(job: dict[str, Any]) -> dict[str, Any]:
    """One job of the pool: a `CompileJob`, a module to import, a candidate's text to trace, a
    function to draft a spec from, or a spec to admit."""
    kind = job["kind"]
    if kind == "compile":
        return answered(lambda: CompileJob.model_validate(job).run().model_dump()).model_dump()
    if kind == "import":
        return answered(lambda: _import(job["module"])).model_dump()
    run, result, size = _FORKED[kind]
    what = f"{job['where']}: the function" if "where" in job else "tracing the program"
    said = "gave a malformed answer"  # whoever took over the fork writes what he likes
    try:
        found = read_answer(forked(lambda: answered(lambda: run(job)).model_dump(), size))
        if isinstance(found, Refused) or isinstance(getattr(found, "result", None), result):
            return found.model_dump()
    except ChildError as error:
        said = f"ended without a result: {error.detail}"
    except ValueError:
        pass
    return Refused(error="CompileError", message=f"{what} {said}").model_dump()


if __name__ == "__main__":
    serve(lambda job, _: handle(job))
