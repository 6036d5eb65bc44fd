"""An ATen graph cut into regions, each of which one kernel computes.

A region grows from a product, or from all products of one A, along what is computed with it. The
composer is asked for its program; where it refuses, the node that it names is left out with what
needs it, and it is asked again.

A graph of both passes has each node tagged with its pass, and a region lies within one. What the
backward pass needs of a forward region is computed there again from the fewest bytes stored.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import ancestors, reached
from coda_agent.agent.authors.composer.join import Composition
from coda_agent.agent.authors.composer.ports import Port
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.subgraph import compose_graph
from coda_agent.fuse.kept import kept, path_of
from coda_agent.fuse.nodes import (
    PRODUCTS,
    SHORT,
    SUM,
    VIEWS,
    alike,
    counts,
    described,
    is_held,
    lay_out_anew,
    operands,
)
from coda_agent.fuse.reads import read_along
from coda_agent.fuse.spread import in_place
from coda_agent.fuse.stores import compared_extremes, compute_again, gathered_of, stored_of

aten = torch.ops.aten
_NODES, _ATTEMPTS = 96, 24
"""Nodes of a region at most, and how often the composer is asked for one."""
_ALONE = "nothing follows it that a kernel could take along"


@dataclass(frozen=True, eq=False)
class Region:
    """What one kernel computes.

    Attributes:
        nodes: Of the graph.
        part: They as a graph by itself.
        local: The kernel's program, with ports at nodes of `part`.
        originals: The graph's nodes that those of `part` are.
    """

    nodes: frozenset[fx.Node]
    part: fx.Graph
    local: Composition
    originals: Mapping[fx.Node, fx.Node]

    @cached_property
    def composition(self) -> Composition:
        """The program, with ports at nodes of the graph."""
        return renamed(self.local, self.originals)

    @property
    def inputs(self) -> list[fx.Node]:
        """Nodes that the kernel reads, each once."""
        ports = ports_of(self.composition)
        return list(dict.fromkeys(node for port in ports for node in port.nodes))

    @property
    def products(self) -> list[fx.Node]:
        """Products among the nodes."""
        return [node for node in self.nodes if node.target in PRODUCTS]

    @property
    def outputs(self) -> list[fx.Node]:
        """Nodes whose values the kernel gives."""
        return [node for port in self.composition.outputs.values() for node in port.nodes]


@dataclass(frozen=True)
class Cut:
    """A graph with its regions.

    Attributes:
        graph: It.
        regions: In the order in which they were found.
        why: Of products that are in none, the reason.
        compared: What no kernel makes: the largest of what it is then compared with.
    """

    graph: fx.Graph
    regions: list[Region] = field(default_factory=list)
    why: dict[fx.Node, str] = field(default_factory=dict)
    compared: Set[fx.Node] = frozenset()

    @property
    def taken(self) -> dict[fx.Node, Region]:
        """The region of each node that is in one."""
        return {node: region for region in self.regions for node in region.nodes}

    def leave(self, region: Region, reason: str) -> None:
        """Leave a region's products to PyTorch."""
        self.regions.remove(region)
        self.why.update(dict.fromkeys(region.products, reason))


def cut(graph: fx.Graph) -> Cut:
    """Cut a functional ATen graph with `meta["val"]` into regions."""
    result = Cut(graph, compared=compared_extremes(graph))
    left = [node for node in graph.nodes if node.target in PRODUCTS]
    while left:
        first = left.pop(0)
        if reason := _unfit(first):
            result.why[first] = reason
            continue
        a = operands(first)[0]
        same = [
            node
            for node in left
            if operands(node)[0] is a and not _unfit(node) and alike(node, first)
        ]
        for products in _together(result, [first, *same]) if same else ([first],):
            region = _region(result, products)
            if isinstance(region, Region) and not _fits(result, region):
                region = "needs what another kernel computes of its result"
            if isinstance(region, Region):
                result.regions.append(region)
                left = [node for node in left if node not in region.nodes]
                break
            result.why[first] = region
    for region in result.regions:
        for node in region.nodes:
            result.why.pop(node, None)
    return result


