"""The plan of a function: its ATen graph, with kernels in the place of regions."""

from __future__ import annotations

import operator
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx

from coda_agent.fuse.kernels import RegionKernel
from coda_agent.fuse.record import apply_rules, recorded
from coda_agent.fuse.regions import PRODUCTS, Cut, Region, cut, order
from coda_agent.primitives.errors import CodaError

aten = torch.ops.aten
Make = Callable[[Region], Callable[..., Any]]


@dataclass(frozen=True, eq=False)
class Plan:
    """How a function runs by kernels.

    Attributes:
        original: Its graph.
        module: The same with kernels.
        kernels: Of its regions, in the order in which they run.
        why: Of each product that PyTorch runs, by the node's name, the reason.
        notes: What rules changed, a line each.
        regions: Those of the kernels.
    """

    original: fx.GraphModule
    module: fx.GraphModule
    kernels: list[Any]
    why: dict[str, str]
    notes: list[str] = field(default_factory=list)
    regions: list[Region] = field(default_factory=list)

    @property
    def reasons(self) -> str:
        """Why PyTorch runs products, each reason once; "" where it runs none."""
        return "; ".join(f"{name}: {why}" for name, why in self.why.items())


def planned(
    function: Callable[..., Any], tensors: Sequence[torch.Tensor], make: Make = RegionKernel
) -> Plan:
    """Plan a function of tensors.

    Args:
        function: It.
        tensors: An example of its arguments.
        make: What makes a region's kernel.

    Raises:
        Exception: whatever the function raises.
    """
    original = recorded(function, tensors)
    notes = apply_rules(original)
    known = cut(original.graph)
    kernels: dict[Region, Any] = {}
    for region in [*known.regions]:
        try:
            kernels[region] = make(region)
        except CodaError as error:
            known.regions.remove(region)
            known.why.update({n: error.message for n in region.nodes if n.target in PRODUCTS})
    module = _replaced(original, known, kernels)
    steps = [kernels[step] for step in order(known) if isinstance(step, Region)]
    why = {node.name: reason for node, reason in known.why.items()}
    return Plan(original, module, steps, why, notes, known.regions)


def _replaced(original: fx.GraphModule, known: Cut, kernels: dict[Region, Any]) -> fx.GraphModule:
    """The graph with calls of kernels in the place of regions."""
    graph, copies, steps = fx.Graph(), dict[fx.Node, fx.Node](), dict[str, _Step]()
    used = {x for n in known.graph.nodes for x in n.all_input_nodes if not _within(known, n)}
    used |= {x for region in known.regions for x in region.inputs}
    for step in order(known):
        if not isinstance(step, Region):
            if step.op == "output":
                results: Any = step.args[0]
                graph.output([_as_before(graph, copies[x], x) for x in results])
            elif step.op == "placeholder" or step in used:
                copies[step] = graph.node_copy(step, copies.__getitem__)
                if step.target is aten.view.default:  # kernels' results may have other strides
                    copies[step].target = aten.reshape.default
            continue
        name = f"kernel_{len(steps)}"
        steps[name] = _Step(kernels[step])
        call = graph.create_node("call_module", name, tuple(copies[x] for x in step.inputs))
        for i, node in enumerate(step.outputs):
            copies[node] = graph.call_function(operator.getitem, (call, i))
            copies[node].meta = dict(node.meta)
    root: dict[str, Any] = dict(steps)
    root |= {str(n.target): getattr(original, n.target) for n in graph.nodes if n.op == "get_attr"}
    return fx.GraphModule(root, graph)


def _as_before(graph: fx.Graph, node: Any, before: Any) -> Any:
    """A result with the strides that the function's own has."""
    if not isinstance(before, fx.Node) or before.op == "placeholder":
        return node
    return graph.call_function(_strided, (node, before.meta["val"].stride()))


def _strided(x: torch.Tensor, strides: tuple[int, ...]) -> torch.Tensor:
    if x.stride() == strides:
        return x
    return torch.empty_strided(x.shape, strides, dtype=x.dtype, device=x.device).copy_(x)


class _Step(torch.nn.Module):
    """A kernel as a part of a module."""

    def __init__(self, kernel: Callable[..., Any]) -> None:
        super().__init__()
        self.kernel = kernel

    def forward(self, *tensors: torch.Tensor) -> Any:
        return self.kernel(*tensors)


def _within(known: Cut, node: fx.Node) -> bool:
    return any(node in region.nodes for region in known.regions)
