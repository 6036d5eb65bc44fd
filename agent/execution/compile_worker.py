"""The compile worker: a child without GPU that runs candidates' Python and the compiler, so that
the judging process never does.

It is served by `child.serve` inside the sandbox that `pool.CompilePool` chose. A candidate's Python
runs in a process of its own, forked for that job (`child.forked`): it cannot touch the compiler or
the object cache, and what it leaves behind is its programs as data.
"""

from __future__ import annotations

import builtins
from collections.abc import Callable
from typing import Any

from coda_agent.agent.execution.child import ChildError, forked, serve
from coda_agent.primitives.errors import CodaError

TRACE_BYTES = 2 << 30


def load_programs(text: str) -> dict[str, Any]:
    """Run a statically admitted candidate and return its programs, serialised, by name."""
    from coda_agent.primitives.program import Program

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


def compile_program(job: dict[str, Any]) -> dict[str, Any]:
    """One compile job to its report."""
    from coda_agent.primitives.program import Program
    from coda_agent.primitives.target import compile_blind, use_cache
    from coda_agent.primitives.tiles import TileConfig

    use_cache()
    return compile_blind(
        Program.from_dict(job["program"]),
        TileConfig(**job["config"]),
        job["arch"],
        job["dtype"],
        job["operand_dtypes"],
        job["output_dtypes"],
    )


def outcome(function: Callable[[], Any]) -> dict[str, Any]:
    """`{"ok": result}`, or `{"error", "hint"}` of whatever a candidate or a compiler raised."""
    try:
        return {"ok": function()}
    except CodaError as error:
        return {"error": error.message, "hint": error.hint}
    except ChildError as error:
        return {"error": f"tracing the program ended without a result: {error.detail}", "hint": ""}
    except Exception as error:
        first = next((s for s in str(error).splitlines() if s.strip()), "")
        return {"error": f"{type(error).__name__}: {first}", "hint": ""}


def handle(job: dict[str, Any]) -> dict[str, Any]:
    """One job of the pool."""
    if job["kind"] == "compile":
        return outcome(lambda: compile_program(job))

    def traced() -> dict[str, Any]:
        return outcome(lambda: load_programs(job["text"]))

    found = outcome(lambda: forked(traced, TRACE_BYTES))
    answer = found.get("ok", found)
    # Whoever took over the fork writes what he likes.
    match answer:
        case {"ok": dict()} | {"error": str(), "hint": str()}:
            return answer
    return {"error": "tracing the program gave a malformed answer", "hint": ""}


if __name__ == "__main__":
    serve(lambda job, _: handle(job))
