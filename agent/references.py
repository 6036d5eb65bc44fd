"""A user's function as a spec, and admission of a spec: what runs, runs in the sandbox."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any, TypeVar

from coda_agent.agent.execution.answers import Ok, Refused
from coda_agent.agent.execution.child import ChildError
from coda_agent.agent.execution.local import here
from coda_agent.agent.execution.pool import CompilePool
from coda_agent.primitives.errors import SpecError
from coda_agent.specs import Spec
from coda_agent.specs.source import Example, Source

_Result = TypeVar("_Result")
LIMIT_S = 60.0
"""A function that was drafted took 5 s on two busy cores, with what its worker imports first."""


def drafted(
    source: Source, examples: Mapping[str, Example], name: str, *, limit_s: float = LIMIT_S
) -> str:
    """The text of a spec called `name` for a function, admitted.

    Raises:
        SpecError: there is none, or the function did not end within `limit_s`; says why.
        MachineError: a stronger sandbox is demanded than works here.
    """
    found = {x: asdict(example) for x, example in examples.items()}
    job = {"kind": "draft", "source": asdict(source), "examples": found, "name": name}
    return _result(job, source.where, limit_s, needs="coda_agent.specs.draft")


def admitted(spec: Spec, *, limit_s: float = LIMIT_S) -> None:
    """Admission as `specs.admit` has it, in the sandbox.

    Raises:
        SpecError: it is refused, or did not end within `limit_s`; says why.
        MachineError: a stronger sandbox is demanded than works here.
    """
    # What decorators of torch.compiler import takes 2 s.
    needs = "torch._dynamo" if spec.has_baseline else "torch"
    _result({"kind": "admit", "text": spec.text}, str(spec.path), limit_s, needs=needs)


def _result(job: dict[str, Any], where: str, limit_s: float, *, needs: str) -> str:
    """What a worker gives, which stays warm for what the judge compiles later; that it imports what
    the job `needs` does not count towards the limit."""
    first, job = {"kind": "import", "module": needs}, {**job, "where": where}
    return result(here().pool(), job, where, limit_s, str, first=first)


def result(
    pool: CompilePool, job: dict[str, Any], where: str, limit_s: float, kind: type[_Result],
    *, first: dict[str, Any] | None = None,
) -> _Result:  # fmt: skip
    """What a job gives that runs a user's function, which stands at `where`.

    Args:
        pool: Whose worker does it.
        job: As the worker has it.
        where: The function's file, for messages.
        limit_s: Its time.
        kind: The type of what it gives.
        first: A job before it, whose time does not count.

    Raises:
        SpecError: it was refused, or the function did not end in time; says why.
    """
    try:
        answer = pool.answer(job, limit_s, first=first)
    except ChildError as error:
        said = f"did not end in {limit_s:g} s" if error.kind == "timeout" else error.detail
        message = f"{where}: the function {said}"
        raise SpecError(message, hint="a reference only computes") from error
    match answer:
        case Ok(result=found) if isinstance(found, kind):
            return found
        case Refused(message=message, hint=hint):
            raise SpecError(message, hint=hint)
    raise SpecError(f"{where}: the function gave no answer that can be read")