def _together(known: Cut, products: list[fx.Node]) -> list[list[fx.Node]]:
    """List which products of one A a region may have with the first.

    Those that meet, as a gate and its up do, are a program of pairs, which takes no others along.
    """
    met: list[set[fx.Node]] = []
    for node in sorted(_grown(known, products, set(), stored=False).difference(products)):
        parts = [part for part in met if not part.isdisjoint(node.all_input_nodes)]
        needs = {x for x in node.all_input_nodes if x in products}
        met = [part for part in met if part not in parts] + [needs.union([node], *parts)]
    pairs = [part for part in met if len(part.intersection(products)) > 1]
    first = products[0]
    own = next((part for part in pairs if first in part), None)
    paired = own or {x for x in products if not any(x in part for part in pairs)}
    likely = [x for x in products if x in paired]
    return [likely] + [x for x in (products, [first]) if x != likely]


def _fits(known: Cut, region: Region) -> bool:
    """Whether a region and those before it do not need each other."""
    taken = known.taken | dict.fromkeys(region.nodes, region)

    def read(step: fx.Node | Region) -> list[fx.Node | Region]:
        nodes = step.inputs if isinstance(step, Region) else step.all_input_nodes
        return [taken.get(node, node) for node in nodes]

    return region not in reached(read(region), read)


def _unfit(product: fx.Node) -> str:
    """Why no kernel multiplies this; "" where one may."""
    a, b = (node.meta["val"] for node in operands(product))
    if a.dtype != b.dtype or a.dtype not in SHORT:
        return f"multiplies {a.dtype} with {b.dtype}".replace("torch.", "")
    if min(*a.shape, *b.shape) < 2:
        return "multiplies with a vector"
    return _other_scaling(product) if product.target is aten._scaled_mm.default else ""


def _other_scaling(product: fx.Node) -> str:
    """Why no kernel computes this product of FP8; "" where one may."""
    args: Any = (*product.args, *(None,) * 8)
    _, _, *scales, _, result, _, fast = args[:8]
    if result is not None:
        return "scales its result"
    if any(x.meta["val"].dtype != torch.float32 for x in scales):
        return "has scales of blocks"
    return "" if fast else "asks for an exact sum in FP8"


def _region(known: Cut, products: Sequence[fx.Node]) -> Region | str:
    """The region that grows from these products, or why there is none."""
    without, along = set[fx.Node](), True
    read = {node for region in known.regions for node in region.inputs}
    for _ in range(_ATTEMPTS):
        nodes = _grown(known, products, without, stored=along)
        if not nodes.issuperset(products):
            return "needs another product of its own A"
        stored = stored_of(nodes, read)
        if picked := gathered_of(nodes, stored):
            without |= picked
            continue
        part, originals = extracted(known, nodes, stored)
        local = composed(part)
        if isinstance(local, Refusal):
            node = originals.get(local.node) if local.node else None
            if node is None or node not in nodes or node in products or node in without:
                if not along:
                    return local.message
                along = False
                continue
            without.add(node)
            continue
        if len(nodes) == len(products) or _is_bare(local):
            return _ALONE
        compute_again(known.graph, nodes, stored)
        return Region(frozenset(nodes), part, local, originals)
    return "needs too much to be left out"


def composed(part: fx.Graph) -> Composition | Refusal:
    """Compose a graph, or take what was composed of one alike."""
    nodes, text = [*part.nodes], described(part)
    if text not in _COMPOSED:
        _COMPOSED[text] = nodes, _composed(part, nodes, text)
    known, result = _COMPOSED[text]
    names = dict(zip(known, nodes, strict=True))
    if isinstance(result, Composition):
        return renamed(result, names)
    node = None if result.node is None else names.get(result.node)
    return Refusal(result.message, result.hint, node, result.output)


def _composed(part: fx.Graph, nodes: Sequence[fx.Node], text: str) -> Composition | Refusal:
    """Compose a graph, through the user's cache where it is kept."""

    def found() -> Composition | tuple[Any, ...]:
        try:
            return in_place(compose_graph(part))
        except Refusal as refusal:
            return refusal.message, refusal.hint, refusal.node, refusal.output

    known = kept(path_of("composition", text), found, nodes) if _is_kept(nodes) else found()
    return known if isinstance(known, Composition) else Refusal(*known)


def _is_kept(nodes: Sequence[fx.Node]) -> bool:
    """Whether all values are on a GPU, and of no symbolic sizes."""
    values = [x for x in (node.meta.get("val") for node in nodes) if isinstance(x, torch.Tensor)]
    return {x.device.type for x in values} == {"cuda"}


_COMPOSED: dict[str, tuple[list[fx.Node], Composition | Refusal]] = {}


def _is_bare(composition: Composition) -> bool:
    """Whether its program only multiplies."""
    return all(expr.op == "acc" for expr in composition.rewritten.values.values())


