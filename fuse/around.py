"""A region, with what Inductor would compute in one kernel with it.

A kernel that stores what Inductor never would, so that others can read it, gains nothing: it is
timed with those that read it.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import ancestors, reached
from coda_agent.fuse.kernels import called
from coda_agent.fuse.nodes import VIEWS, alike, described, entered, evaluate, is_cheap
from coda_agent.fuse.regions import Cut, Region, extracted, ports_of
from coda_agent.fuse.rules import carried_ends

aten = torch.ops.aten
_REDUCED = (
    aten.sum.dim_IntList, aten.sum.default, aten.mean.dim, aten.mean.default, aten.amax.default,
    aten.amin.default, aten.var.correction, aten.var_mean.correction, operator.getitem,
)  # fmt: skip


@dataclass(frozen=True)
class Around:
    """A region in its surroundings.

    Attributes:
        part: Both as a graph by itself.
        plain: What Inductor would compute instead. Rows' factors that were carried past a product
            are in front of it there, in the kernel of a norm, which takes no longer by them.
        region: It.
        places: Where the graph's nodes are in `part`.
        once: Names of the region's ports that are packed before the graph is called.
    """

    part: fx.Graph
    plain: fx.Graph
    region: Region
    places: dict[fx.Node, fx.Node]
    once: tuple[str, ...] = ()

    @cached_property
    def described(self) -> str:
        """Write down what a kernel would replace."""
        graphs = [self.part] if self.plain is self.part else [self.part, self.plain]
        return " ".join((*map(described, graphs), *self.once))

    def packed(self, inputs: Sequence[object]) -> dict[str, torch.Tensor]:
        """Make what `once` names of what `part` takes."""
        known = self.region.composition
        ports = [port for port in ports_of(known) if port.name in self.once]
        wanted = ancestors(self.places[node] for port in ports for node in port.nodes)
        values = entered(self.part, inputs)
        evaluate([node for node in self.part.nodes if node in wanted], values)
        at = lambda port: port.canonical(*(values[self.places[n]] for n in port.nodes))
        return {port.name: at(port) for port in ports}

    def by_kernel(
        self, text: str, ready: Mapping[str, torch.Tensor] | None = None
    ) -> Callable[..., list[torch.Tensor]]:
        """Make the function of `part`, with the region's values by its kernel.

        Args:
            text: It.
            ready: What it takes by some ports, else made of what the function takes.
        """
        held = ready or {}
        inside = {self.places[node] for node in self.region.nodes}
        later = set(inside)  # what needs the kernel
        for node in self.part.nodes:
            if not later.isdisjoint(node.all_input_nodes):
                later.add(node)
        before = [node for node in self.part.nodes if node not in later]
        behind = [node for node in self.part.nodes if node in later - inside]
        results_of: Any = self.part.output_node().args[0]
        shown = {x: n for n, x in self.places.items() if any(u.op == "output" for u in n.users)}
        known = self.region.composition

        def call(*inputs: object) -> list[torch.Tensor]:
            values = entered(self.part, inputs)
            evaluate(before, values)
            at = lambda port: (
                held[port.name]
                if port.name in held
                else port.canonical(*(values[self.places[n]] for n in port.nodes))
            )
            results = called(known, text, at)
            values.update((self.places[n], x) for n, x in results.items() if n is not None)
            evaluate(behind, values)
            return [_laid(values[node], shown.get(node)) for node in results_of]

        return call


def _laid(x: torch.Tensor, result: fx.Node | None) -> torch.Tensor:
    """Lay a graph's result out as its readers expect, as Inductor does."""
    whole = result is not None and result.meta["val"].is_contiguous()
    return x.contiguous() if whole else x


def alone(region: Region) -> Around:
    """Leave a region by itself."""
    places = {node: copy for copy, node in region.originals.items()}
    return Around(region.part, region.part, region, places)


def around(known: Cut, region: Region, constants: Collection[fx.Node] = ()) -> Around:
    """Find what reads a region's results pointwise, or sums them.

    `constants` are the graph's nodes that are the same at each call: weights that are frozen, and
    what is made of them.
    """
    others = Cut(known.graph, [other for other in known.regions if other is not region])
    taken = {*others.taken}
    first = min(region.nodes)
    needed = ancestors(region.inputs, first)
    found, pending = set(region.nodes), [user for node in region.outputs for user in node.users]
    while pending:
        node = pending.pop(0)
        if _is_fused(node) and node not in {*found, *taken, *needed} and alike(node, first):
            found.add(node)
            if not _is_stored(node, taken):
                pending += node.users
    outputs = {n for n in found if any(u not in found for u in n.users)}
    part, originals = extracted(others, found, outputs)
    once = (p.name for p in ports_of(region.composition) if p.packed and {*p.nodes} <= {*constants})
    places = {node: copy for copy, node in originals.items()}
    return Around(part, _plain(part, places), region, places, tuple(once))


def _plain(part: fx.Graph, places: Mapping[fx.Node, fx.Node]) -> fx.Graph:
    """Copy `part` without factors that were carried past its products, if there are any."""
    ends = [(x, end) for x, end in carried_ends(places) if end in places]
    if not ends:
        return part
    copies, plain = dict[fx.Node, fx.Node](), fx.Graph(part.owning_module)
    plain.output(plain.graph_copy(part, copies))
    for product, end in ends:
        copies[places[end]].replace_all_uses_with(copies[places[product]])
    plain.eliminate_dead_code()
    return plain


def _is_fused(node: fx.Node) -> bool:
    return is_cheap(node) or node.target in _REDUCED


def _is_stored(node: fx.Node, taken: set[fx.Node]) -> bool:
    """Whether a value is stored anyway, for a product or a kernel."""
    users = reached(node.users, lambda user: user.users if user.target in VIEWS else ())
    return any(user in taken or not _is_fused(user) for user in users)
