"""What a region makes again of what it reads, to read less.

- A tile that is made pointwise of others is made in the kernel, where those are fewer bytes, or are
  read already: a gradient reads the stored gate, not its float32 sigmoid. So is one that is made of
  numbers of rows and columns, such as which column a row's label names.
- What is made of a region's tiles alone, and a product reads, is stored along: those tiles are read
  once.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Mapping

from torch import fx

from coda_agent.agent.authors.composer.calls import ancestors, reached
from coda_agent.fuse.nodes import (
    PRODUCTS,
    VIEWS,
    alike,
    bytes_of,
    copied,
    is_pointwise,
    is_repeated,
    numel,
    operands,
    root,
)  # fmt: skip

Tiles = dict[fx.Node, frozenset[fx.Node]]


def read_along(
    graph: fx.Graph, nodes: set[fx.Node], others: set[fx.Node], *, stored: bool
) -> set[fx.Node]:
    """Choose what a region makes of the tiles that it reads.

    Args:
        graph: It.
        nodes: Those that need the region's products.
        others: Nodes that it may not have.
        stored: Whether it stores along what other products read.

    Returns:
        Nodes to be added to it; of what others need too, copies.
    """
    whole = max(map(numel, nodes))
    # A square product's own operands have the result's extent, and are no tiles of its epilogue.
    own = {x for n in nodes if n.target in PRODUCTS for x in operands(n)}
    others = others | nodes | own | {root(x) for x in own}
    read = {x for n in nodes for x in n.all_input_nodes if x not in nodes and numel(x) == whole}
    reads, made = {root(x) for x in read}, set[fx.Node]()
    tiles = _tiles(read | reads, others, whole)
    for group in dict.fromkeys(tiles[x] for x in sorted(reads) if x in tiles):
        within = {x for x in reads if x in tiles and tiles[x] <= group}
        changed = (reads - within) | group
        alone = len(group) == 1 and _is_private(_closure(within, tiles), nodes | made)
        if bytes_of(changed) < bytes_of(reads) or alone:
            made |= _closure((x for x in read if root(x) in within), tiles)
            reads = changed
    kept = set[fx.Node]()
    if stored:
        first = min(nodes)
        along = _made_of(reads, others, whole)
        if kept := {x for x in along if alike(x, first) and _is_operand(x)}:
            kept -= ancestors((x for node in nodes for x in node.all_input_nodes), min(kept))
        tiles |= dict.fromkeys(along, frozenset())
    return _taken(graph, _closure(made | kept, tiles), kept, nodes)


def _tiles(nodes: Iterable[fx.Node], others: set[fx.Node], whole: int) -> Tiles:
    """Find tiles of which nodes of a region's extent are made pointwise."""
    found, pending = dict[fx.Node, list[fx.Node]](), [*nodes]
    while pending:
        node = pending.pop()
        if node not in found and (read := _whole(node, others, whole)) is not None:
            found[node] = [root(x) for x in read]
            pending += *read, *found[node]
    tiles: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in sorted(found):
        tiles[node] = frozenset().union(*(tiles.get(x, {x}) for x in found[node]))
    return tiles


def _whole(node: fx.Node, others: set[fx.Node], whole: int) -> list[fx.Node] | None:
    """List what a pointwise node reads of its extent; None of others."""
    if node in others or numel(node) != whole or not (is_pointwise(node) or is_repeated(node)):
        return None
    return [x for x in node.all_input_nodes if numel(x) == whole]


def _made_of(reads: set[fx.Node], others: set[fx.Node], whole: int) -> set[fx.Node]:
    """Find nodes of a region's extent made pointwise of tiles alone."""
    made, known = set[fx.Node](), set(reads)
    pending = sorted({user for node in reads for user in node.users})
    while pending:
        node = heapq.heappop(pending)
        read = None if node in made else _whole(node, others, whole)
        if read and known.issuperset(map(root, read)):
            made.add(node)
            known.add(node)
            for user in node.users:
                heapq.heappush(pending, user)
    return made


def _closure(made: Iterable[fx.Node], tiles: Mapping[fx.Node, object]) -> set[fx.Node]:
    """Nodes with all that they are made of, but tiles."""
    made = [node for node in made if node in tiles]
    return reached(made, lambda node: [x for x in node.all_input_nodes if x in tiles])


def _is_private(made: set[fx.Node], nodes: set[fx.Node]) -> bool:
    """Whether a region alone needs some nodes, through views or not."""
    users = (user for node in made for user in node.users)
    through = reached(users, lambda x: x.users if x.target in VIEWS and x not in nodes else ())
    return all(x.target in VIEWS or x in nodes or x in made for x in through)


def _is_operand(node: fx.Node) -> bool:
    """Whether products of its pass read a node, itself no view."""
    starts = [node] if node.target not in VIEWS else []
    views = reached(starts, lambda x: [user for user in x.users if user.target in VIEWS])
    return any(u.target in PRODUCTS and alike(u, node) for x in views for u in x.users)


def _taken(
    graph: fx.Graph, made: set[fx.Node], kept: set[fx.Node], nodes: set[fx.Node]
) -> set[fx.Node]:
    """Take nodes that a region alone needs, and copies of the others."""
    like, inside, copies = min(nodes), {*nodes, *made}, dict[fx.Node, fx.Node]()
    ordered = sorted(made)
    for node in reversed(ordered):
        if node not in kept and not inside.issuperset(node.users):
            inside.discard(node)
    for node in ordered:
        if node in inside:
            continue
        with graph.inserting_after(node):
            copy = copies[node] = copied(graph, node, copies, like=like)
        node.replace_all_uses_with(copy, delete_user_cb=inside.__contains__)
    return {copies.get(node, node) for node in made}
