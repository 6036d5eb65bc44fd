"""A user's function as a spec, and admission of a spec: what runs, runs in the sandbox."""

from collections.abc import Mapping
from dataclasses import asdict
from typing import Any

from coda_agent.agent import sandbox
from coda_agent.agent.execution.answers import Ok, Refused, read_answer
from coda_agent.agent.execution.child import Child, ChildError
from coda_agent.agent.execution.pool import LIMITS
from coda_agent.primitives.errors import SpecError
from coda_agent.specs import Spec
from coda_agent.specs.draft import Example
from coda_agent.specs.source import Source

LIMIT_S = 60.0
"""A function that was drafted took 5 s on two busy cores."""


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
    return _result(job, source.where, limit_s)


def admitted(spec: Spec, *, limit_s: float = LIMIT_S) -> None:
    """Admission as `specs.admit` has it, in the sandbox.

    Raises:
        SpecError: it is refused, or did not end within `limit_s`; says why.
        MachineError: a stronger sandbox is demanded than works here.
    """
    job = {"kind": "admit", "path": str(spec.path), "text": spec.text}
    if fault := _result(job, str(spec.path), limit_s):
        raise SpecError(fault)


def child() -> Child:
    """A worker that runs what is a user's."""
    return Child(
        "coda_agent.agent.execution.reference_worker",
        environment={"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"},
        wrap=sandbox.choose().wrap,
        limits=LIMITS,
    )


def _result(job: dict[str, Any], where: str, limit_s: float) -> str:
    worker = child()
    try:
        return asked(worker, job, where, limit_s)
    finally:
        worker.close()


def asked(worker: Child, job: dict[str, Any], where: str, limit_s: float) -> str:
    """What a worker answers; its imports do not count towards the limit.

    Raises:
        SpecError: it refuses, died, or gave no answer in time.
    """
    try:
        answer = read_answer(worker.call(job, timeout_s=limit_s))
    except ChildError as error:
        said = f"did not end in {limit_s:g} s" if error.kind == "timeout" else "ended its process"
        message = f"{where}: the function {said}"
        raise SpecError(message, hint="a reference only computes") from error
    match answer:
        case Ok(result=str(text)):
            return text
        case Refused(message=message, hint=hint):
            raise SpecError(message, hint=hint)
    raise SpecError(f"{where}: the function gave no answer that can be read")
