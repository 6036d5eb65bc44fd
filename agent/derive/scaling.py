"""Rows that are scaled before all else, where a program scales what it takes out of them."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

from coda_agent.primitives.adjoint import recorded
from coda_agent.primitives.graph import Graph, Shape
from coda_agent.primitives.program import Program


def scaled_first(program: Program) -> Program:
    """An equal program. Where each column of a pair is used times one vector alone, the product is
    scaled by it before pairs are taken: that is one tile, which a forward kernel stores and a
    backward one reads, and the scale can be left to the next product (paper, kernels 6 and 10)."""
    for i, node in enumerate(program.graph.nodes):
        if node.op == "operand" and node.shape is Shape.COL:
            if graph := _scaled(program.graph, i):
                return replace(program, graph=graph)
    return program


def _scaled(old: Graph, scale: int) -> Graph | None:
    """`old` with the product scaled by node `scale`; None where an unscaled column is used."""
    acc = next(i for i, n in enumerate(old.nodes) if n.op == "acc")
    sides = {i for i, n in enumerate(old.nodes) if acc in n.args}
    uses = Counter([a for n in old.nodes for a in n.args] + [*old.outputs.values()])
    users = {old.nodes[i].op for i in sides}
    if not sides or users - {"even", "odd"} or any(n.op == "gather" for n in old.nodes):
        return None
    inner = {
        a for n in old.nodes if n.op == "mul" for a in n.args
        if old.nodes[a].op == "mul" and uses[a] == 1
    }  # fmt: skip
    new = Graph()
    made: dict[int, Any] = {
        i: n.value if n.op == "const" else new.add(n) for i, n in enumerate(old.nodes) if not n.args
    }
    tile = recorded("mul", made[acc], made[scale])

    def factors(i: int) -> list[int]:
        return [f for a in old.nodes[i].args for f in (factors(a) if a in inner else [a])]

    def without(i: int, left: list[int]) -> Any:
        """A product, and None for the scales in `left`."""
        if i in left:
            return left.remove(i)
        if i not in inner and i in made:
            return made[i]
        sides = [x for a in old.nodes[i].args if (x := without(a, left)) is not None]
        return recorded("mul", *sides) if len(sides) == 2 else sides[0] if sides else None

    for i, node in enumerate(old.nodes):
        if i in sides:
            made[i] = recorded(node.op, tile)
        elif node.op == "mul" and i not in inner:
            found = factors(i)
            scales = [scale] * sum(f in sides for f in found)
            if found.count(scale) < len(scales):
                return None
            made[i] = without(i, scales)
        elif node.args and i not in inner:
            if sides.intersection(node.args):
                return None
            made[i] = recorded(node.op, *(made[a] for a in node.args))
    if sides.intersection(old.outputs.values()):
        return None
    new.outputs = {o: made[i].index for o, i in old.outputs.items()}
    return new.prune()
