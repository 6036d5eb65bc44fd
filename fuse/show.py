"""What a plan moves and why it is as it is, for people; and the worker that finds it out.

A user's function is run in a child (`python -m coda_agent.fuse.show`), and what
comes out of that is data.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict
from typing import Any

from pydantic import BaseModel, TypeAdapter
from torch import fx

from coda_agent.agent.authors.composer.emit import module_text
from coda_agent.agent.execution.answers import answered
from coda_agent.agent.execution.child import serve
from coda_agent.agent.execution.reference_worker import LIMITS
from coda_agent.agent.references import reference_child, result
from coda_agent.fuse.plan import Plan, planned
from coda_agent.fuse.regions import PRODUCTS, Cut, Region, order
from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.inspect import datasheet, launches
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.specs.effects import forbidden
from coda_agent.specs.source import Example, Source

_SOURCE, _EXAMPLES = TypeAdapter(Source), TypeAdapter(dict[str, Example])
_LETTER = 4096
"""The size of a dim that is given by a letter."""
_LIMIT_S = 120.0
_VIEWS = ("view", "permute", "t", "transpose", "slice", "select", "expand", "unsqueeze", "squeeze")


class Cost(BaseModel):
    """What a step moves and takes at least.

    Attributes:
        step: A kernel's name, or a call.
        bytes: Read and written, each tensor once.
        launches: On the device; of a call of PyTorch one, where it moves anything.
        floor_us: The roofline of an H200.
        what: Whose kernel it is, or why it is PyTorch's.
    """

    step: str
    bytes: int
    launches: int
    floor_us: float
    what: str


class Shown(BaseModel):
    """A plan as data.

    Attributes:
        graph: The function's calls of ATen, one a line.
        notes: What rules changed.
        steps: The plan.
        eager: All calls of the function together.
        kernels: Of each kernel its text, and its program as data.
    """

    graph: list[str]
    notes: list[str]
    steps: list[Cost]
    eager: Cost
    kernels: list[tuple[str, dict[str, Any]]]

    def total(self) -> Cost:
        """Add up all steps of the plan."""
        return Cost(
            step="plan",
            bytes=sum(c.bytes for c in self.steps),
            launches=sum(c.launches for c in self.steps),
            floor_us=sum(c.floor_us for c in self.steps),
            what="",
        )


def shown(plan: Plan) -> Shown:
    """Describe a plan."""
    nodes = [n for n in plan.original.graph.nodes if n.op == "call_function"]
    whole = [_call(n, "") for n in nodes if not _is_free(n)]
    known = Cut(plan.original.graph, plan.regions)
    used = {x for k in plan.regions for x in k.inputs} | {*nodes}
    kernels = iter(plan.kernels)
    steps = [
        _kernel(step, next(kernels)) if isinstance(step, Region) else _call(step, plan.why)
        for step in order(known)
        if isinstance(step, Region) or (step in used and not _is_free(step))
    ]
    return Shown(
        graph=[f"{n.format_node()}  # {[*n.meta['val'].shape]}" for n in nodes if _has_value(n)],
        notes=plan.notes,
        steps=steps,
        eager=Cost(
            step="eager",
            bytes=sum(c.bytes for c in whole),
            launches=len(whole),
            floor_us=sum(c.floor_us for c in whole),
            what="each call by itself",
        ),
        kernels=[
            (module_text("A kernel of a plan.", ("A", "B"), [x.rewritten]), x.program.to_dict())
            for x in (region.composition for region in plan.regions)
        ],
    )


def lines(found: Shown, *, verbose: bool) -> Iterator[tuple[str, Sequence[tuple[object, ...]]]]:
    """List headings, each with rows of what is below it; `verbose` with the whole graph."""
    if verbose:
        yield "graph", [(line,) for line in found.graph]
    yield "rules that fired", [(note,) for note in found.notes]
    rows = [
        (c.step, f"{c.bytes / 1e6:.1f} MB", c.launches, f"{c.floor_us:.1f} us", c.what)
        for c in (*found.steps, found.total(), found.eager)
    ]
    yield "plan, with bytes, launches and an H200's roofline", rows


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


def _has_value(node: fx.Node) -> bool:
    return hasattr(node.meta.get("val"), "shape")


def _is_free(node: fx.Node) -> bool:
    schema = getattr(node.target, "_schema", None)
    name = schema.name.split("::")[1] if schema else ""
    return node.op != "call_function" or name in (*_VIEWS, "") or not _has_value(node)


def _bytes(node: fx.Node) -> int:
    value = node.meta["val"]
    return value.numel() * value.element_size() if _has_value(node) else 0


def _kernel(region: Region, kernel: Any) -> Cost:
    moved = sum(map(_bytes, (*region.inputs, *region.outputs)))
    level = f"{kernel.like}, accepted" if kernel.accepted else "composed"
    level += f", with tiles of {kernel.like}" * bool(kernel.like and not kernel.accepted)
    calls = [n.name for n in region.nodes if not _is_free(n)]
    return Cost(
        step=" + ".join(n.name for n in region.outputs),
        bytes=moved,
        launches=launches(region.composition.program, DEFAULT_CONFIGS["sm_90a"]),
        floor_us=_floor([*region.nodes], moved),
        what=f"{level}: {', '.join(sorted(calls))}",
    )


def _call(node: fx.Node, why: Mapping[str, str] | str) -> Cost:
    moved = _bytes(node) + sum(_bytes(x) for x in node.all_input_nodes if _has_value(x))
    reason = why.get(node.name, "no part of a kernel") if isinstance(why, Mapping) else why
    floor = _floor([node], moved)
    step = str(node.format_node()).partition(" : ")[0].lstrip("%")
    return Cost(step=step, bytes=moved, launches=1, floor_us=floor, what=f"PyTorch: {reason}")


def _floor(calls: list[fx.Node], moved: int) -> float:
    """Least microseconds on an H200."""
    ceiling, flops = datasheet(2), 0
    for node in calls:
        if node.target in PRODUCTS:
            a = [x for x in node.args if isinstance(x, fx.Node)][-2]
            flops += 2 * node.meta["val"].numel() * a.meta["val"].shape[-1]
    return 1e6 * max(flops / ceiling.flops_s, moved / ceiling.bytes_s)


def _run(job: dict[str, Any]) -> dict[str, Any]:
    import torch

    source = _SOURCE.validate_python(job["source"])
    examples = _EXAMPLES.validate_python(job["examples"])
    # What torch imports and looks up at its first run, before nothing may be opened any more.
    small = torch.empty(64, 16, dtype=torch.bfloat16, device="meta")
    shown(planned(lambda x, w: torch.relu(x @ w.T), (small, torch.empty_like(small))))
    args: dict[str, Any] = {}
    for name, example in examples.items():
        dtype = getattr(torch, "bfloat16" if example.dtype == "T" else example.dtype)
        shape = [_LETTER if isinstance(a, str) else a for a in example.axes]
        args[name] = torch.empty(shape, dtype=dtype, device="meta") if shape else 1.0
    tensors = {x: value for x, value in args.items() if isinstance(value, torch.Tensor)}
    space: dict[str, Any] = {}
    with forbidden():
        exec(compile(source.block, source.where, "exec"), space)

        def function(*given: Any) -> Any:
            return space["reference"](**args | dict(zip(tensors, given, strict=True)))

        try:
            plan = planned(function, [*tensors.values()])
        except Exception as error:
            raise SpecError(f"{source.where}: {source.name} is left to PyTorch: {error}") from error
    return shown(plan).model_dump(mode="json")


def _main(job: dict[str, Any], _: Callable[[dict[str, Any]], None]) -> dict[str, Any]:
    return answered(lambda: _run(job)).model_dump()


if __name__ == "__main__":
    LIMITS.take()
    serve(_main)
