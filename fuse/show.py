"""What a plan moves and why it is as it is, for people; and the worker that finds it out.

A user's function is run in a child (`python -m coda_agent.fuse.show`), and what
comes out of that is data.
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, TypeAdapter

from coda_agent.agent.execution.answers import answered
from coda_agent.agent.execution.child import serve
from coda_agent.agent.execution.reference_worker import LIMITS
from coda_agent.agent.references import reference_child, result
from coda_agent.fuse.choice import Made, planned
from coda_agent.fuse.cut import Kernel, Plan
from coda_agent.fuse.rules import Note, as_called, product
from coda_agent.fuse.spell import written
from coda_agent.fuse.trace import Graph, Value, record
from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.inspect import datasheet, launches
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.specs.draft import Example
from coda_agent.specs.effects import forbidden
from coda_agent.specs.source import Source

_SOURCE, _EXAMPLES = TypeAdapter(Source), TypeAdapter(dict[str, Example])
_LETTER = 4096
"""The size of a dim that is given by a letter."""
_LIMIT_S = 120.0


class Cost(BaseModel):
    """What a step moves and takes at least.

    Attributes:
        step: A kernel's name, or a call.
        bytes: Read and written, each tensor once.
        launches: On the device; of a call of PyTorch one, where it moves anything.
        floor_us: The roofline of an H200.
        what: Whose kernel it is, or why it is PyTorch's.
        takes: The places of the steps whose results it takes.
    """

    step: str
    bytes: int
    launches: int
    floor_us: float
    what: str
    takes: list[int] = []


class Shown(BaseModel):
    """A plan as data.

    Attributes:
        graph: The function's calls, one a line.
        notes: What rules did.
        changed: The calls that rules took away and put in.
        steps: The plan.
        eager: All calls of the function together.
        packed: Bytes of weights that are packed once.
        kernels: Of each kernel the step's text, its spec and its program.
    """

    graph: list[str]
    notes: list[Note]
    changed: list[str]
    steps: list[Cost]
    eager: Cost
    packed: int
    kernels: list[tuple[str, str, str]]

    def total(self) -> Cost:
        """All steps of the plan together."""
        return Cost(
            step="plan", bytes=sum(c.bytes for c in self.steps),
            launches=sum(c.launches for c in self.steps),
            floor_us=sum(c.floor_us for c in self.steps),
            what=f"{self.packed / 1e6:.1f} MB of weights are packed once" * bool(self.packed),
        )  # fmt: skip


def shown(graph: Graph, plan: Plan | None = None) -> Shown:
    """The plan of a graph; where none is given, one of which nothing is judged or kept."""
    plan = plan or planned(graph, kept=False)
    called, before = as_called(graph), [f"{v.name} = {written(v)}" for v in graph.values]
    after = [f"{v.name} = {written(v)}" for v in plan.graph.values]
    diff = [x for x in difflib.unified_diff(before, after, n=0, lineterm="") if x[:2] != "@@"]
    made = [(k, k.made.about) for k in plan.kernels if isinstance(k.made, Made)]
    packed = [x for k, _ in made for x in k.inputs if x.name in k.made.packed]  # type: ignore[attr-defined]
    whole = [_call(v, "") for v in called.values if not _free(v)]
    steps = [step for step in plan.steps if not _free(step)]
    makers = {v: i for i, s in enumerate(steps) for v in _outputs(s)}
    return Shown(
        graph=[f"{v.name} = {written(v)}  # {list(v.shape)}" for v in called.values],
        notes=plan.notes,
        changed=diff[2:],
        steps=[
            _cost(step, plan).model_copy(update={"takes": sorted(_makers(step, makers))})
            for step in steps
        ],
        eager=Cost(
            step="eager", bytes=sum(c.bytes for c in whole), launches=len(whole),
            floor_us=sum(c.floor_us for c in whole), what="each call by itself",
        ),
        packed=sum(x.bytes for x in packed),
        kernels=[(k.text, about.spec.text, about.text) for k, about in made],
    )  # fmt: skip


def lines(found: Shown, *, verbose: bool) -> Iterator[tuple[str, Sequence[tuple[object, ...]]]]:
    """Headings, each with rows of what is below it."""
    yield "graph", [(line,) for line in found.graph]
    for fired in (True, False) if verbose else (True,):
        rows = [(n.rule, n.where, n.why) for n in found.notes if n.fired == fired]
        yield "rules that fired" if fired else "rules that did not fire", rows
    yield "changed", [(line,) for line in found.changed]
    rows = [
        (c.step, f"{c.bytes / 1e6:.1f} MB", c.launches, f"{c.floor_us:.1f} us", c.what)
        for c in (*found.steps, found.total(), found.eager)
    ]
    yield "plan, with bytes, launches and an H200's roofline", rows


def explained(source: Source, examples: Mapping[str, Example]) -> Shown:
    """The plan of a user's function, which is run in a child.

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


