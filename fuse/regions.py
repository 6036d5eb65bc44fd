"""An ATen graph cut into regions, each of which one kernel computes.

A region grows from a product, or from all products of one A, along what is computed with it. The
composer is asked for its program; where it refuses, the node that it names is left out with what
needs it, and it is asked again.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace

import torch
from torch import fx

from coda_agent.agent.authors.composer.join import Composition
from coda_agent.agent.authors.composer.ports import Port
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.subgraph import compose_graph

aten = torch.ops.aten
PRODUCTS = (aten.mm.default, aten.addmm.default)
SHORT = (torch.bfloat16, torch.float16, torch.float8_e4m3fn)
"""Element types that kernels multiply."""
VIEWS = (
    aten.t.default, aten.permute.default, aten.transpose.int, aten.view.default,
    aten._unsafe_view.default, aten.unsqueeze.default, aten.detach.default,
)  # fmt: skip
CASTS = (aten._to_copy.default, torch.ops.prims.convert_element_type.default)
_NODES, _ATTEMPTS = 96, 24
"""Nodes of a region at most, and how often the composer is asked for one."""
_ALONE = "nothing follows it that a kernel could take along"


class Circle(Exception):
    """Regions that need each other."""


@dataclass(frozen=True, eq=False)
class Region:
    """What one kernel computes.

    Attributes:
        nodes: Of the graph.
        composition: Its program, with ports at nodes of the graph.
    """

    nodes: frozenset[fx.Node]
    composition: Composition

    @property
    def inputs(self) -> list[fx.Node]:
        """Nodes that the kernel reads, each once."""
        known = self.composition
        ports = (known.a, known.b, *known.operands.values())
        return list(dict.fromkeys(node for port in ports for node in port.nodes))

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
    """

    graph: fx.Graph
    regions: list[Region] = field(default_factory=list)
    why: dict[fx.Node, str] = field(default_factory=dict)


def cut(graph: fx.Graph) -> Cut:
    """Cut a functional ATen graph, each node of which has `meta["val"]`, into regions."""
    result = Cut(graph)
    left = [node for node in graph.nodes if node.target in PRODUCTS]
    while left:
        first = left.pop(0)
        if reason := _unfit(first):
            result.why[first] = reason
            continue
        a = _operands(first)[0]
        same = [node for node in left if _operands(node)[0] is a and not _unfit(node)]
        for products in ([first, *same], [first]) if same else ([first],):
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


def _fits(known: Cut, region: Region) -> bool:
    """Whether a region and those before it do not need each other."""
    try:
        return bool([*order(Cut(known.graph, [*known.regions, region]))])
    except Circle:
        return False


def _operands(product: fx.Node) -> list[fx.Node]:
    """A and B of a product."""
    return [x for x in product.args if isinstance(x, fx.Node)][-2:]


def _unfit(product: fx.Node) -> str:
    """Why no kernel multiplies this; "" where one may."""
    a, b = (node.meta["val"] for node in _operands(product))
    if a.dtype != b.dtype or a.dtype not in SHORT:
        return f"multiplies {a.dtype} with {b.dtype}".replace("torch.", "")
    if min(*a.shape, *b.shape) < 2:
        return "multiplies with a vector"
    return ""


def _region(known: Cut, products: Sequence[fx.Node]) -> Region | str:
    """The region that grows from these products, or why there is none."""
    without = set[fx.Node]()
    for _ in range(_ATTEMPTS):
        nodes = _grown(known, products, without)
        if not nodes.issuperset(products):
            return "needs another product of its own A"
        graph, originals = extracted(known, nodes)
        try:
            composition = compose_graph(graph)
        except Refusal as refusal:
            node = originals.get(refusal.node) if refusal.node else None
            if node is None or node not in nodes or node in products or node in without:
                return refusal.message
            without.add(node)
            continue
        if len(nodes) == len(products) or _is_bare(composition):
            return _ALONE
        return Region(frozenset(nodes), renamed(composition, originals))
    return "needs too much to be left out"


def _is_bare(composition: Composition) -> bool:
    """Whether its program only multiplies."""
    return all(expr.op == "acc" for expr in composition.rewritten.values.values())


def _grown(known: Cut, products: Sequence[fx.Node], without: set[fx.Node]) -> set[fx.Node]:
    """The products with all that is computed with them before another product is."""
    taken = {node: region for region in known.regions for node in region.nodes}
    nodes, needing = set(products), set(products)
    for node in known.graph.nodes:
        if node in nodes or not needing.intersection(node.all_input_nodes):
            continue
        needing.add(node)
        outside = needing.difference(nodes)
        if (
            node.op == "call_function"
            and node not in without
            and node not in taken
            and node.target not in PRODUCTS
            and isinstance(node.meta.get("val"), torch.Tensor)
            and outside.isdisjoint({*node.all_input_nodes} - {node})
            and not _through(node, taken, needing)
            and len(nodes) < _NODES
        ):
            nodes.add(node)
    return nodes | _beside(known, nodes, {*taken, *needing, *without})


