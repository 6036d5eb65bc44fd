"""A user's function as a spec, and its admission, in a child."""

import atexit
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from functools import lru_cache
from pathlib import Path
from typing import TypeVar

from coda_agent import primitives
from coda_agent.agent.execution.answers import Ok, Refused, read_answer
from coda_agent.agent.execution.child import START_TIMEOUT_S, Child, ChildError
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.errors import CodaError, SpecError, WorkspaceError
from coda_agent.primitives.objects import write_whole
from coda_agent.primitives.suggest import near_matches
from coda_agent.specs import Spec
from coda_agent.specs.format import DTYPES
from coda_agent.specs.source import Example, Source, axes_of

_Result = TypeVar("_Result")
_CAST = {
    "bool": "such as a bfloat16 mask of 0 and 1 of which the function asks `> 0`",
    "int8": "such as float8_e4m3fn, or cast it to that of the other operand before the call",
    "uint8": "such as float8_e4m3fn, or cast it to that of the other operand before the call",
}
"""Types that a user has and a kernel does not, and what to do."""
LIMIT_S = 60.0
"""A function that was drafted took 5 s on two busy cores, with what its child imports first."""
_ENVIRONMENT = {"CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}


def new_spec(
    folder: Path, source: Source, shapes: Sequence[str], name: str | None, *, force: bool = False
) -> Path:
    """Draft a spec of a function into a folder.

    Raises:
        CodaError: there is no example of an argument, or the name or the file cannot be used.
        SpecError: there is none; says why.
    """
    # A program that a primitive is called like could not import it.
    called = name or ("gemm_" * (source.name in primitives.__all__) + source.name)
    if not called.isidentifier() or "__" in called:
        hint = "give another name"
        raise CodaError(f"{called!r} is no name of a spec: letters, digits and _", hint=hint)
    if called in primitives.__all__:
        raise CodaError(f"{called!r} is a primitive's name", hint=f"name it gemm_{called}")
    path = folder / f"{called}.md"
    check_free(path, force=force)
    write_whole(path, drafted(source, examples_of(source, shapes), called))
    return path


def check_free(path: Path, *, force: bool) -> None:
    """Raise WorkspaceError where a file may not be overwritten."""
    if path.exists() and not force:
        raise WorkspaceError(f"{path} is there already", hint="give another name, or overwrite it")


def examples_of(source: Source, given: Sequence[str]) -> dict[str, Example]:
    """Make an example for each argument, of its shape or annotation.

    Raises:
        CodaError: an option or an argument that there is no example of.
    """
    shapes: dict[str, Example] = {}
    known = [argument.name for argument in source.arguments]
    for option in given:
        name, sign, rest = option.partition("=")
        sizes, _, dtype = rest.partition(":")
        axes = axes_of(sizes)
        if not sign or (sizes.strip() and not axes) or dtype not in ("", *DTYPES):
            types = ", ".join(DTYPES)
            hint = f"expected NAME=SIZES, such as x=4096,4096 or t=4096:int64; types are {types}"
            if dtype in _CAST:
                hint = f"no kernel reads {dtype}: give {name} in another type, {_CAST[dtype]}"
            raise CodaError(f"shape {option!r} is no example", hint=hint)
        if name not in known:
            raise CodaError(
                f"{source.name} has no argument {name!r}", hint=near_matches(name, known)
            )
        shapes[name] = Example(axes, dtype or ("T" if axes else "float32"))
    for argument in source.arguments:
        if argument.name in shapes or argument.default:
            continue
        if argument.axes is None:
            hint = f"give its shape, {argument.name}=SIZES, or a default"
            message = f"{source.where}:{argument.line}: nothing says what {argument.name} is"
            raise CodaError(message, hint=hint)
        shapes[argument.name] = Example(argument.axes, argument.dtype or "T")
    return {x: shapes[x] for x in known if x in shapes}


def drafted(
    source: Source, examples: Mapping[str, Example], name: str, *, limit_s: float = LIMIT_S
) -> str:
    """Draft a spec called `name` of a function, and admit it.

    Raises:
        SpecError: there is none, or the function did not end within `limit_s`; says why.
    """
    found = {x: asdict(example) for x, example in examples.items()}
    job = {"kind": "draft", "source": asdict(source), "examples": found, "name": name}
    return _result(job, source.where, limit_s, needs="coda_agent.specs.draft")


def admitted(spec: Spec, *, limit_s: float = LIMIT_S) -> None:
    """Admit a spec as `specs.admit` does, in a child.

    Raises:
        SpecError: it is refused, or did not end within `limit_s`; says why.
    """
    # What decorators of torch.compiler import takes 2 s.
    needs = "torch._dynamo" if spec.has_baseline else "torch"
    _result({"kind": "admit", "text": spec.text}, str(spec.path), limit_s, needs=needs)


@lru_cache(maxsize=1)
def _child() -> Child:
    """Make the child of this process; it stays warm for its imports."""
    child = reference_child("coda_agent.agent.execution.reference_worker")
    atexit.register(child.close)
    return child


def reference_child(module: str) -> Child:
    """Make a child for users' functions, which writes its scratch folder alone."""
    return Child(module, environment=_ENVIRONMENT, confine=True)


def _result(job: JsonObject, where: str, limit_s: float, *, needs: str) -> str:
    """Have the child do a job, after it imports what that `needs`."""
    first, job = {"kind": "import", "module": needs}, {**job, "where": where}
    return result(_child(), job, where, limit_s, str, first=first)


def result(
    child: Child, job: JsonObject, where: str, limit_s: float, kind: type[_Result],
    *, first: JsonObject | None = None,
) -> _Result:  # fmt: skip
    """Have a child do a job with a function found at `where`.

    Args:
        job: As the child has it.
        where: The function's file, for messages.
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
        said, hint = f"ended without a result: {error.detail}", "a reference only computes"
        if error.kind == "timeout":
            said, hint = f"did not end in {limit_s:g} s", "write loops as operations on tensors"
        raise SpecError(f"{where}: the function {said}", hint=hint) from error
    match answer:
        case Ok(result=found) if isinstance(found, kind):
            return found
        case Refused(message=message, hint=hint):
            raise SpecError(message, hint=hint)
    raise SpecError(f"{where}: the function gave no answer that can be read")