def _free(step: Kernel | Value) -> bool:
    return isinstance(step, Value) and (step.view or not step.tensor)


def _outputs(step: Kernel | Value) -> list[Value]:
    return step.outputs if isinstance(step, Kernel) else [step]


def _makers(step: Kernel | Value, makers: Mapping[Value, int]) -> set[int]:
    """The places of the steps that make what it takes, or what that is a view of."""
    found, pending = set[int](), [*step.inputs]
    while pending:
        x = pending.pop()
        if x in makers:
            found.add(makers[x])
        else:
            pending += x.inputs
    return found


def _cost(step: Kernel | Value, plan: Plan) -> Cost:
    if isinstance(step, Value):
        return _call(step, plan.why.get(step, "known only after the kernels before it"))
    about = step.made.about if isinstance(step.made, Made) else None
    level = "composed"
    if about and about.folder:
        level = f"composed, with tiles of {about.like}" if about.more else f"{about.like}, accepted"
    return Cost(
        step=step.name,
        bytes=sum(v.bytes for v in (*step.inputs, *step.outputs)),
        launches=launches(about.program, DEFAULT_CONFIGS["sm_90a"]) if about else 1,
        floor_us=_floor(step.members, sum(v.bytes for v in (*step.inputs, *step.outputs))),
        what=f"{level}: {', '.join(v.called for v in step.members if not v.view)}",
    )


def _call(v: Value, why: str) -> Cost:
    moved = v.bytes + sum(x.bytes for x in v.inputs)
    what = f"PyTorch: {why}" if math.prod(v.shape[:-1]) != v.count else "tail"
    return Cost(
        step=f"{v.name} = {written(v)}", bytes=moved, launches=1, floor_us=_floor([v], moved),
        what=what,
    )  # fmt: skip


def _floor(calls: list[Value], moved: int) -> float:
    """Least microseconds on an H200."""
    ceiling = datasheet(2)
    flops = sum(2 * v.count * sides[0].shape[-1] for v in calls if (sides := product(v)))
    return 1e6 * max(flops / ceiling.flops_s, moved / ceiling.bytes_s)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    source = _SOURCE.validate_python(job["source"])
    examples = _EXAMPLES.validate_python(job["examples"])
    # What torch imports and looks up at its first run, before nothing may be opened any more.
    small = torch.empty(64, 16, dtype=torch.bfloat16, device="meta")
    shown(record(lambda x: torch.relu(x @ x.T), (small,), {}))
    args: dict[str, Any] = {}
    for name, example in examples.items():
        dtype = getattr(torch, "bfloat16" if example.dtype == "T" else example.dtype)
        shape = [_LETTER if isinstance(a, str) else a for a in example.axes]
        args[name] = torch.empty(shape, dtype=dtype, device="meta") if shape else 1.0
    space: dict[str, Any] = {}
    with forbidden():
        exec(compile(source.block, source.where, "exec"), space)
        space["reference"].__name__ = source.name
        try:
            graph = record(space["reference"], (), args, [x for x in args if examples[x].axes])
        except Exception as error:
            raise SpecError(f"{source.where}: {source.name} is left to PyTorch: {error}") from error
    return shown(graph).model_dump(mode="json")


def _main(job: dict[str, Any], _: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    return answered(lambda: _run(job)).model_dump()


if __name__ == "__main__":
    LIMITS.take()
    serve(_main)
