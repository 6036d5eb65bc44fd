"""The compile worker: a child without GPU that runs candidates' Python and the compiler, so that
the judging process never does.

It is served by `child.serve` inside the sandbox that `pool.CompilePool` chose. A candidate's Python
runs in a process of its own, forked for that job (`child.forked`): it cannot touch the compiler or
the object cache, and what it leaves behind is its programs as data.
"""

import builtins
from collections.abc import Callable
from typing import Any

from coda_agent.agent.execution.answers import Answer, Ok, Refused, read_answer
from coda_agent.agent.execution.child import ChildError, forked, serve
from coda_agent.agent.judge.job import CompileJob
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.program import Program

TRACE_BYTES = 2 << 30


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
    code = compile(text, "<candidate>", "exec", dont_inherit=True)  # admitted by the static gate
    exec(code, namespace)
    return {k: v.to_dict() for k, v in namespace.items() if isinstance(v, Program)}


def answered(function: Callable[[], Any]) -> Answer:
    """What `function` returns, JSON data, or what a candidate or a compiler raised."""
    try:
        return Ok(result=function())
    except CodaError as error:
        return Refused.of(error)
    except ChildError as error:
        said = f"tracing the program ended without a result: {error.detail}"
    except Exception as error:
        first = next((s for s in str(error).splitlines() if s.strip()), "")
        said = f"{type(error).__name__}: {first}"
    return Refused(error="CompileError", message=said)


def handle(job: dict[str, Any]) -> dict[str, Any]:
    """One job of the pool: a `CompileJob`, or a candidate's text to trace."""
    if job["kind"] == "compile":
        return answered(lambda: CompileJob.model_validate(job).run().model_dump()).model_dump()

    def traced() -> dict[str, Any]:
        return answered(lambda: load_programs(job["text"])).model_dump()

    found = answered(lambda: forked(traced, TRACE_BYTES))
    if isinstance(found, Ok):
        # Whoever took over the fork writes what he likes.
        try:
            found = read_answer(found.result)
        except ValueError:
            found = None
    match found:
        case Ok(result=dict()) | Refused():
            return found.model_dump()
    said = "tracing the program gave a malformed answer"
    return Refused(error="CompileError", message=said).model_dump()


if __name__ == "__main__":
    serve(lambda job, _: handle(job))
