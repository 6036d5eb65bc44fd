"""The compile worker: a child without GPU that runs candidates' Python and the compiler, so that
the judging process never does.

Started by `pool.Worker` as `python -m coda_agent.agent.judge.worker FD`. Jobs arrive as JSON lines
on stdin, results leave as JSON lines on the file descriptor FD; whatever a job prints goes
elsewhere and cannot pass for a result.
"""

from __future__ import annotations

import builtins
import json
import os
import sys
from typing import Any

from coda_agent.primitives.errors import CodaError


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
    exec(compile(text, "<candidate>", "exec"), namespace)  # admitted by the static gate
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


HANDLERS = {"load": lambda job: load_programs(job["text"]), "compile": compile_program}


def main() -> None:
    """Serve jobs until stdin closes."""
    results = os.fdopen(int(sys.argv[1]), "w")
    for line in sys.stdin:
        job = json.loads(line)
        try:
            answer = {"ok": HANDLERS[job["kind"]](job)}
        except CodaError as error:
            answer = {"error": error.message, "hint": error.hint, "type": type(error).__name__}
        except (
            Exception
        ) as error:  # a compiler may raise anything; the parent turns it into a finding
            first = next((s for s in str(error).splitlines() if s.strip()), "")
            answer = {"error": f"{type(error).__name__}: {first}", "hint": "", "type": "Internal"}
        results.write(json.dumps({"nonce": job["nonce"], **answer}) + "\n")
        results.flush()


if __name__ == "__main__":
    main()
