"""A user's function as a spec, and admission of a spec: what runs, runs in a child."""

import atexit
from collections.abc import Mapping
from dataclasses import asdict
from functools import lru_cache
from typing import Any, TypeVar

from coda_agent.agent.execution.answers import Ok, Refused, read_answer
from coda_agent.agent.execution.child import START_TIMEOUT_S, Child, ChildError
from coda_agent.primitives.errors import SpecError
from coda_agent.specs import Spec
from coda_agent.specs.source import Example, Source

_Result = TypeVar("_Result")
LIMIT_S = 60.0
"""A function that was drafted took 5 s on two busy cores, with what its child imports first."""
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def drafted(
    source: Source, examples: Mapping[str, Example], name: str, *, limit_s: float = LIMIT_S
) -> str:
    """The text of a spec called `name` for a function, admitted.

    Raises:
        SpecError: there is none, or the function did not end within `limit_s`; says why.
    """
    found = {x: asdict(example) for x, example in examples.items()}
    job = {"kind": "draft", "source": asdict(source), "examples": found, "name": name}
    return _result(job, source.where, limit_s, needs="coda_agent.specs.draft")


def admitted(spec: Spec, *, limit_s: float = LIMIT_S) -> None:
    """Admission as `specs.admit` has it, in a child.

    Raises:
        SpecError: it is refused, or did not end within `limit_s`; says why.
    """
    # What decorators of torch.compiler import takes 2 s.
    needs = "torch._dynamo" if spec.has_baseline else "torch"
    _result({"kind": "admit", "text": spec.text}, str(spec.path), limit_s, needs=needs)


@lru_cache(maxsize=1)
def _child() -> Child:
    """The child of this process, which stays warm: its imports take seconds."""
    child = reference_child("coda_agent.agent.execution.reference_worker")
    atexit.register(child.close)
    return child


def reference_child(module: str) -> Child:
    """Make a child that runs a user's function, which may write a scratch folder alone."""
    return Child(module, environment=_ENVIRONMENT, confine=True)


def _result(job: dict[str, Any], where: str, limit_s: float, *, needs: str) -> str:
    """What the child gives; that it imports what the job `needs` is not time of the job."""
    first, job = {"kind": "import", "module": needs}, {**job, "where": where}
    return result(_child(), job, where, limit_s, str, first=first)


def result(
    child: Child, job: dict[str, Any], where: str, limit_s: float, kind: type[_Result],
    *, first: dict[str, Any] | None = None,
) -> _Result:  # fmt: skip
    """What a job gives that runs a user's function, which stands at `where`.

    Args:
        child: Who does it.
        job: As the child has it.
        where: The function's file, for messages.
        limit_s: Its time.
        kind: The type of what it gives.
        first: A job before it, whose time does not count.

    Raises:
        SpecError: it was refused, or the function did not end in time; says why.
    """
    try:
        if first:
            child.call(first, timeout_s=START_TIMEOUT_S)
        answer = read_answer(child.call(job, timeout_s=limit_s))
    except ChildError as error:
        said = f"ended without a result: {error.detail}"
        if error.kind == "timeout":
            said = f"did not end in {limit_s:g} s"
        message = f"{where}: the function {said}"
        raise SpecError(message, hint="a reference only computes") from error
    match answer:
        case Ok(result=found) if isinstance(found, kind):
            return found
        case Refused(message=message, hint=hint):
            raise SpecError(message, hint=hint)
    raise SpecError(f"{where}: the function gave no answer that can be read")