def _grown(
    known: Cut, products: Sequence[fx.Node], without: set[fx.Node], *, stored: bool
) -> set[fx.Node]:
    """Grow products by what is computed with them before the next product."""
    taken = known.taken
    nodes, needing, first = set(products), set(products), min(products)
    outside = set[fx.Node]()  # of those that need the products
    pending = sorted({user for node in products for user in node.users})
    near = {node for node in pending if alike(node, first)}  # they read what the region has
    while near:
        node = heapq.heappop(pending)
        near.discard(node)
        if node in needing:  # it is a product, or was met before
            continue
        needing.add(node)
        if (
            node.op == "call_function"
            and alike(node, first)
            and node not in without
            and node not in known.compared
            and node not in taken
            and node.target not in PRODUCTS
            and isinstance(node.meta.get("val"), torch.Tensor)
            and not counts(node)
            and is_held(node)
            and outside.isdisjoint(node.all_input_nodes)
            and not _through(node, taken, needing, first)
            and len(nodes) < _NODES
            and node.meta.get(SUM, products[0]) in nodes
        ):
            nodes.add(node)
            near.update(user for user in node.users if alike(user, first))
        else:
            outside.add(node)
        for user in node.users:
            heapq.heappush(pending, user)
    others = {*taken, *needing, *without}
    return nodes | read_along(known.graph, nodes, others, stored=stored)


def _through(
    node: fx.Node, taken: Mapping[fx.Node, Region], needing: set[fx.Node], first: fx.Node
) -> bool:
    """Whether a node reads of a region that needs these products itself."""
    read = {taken[x] for x in node.all_input_nodes if x in taken}
    return any(needing.intersection(ancestors(region.inputs, first)) for region in read)


def extracted(
    known: Cut, nodes: set[fx.Node], outputs: set[fx.Node]
) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Copy some nodes into a graph; map its nodes to the whole's."""
    part, copies = fx.Graph(known.graph.owning_module), dict[fx.Node, fx.Node]()
    views = _views(nodes, {*known.taken})
    inside = sorted({*nodes, *views})
    for node in dict.fromkeys(x for user in inside for x in user.all_input_nodes):
        if node not in nodes and node not in views:
            copies[node] = part.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    for node in inside:
        copies[node] = part.node_copy(node, copies.__getitem__)
        lay_out_anew(copies[node])
    part.output([copies[node] for node in inside if node in outputs])
    return part, {copy: node for node, copy in copies.items()}


def _views(nodes: set[fx.Node], taken: set[fx.Node]) -> set[fx.Node]:
    """Find views that these nodes read, which a kernel reads through."""
    read: Callable[[fx.Node], list[fx.Node]] = lambda node: [
        x for x in node.all_input_nodes if x.target in VIEWS and x not in nodes and x not in taken
    ]
    return reached([x for node in nodes for x in read(node)], read)


def ports_of(composition: Composition) -> list[Port]:
    """List where a kernel's A, B and operands come from."""
    return [composition.a, composition.b, *composition.operands.values()]


def renamed(composition: Composition, originals: Mapping[fx.Node, fx.Node]) -> Composition:
    """A composition with ports at other nodes."""

    def at(port: Port) -> Port:
        node = None if port.node is None else originals[port.node]
        return replace(port, node=node, parts=tuple(map(at, port.parts)))

    return replace(
        composition,
        a=at(composition.a),
        b=at(composition.b),
        operands={x: at(port) for x, port in composition.operands.items()},
        outputs={x: at(port) for x, port in composition.outputs.items()},
    )


def order(known: Cut) -> Iterator[fx.Node | Region]:
    """Order a graph's nodes, and its regions at their last products.

    What needs more follows that at once.

    Raises:
        RuntimeError: two regions need each other.
    """
    taken = known.taken
    inputs = {region: region.inputs for region in known.regions}
    last = {max(region.products): region for region in known.regions}
    pending: list[fx.Node | Region] = []
    for node in reversed(known.graph.nodes):
        pending += [last[node]] if node in last else [] if node in taken else [node]
    waiting: dict[fx.Node | Region, list[fx.Node | Region]] = {}
    done = set[fx.Node | Region]()
    while pending:
        step = pending.pop()
        reads = inputs[step] if isinstance(step, Region) else step.all_input_nodes
        missing = [x for x in reads if taken.get(x, x) not in done]
        if missing:
            waiting.setdefault(taken.get(missing[-1], missing[-1]), []).append(step)
            continue
        done.add(step)
        yield step
        pending += reversed(waiting.pop(step, ()))
    if waiting:
        raise RuntimeError("two regions need each other")