def _beside(known: Cut, nodes: set[fx.Node], others: set[fx.Node]) -> set[fx.Node]:
    """What is made of one tile for a region alone, such as a function of a stored gate."""
    whole = max(x.meta["val"].numel() for x in nodes)

    def is_whole(node: fx.Node) -> bool:
        value = node.meta.get("val")
        return isinstance(value, torch.Tensor) and value.numel() == whole

    dropped = set(others)
    while True:
        found = set[fx.Node]()
        for node in reversed([*known.graph.nodes]):
            pointwise = torch.Tag.pointwise in getattr(node.target, "tags", ())
            if node in nodes or node in dropped or not (pointwise or node.target in CASTS):
                continue
            if is_whole(node) and node.users and nodes.union(found).issuperset(node.users):
                found.add(node)
        tiles: dict[fx.Node, set[fx.Node]] = {}
        for node in known.graph.nodes:
            if node in found:
                read = [x for x in node.all_input_nodes if is_whole(x)]
                tiles[node] = {tile for x in read for tile in tiles.get(x, {x})}
        several = {node for node, read in tiles.items() if len(read) != 1}
        if not several:
            return found
        dropped |= several


def _through(node: fx.Node, taken: Mapping[fx.Node, Region], needing: set[fx.Node]) -> bool:
    """Whether a node reads of a region that needs these products itself."""
    read = {taken[x] for x in node.all_input_nodes if x in taken}
    return any(needing.intersection(_ancestors(region.inputs)) for region in read)


def _ancestors(nodes: Iterable[fx.Node]) -> set[fx.Node]:
    seen, pending = set[fx.Node](), [*nodes]
    while pending:
        if (node := pending.pop()) not in seen:
            seen.add(node)
            pending += node.all_input_nodes
    return seen


def extracted(known: Cut, nodes: set[fx.Node]) -> tuple[fx.Graph, dict[fx.Node, fx.Node]]:
    """Some nodes of a graph as one by itself, and what its nodes are in the whole."""
    graph, taken = known.graph, {node for region in known.regions for node in region.nodes}
    part, copies = fx.Graph(graph.owning_module), dict[fx.Node, fx.Node]()
    views = _views(nodes, taken)
    inside = [node for node in graph.nodes if node in nodes or node in views]
    for node in dict.fromkeys(x for user in inside for x in user.all_input_nodes):
        if node not in nodes and node not in views:
            copies[node] = part.placeholder(node.name)
            copies[node].meta = dict(node.meta)
    for node in inside:
        copies[node] = part.node_copy(node, copies.__getitem__)
    used = [node for node in inside if node in nodes and {*node.users} - nodes]
    part.output([copies[node] for node in used])
    return part, {copy: node for node, copy in copies.items()}


def _views(nodes: set[fx.Node], taken: set[fx.Node]) -> set[fx.Node]:
    """Views that these nodes read: a kernel reads what they are views of."""
    views, pending = set[fx.Node](), [x for node in nodes for x in node.all_input_nodes]
    while pending:
        node = pending.pop()
        if node.target in VIEWS and node not in {*nodes, *views, *taken}:
            views.add(node)
            pending += node.all_input_nodes
    return views


def renamed(composition: Composition, originals: dict[fx.Node, fx.Node]) -> Composition:
    """A composition with ports at the original nodes."""

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
    """Nodes and regions, each after what it reads.

    Raises:
        Circle: two regions need each other.
    """
    taken = {node: region for region in known.regions for node in region.nodes}
    inputs = {region: region.inputs for region in known.regions}
    done, open_steps = set[fx.Node | Region](), set[fx.Node | Region]()

    def step_of(node: fx.Node) -> fx.Node | Region:
        return taken.get(node, node)  # pyright: ignore[reportReturnType, reportArgumentType]

    for last in known.graph.nodes:
        stack: list[tuple[fx.Node | Region, bool]] = [(step_of(last), False)]
        while stack:
            step, ready = stack.pop()
            if ready:
                done.add(step)
                open_steps.discard(step)
                yield step
            elif step in open_steps:
                raise Circle
            elif step not in done:
                open_steps.add(step)
                stack.append((step, True))
                reads = inputs[step] if isinstance(step, Region) else step.all_input_nodes
                stack += [(x, False) for x in map(step_of, reads) if x not in done]
