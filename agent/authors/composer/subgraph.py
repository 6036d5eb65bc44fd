"""A program of an ATen subgraph: a product and what surrounds it.

- The graph is traced again in the operations that the composer reads (`retrace`). Products of one
  A, and products that are summed, become one (`merge`).
- Dims get their roles by what the graph does with them (`axes`); at small sizes of each role's own
  (`resize`) the rewriter reads it, and another choice of sizes checks what came out (`reading`).
- Outputs that need different products of one A, or columns of one product that are taken apart
  (`apart`), are programs of their own, joined (`join`).
- What no product is needed for, and no program reads, is left outside: the kernel takes its result.
"""

from __future__ import annotations

from collections.abc import Callable

from torch import fx

from coda_agent.agent.authors.composer.apart import is_parted, take_apart
from coda_agent.agent.authors.composer.calls import ancestors, shape_of
from coda_agent.agent.authors.composer.emit import program_of
from coda_agent.agent.authors.composer.join import Composition, joined
from coda_agent.agent.authors.composer.merge import merge, products
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.reading import Reading, Reordered
from coda_agent.agent.authors.composer.retrace import Retraced, retraced
from coda_agent.agent.authors.composer.rounding import of_stored

# Values that may be computed before the kernel, one after the other, until it is refused.
_OUTSIDE = 16


def compose_graph(graph: fx.Graph) -> Composition:
    """Compose the program of an ATen subgraph.

    Args:
        graph: Calls of ATen, each with `meta["val"]`; its placeholders are tensors, its output is
            a list of nodes of which some need a product.

    Raises:
        Refusal: no program computes it; names the node that is the reason.
    """
    traced = retraced(graph)
    if not is_parted(traced):
        return _whole(graph, traced)
    pieces = _pieces(traced) if take_apart(traced) else []
    if len(pieces) < 2:
        return _whole(graph, retraced(graph))
    try:
        return _side_by_side(graph, pieces, take_apart)
    except Refusal as refusal:  # it is of what is looked at more closely
        try:
            return _whole(graph, retraced(graph))
        except Refusal:
            raise refusal from None


def _whole(graph: fx.Graph, traced: Retraced) -> Composition:
    """Compose products as they are."""
    pieces = _pieces(traced)
    if len(pieces) > 1:
        return _side_by_side(graph, pieces)
    summed = _but_longest(traced)
    try:
        return _composed(traced)
    except Refusal:
        if not summed:
            raise
    traced = retraced(graph)
    for node in _but_longest(traced):
        traced.enter(node)
    return _composed(traced)


def _side_by_side(
    graph: fx.Graph, pieces: list[list[str]], change: Callable[[Retraced], object] = bool
) -> Composition:
    """Compose a program for each of several lists of outputs; join them."""
    parts = []
    for piece in pieces:
        traced = retraced(graph)
        change(traced)
        traced.returning([traced.outputs[x] for x in piece])
        parts.append(_composed(traced))
    return joined(parts)


def _but_longest(traced: Retraced) -> list[fx.Node]:
    """All but the longest of products that are summed."""
    every = sorted(products(traced.graph), key=lambda node: shape_of(node.args[0])[-1])
    apart = len({shape_of(node) for node in every}) == 1 and len({id(n.args[0]) for n in every}) > 1
    return every[:-1] if apart and all(map(traced.user, every)) else []


def _pieces(traced: Retraced) -> list[list[str]]:
    """Names of outputs, together where they need the same product, in the products' order."""
    every = products(traced.graph)
    if len({id(node.args[0]) for node in every}) != 1:
        return [[*traced.results]]
    pieces: list[tuple[set[fx.Node], list[str]]] = []
    for name, node in traced.results.items():
        needs, names = ancestors([node]).intersection(every) or {every[0]}, [name]
        apart = []
        for others, known in pieces:
            if needs & others:
                needs, names = needs | others, known + names
            else:
                apart.append((others, known))
        pieces = [*apart, (needs, names)]
    return [names for _, names in sorted(pieces, key=lambda piece: min(piece[0]))]


def _composed(traced: Retraced) -> Composition:
    merged, halves = None, False
    for _ in range(_OUTSIDE):
        reading: Reading | None = None
        try:
            merged = merged or merge(traced)
            reading = Reading(traced, merged, halves=halves)
            rewritten = reading.rewritten()
            ports = reading.ports()
            operands = {x: ports[x] for x in rewritten.operands}
            outputs, extents = reading.outputs(), reading.extents()
            types = {port.name: port.dtype for port in outputs.values()}
            rewritten = of_stored(rewritten, types, reading.reduced(), reading.copies())
            program = program_of(rewritten)
            a, b = ports["A"], ports["B"]
            return Composition(program, a, b, operands, outputs, extents, rewritten)
        except Reordered:
            continue
        except Refusal as error:
            node = error.node
            if reading is not None and node is not None:
                node = reading.original.get(node, node)
            at = None if node is None else traced.origin(node)
            if at is not None and traced.put_outside(at):
                continue
            if reading is not None and reading.paired and not halves:
                halves = True
            else:
                at = traced.outputs.get(error.output, at)
                raise Refusal(error.message, error.hint, at, error.output) from None
    raise Refusal("needs too many values that are computed before the product")
