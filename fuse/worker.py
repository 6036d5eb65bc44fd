"""A user's function cut into kernels in a child, as data."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import TypeAdapter

from coda_agent.agent.execution.answers import answered
from coda_agent.agent.execution.child import serve
from coda_agent.agent.execution.reference_worker import LIMITS
from coda_agent.agent.judge.records import JsonObject
from coda_agent.agent.references import reference_child, result
from coda_agent.fuse.kernels import chosen
from coda_agent.fuse.record import recorded
from coda_agent.fuse.rules import prepare
from coda_agent.fuse.show import Shown, shown
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import SpecError
from coda_agent.specs.effects import forbidden
from coda_agent.specs.source import Example, Source

_SOURCE, _EXAMPLES = TypeAdapter(Source), TypeAdapter(dict[str, Example])
_LETTER = 4096
"""The size of a dim that is given by a letter."""
_LIMIT_S = 120.0


def explained(source: Source, examples: Mapping[str, Example]) -> Shown:
    """Plan a user's function, which is run in a child.

    Raises:
        SpecError: it cannot be planned; says why.
    """
    job = {
        "source": asdict(source),
        "examples": {x: asdict(example) for x, example in examples.items()},
    }
    child = reference_child(__name__)
    try:
        found = result(child, job, source.where, _LIMIT_S, dict)
    finally:
        child.close()
    return Shown.model_validate(found)


def planned(function: Callable[..., object], tensors: Sequence[torch.Tensor]) -> Shown:
    """Cut a function of tensors, and describe how.

    Raises:
        Exception: whatever the function raises.
    """
    graph = recorded(function, tensors).graph
    notes = prepare(graph)
    return shown(*chosen(graph), notes)


def _run(job: JsonObject) -> JsonObject:
    source = _SOURCE.validate_python(job["source"])
    examples = _EXAMPLES.validate_python(job["examples"])
    # What torch imports and looks up at its first run, before nothing may be opened any more.
    small = torch.empty(64, 16, dtype=torch.bfloat16, device="meta")
    planned(lambda x, w: torch.relu(x @ w.T), (small, torch.empty_like(small)))
    args: dict[str, torch.Tensor | float] = {}
    for name, example in examples.items():
        dtype = getattr(torch, "bfloat16" if example.dtype == "T" else example.dtype)
        shape = [_LETTER if isinstance(a, str) else a for a in example.axes]
        args[name] = torch.empty(shape, dtype=dtype, device="meta") if shape else 1.0
    tensors = {x: value for x, value in args.items() if isinstance(value, torch.Tensor)}
    space: dict[str, Any] = {}
    with forbidden():
        exec(compile(source.block, source.where, "exec"), space)

        def function(*given: object) -> object:
            return space["reference"](**args | dict(zip(tensors, given, strict=True)))

        try:
            found = planned(function, [*tensors.values()])
        except Exception as error:
            raise SpecError(f"{source.where}: {source.name} is left to PyTorch: {error}") from error
    return found.model_dump(mode="json")


def _main(job: JsonObject, _: object) -> JsonObject:
    return answered(lambda: _run(job)).model_dump()


if __name__ == "__main__":
    LIMITS.take()
    serve(_main)
