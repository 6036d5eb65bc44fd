"""How a graph is cut, as data and as tables for people."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from pydantic import BaseModel
from torch import fx

from coda_agent.agent.authors.composer.emit import module_text
from coda_agent.fuse.kernels import Kernel
from coda_agent.fuse.nodes import PRODUCTS, VIEWS, bytes_of, operands
from coda_agent.fuse.regions import Cut, Region, order
from coda_agent.primitives.inspect import datasheet, launches
from coda_agent.primitives.tiles import DEFAULT_CONFIGS

_NO_PART = "no part of a kernel"


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
        apart: All calls of the graph, each by itself: PyTorch may have one for several of them.
        kernels: Of each kernel its text, and its program as data.
    """

    graph: list[str]
    notes: list[str]
    steps: list[Cost]
    apart: Cost
    kernels: list[tuple[str, dict[str, Any]]]

    def __repr__(self) -> str:
        """Say each product's kernel, or why it has none, and rules' changes."""
        steps = [cost for cost in self.steps if not cost.what.endswith(_NO_PART)]
        lines = [f"{cost.step}: {cost.what}" for cost in steps]
        more = f"{len(self.steps) - len(steps)} more calls are PyTorch's"
        return "\n".join([*lines, more, *self.notes])

    def __str__(self) -> str:
        return repr(self)

    def total(self) -> Cost:
        """Add up all steps of the plan.

        Returns:
            Their bytes, launches and least time in us, as of one step.
        """
        return _sum("plan", self.steps)


def shown(known: Cut, kernels: Mapping[Region, Kernel], notes: list[str]) -> Shown:
    """Describe a graph that is cut, its kernels and what rules changed."""
    nodes = [n for n in known.graph.nodes if n.op == "call_function"]
    whole = [_call(n, "") for n in nodes if not _is_free(n)]
    why = {node.name: reason for node, reason in known.why.items()}
    every = [*order(known)]
    regions = [step for step in every if isinstance(step, Region)]
    steps = [
        _kernel(step, kernels[step]) if isinstance(step, Region) else _call(step, why)
        for step in every
        if isinstance(step, Region) or not _is_free(step)
    ]
    return Shown(
        graph=[f"{n.format_node()}  # {[*n.meta['val'].shape]}" for n in nodes if _has_value(n)],
        notes=notes,
        steps=steps,
        apart=_sum("apart", whole, "each call of the graph by itself"),
        kernels=[
            (module_text("A kernel of a plan.", ("A", "B"), [x.rewritten]), x.program.to_dict())
            for x in (region.composition for region in regions)
        ],
    )


def _sum(step: str, costs: Sequence[Cost], what: str = "") -> Cost:
    """Add up steps as one."""
    return Cost(
        step=step,
        bytes=sum(c.bytes for c in costs),
        launches=sum(c.launches for c in costs),
        floor_us=sum(c.floor_us for c in costs),
        what=what,
    )


def lines(found: Shown, *, verbose: bool) -> Iterator[tuple[str, Sequence[tuple[object, ...]]]]:
    """List headings, each with its rows; `verbose` with the whole graph."""
    if verbose:
        yield "graph", [(line,) for line in found.graph]
    yield "rules that fired", [(note,) for note in found.notes]
    head = ("step", "bytes", "launches", "roofline", "by")
    rows = [
        (c.step, f"{c.bytes / 1e6:.1f} MB", c.launches, f"{c.floor_us:.1f} us", c.what)
        for c in (*found.steps, found.total(), found.apart)
    ]
    yield "plan, with the roofline of an H200", [head, *rows]


def products(found: Shown) -> Iterator[tuple[str, str]]:
    """List products that are PyTorch's, each with the reason."""
    for cost in found.steps:
        whose, _, reason = cost.what.partition(": ")
        if whose == "PyTorch" and reason != _NO_PART:
            yield cost.step, reason


def _has_value(node: fx.Node) -> bool:
    return hasattr(node.meta.get("val"), "shape")


def _is_free(node: fx.Node) -> bool:
    """Whether a node moves nothing: it gives a view, or no tensor."""
    schema = getattr(node.target, "_schema", None)
    if node.op != "call_function" or schema is None or not _has_value(node):
        return True
    shared = schema.returns[0].alias_info
    return node.target in VIEWS or (shared is not None and not shared.is_write)


def _kernel(region: Region, kernel: Kernel) -> Cost:
    moved = bytes_of((*region.inputs, *region.outputs))
    level = f"{kernel.like}, accepted" if kernel.accepted else "composed"
    level += f", with tiles of {kernel.like}" * bool(kernel.like and not kernel.accepted)
    level += f" ({kernel.times})" * bool(kernel.times)
    calls = [n.name for n in region.nodes if not _is_free(n)]
    return Cost(
        step=" + ".join(n.name for n in region.outputs),
        bytes=moved,
        launches=launches(region.composition.program, DEFAULT_CONFIGS["sm_90a"]),
        floor_us=_floor([*region.nodes], moved),
        what=f"{level}: {', '.join(sorted(calls))}",
    )


def _call(node: fx.Node, why: Mapping[str, str] | str) -> Cost:
    moved = bytes_of((node, *node.all_input_nodes))
    reason = why.get(node.name, _NO_PART) if isinstance(why, Mapping) else why
    floor = _floor([node], moved)
    step = str(node.format_node()).partition(" : ")[0].lstrip("%")
    return Cost(step=step, bytes=moved, launches=1, floor_us=floor, what=f"PyTorch: {reason}")


def _floor(calls: list[fx.Node], moved: int) -> float:
    """Least microseconds on an H200."""
    ceiling, flops = datasheet(2), 0
    for node in calls:
        if node.target in PRODUCTS:
            a, _ = operands(node)
            flops += 2 * node.meta["val"].numel() * a.meta["val"].shape[-1]
    return 1e6 * max(flops / ceiling.flops_s, moved / ceiling.bytes_s)
