"""Reverse mode over a program's graph: the paper's Theorem 1.

Each operation's own rule (`Op.derivative`) is linear in the slopes of its arguments. So the rule,
given the gradient of the result in the place of one argument's slope, is that argument's gradient.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from coda_agent.primitives.derivatives import minus, plus, times
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Operand, Value
from coda_agent.primitives.groups import MOVED, ROTATED
from coda_agent.primitives.operation import GROUPS, OPS, PLACED, Op
from coda_agent.primitives.ops import step
from coda_agent.primitives.pairwise import interleave, pairs
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.rounding import ROUNDINGS

_EXTREMA = ("maximum", "minimum")
_ROUNDING = {"floor", "trunc", "round_even", *ROUNDINGS.values()}


def meant(op: str) -> Op:
    """Find an operation with a rule: of PTX, what it means."""
    meaning = op.removeprefix("ptx ").partition(":")[0]
    return OPS[meaning] if meaning in OPS else operation(op)


def recorded(op: str, *args: Any) -> Operand:
    """Record an operation; of a gathered value, which is only stored, nothing."""
    if op == "gather":
        return 0.0
    if op in ("even", "odd"):
        return pairs(args[0])[op == "odd"]
    return meant(op).call(*args)


def dependents(graph: Graph, leaves: Iterable[int]) -> set[int]:
    """Find the nodes that vary with one of `leaves`, themselves included."""
    found = {*leaves}
    for i, node in enumerate(graph.nodes):
        if node.op not in PLACED and found & {*node.args}:
            found.add(i)
    return found


def adjoints(
    graph: Graph,
    values: Sequence[Operand],
    seeds: Mapping[int, Operand],
    leaves: Iterable[int],
) -> dict[int, Operand]:
    """Record the gradient of each node from `leaves` to the outputs.

    Args:
        values: Its nodes in the graph that the gradients are recorded in.
        seeds: Gradients of some nodes, recorded there.

    Raises:
        ProgramError: an operation on the way has no derivative; says which.
    """
    wanted = dependents(graph, leaves)
    found: dict[int, Operand] = dict(seeds)
    halves: dict[int, list[Operand]] = {}

    def add(i: int, gradient: Operand) -> None:
        if i in wanted:
            found[i] = plus(found.get(i, 0.0), gradient)

    for i in reversed(range(len(graph.nodes))):
        if i in halves and i in wanted:
            add(i, interleave(*halves[i]))
        gradient, node = found.get(i, 0.0), graph.nodes[i]
        if i not in wanted or not (isinstance(gradient, Value) or gradient):
            continue
        name, args = node.op.split(" ")[0], node.args
        if name in ("even", "odd"):
            sides = halves.setdefault(args[0], [0.0, 0.0])
            side = ("even", "odd").index(name)
            sides[side] = plus(sides[side], gradient)
        elif name == "interleave":
            assert isinstance(gradient, Value)
            for arg, part in zip(args, pairs(gradient), strict=True):
                add(arg, part)
        elif node.op in GROUPS:
            add(args[0], _of_group(name, node.op, gradient))
        elif args and node.op not in PLACED:
            for arg, part in _of_arguments(
                node, values[i], [values[a] for a in args], gradient, wanted
            ):
                add(arg, part)
    return found


def _of_arguments(
    node: Node, z: Operand, given: list[Operand], gradient: Operand, wanted: set[int]
) -> Iterator[tuple[int, Operand]]:
    """Record the gradients of an operation's arguments; `z` is its value."""
    name, args = node.op.split(" ")[0], node.args
    rule = meant(node.op).derivative
    if rule is None or node.op in _ROUNDING or name.startswith("stochastic"):
        raise ProgramError(
            f"{name} has no derivative"
            if rule is None
            else f"{name} is a rounding, whose derivative is 0 wherever it has one",
            hint="keep it out of what needs a gradient",
        )
    if node.op in _EXTREMA and args[0] != args[1] and wanted.issuperset(args):
        # By the rule neither would be the larger of two that are equal.
        x, y = given if node.op == "maximum" else given[::-1]
        first = times(step(minus(x, y)), gradient)
        yield from zip(args, (first, minus(gradient, first)), strict=True)
        return
    if node.op in _EXTREMA and 0.0 in [x for x in given if not isinstance(x, Value)]:
        # Beside 0 the result tells as well which it is, where that is stored: no rounding makes it
        # 0, as one may make it another bound.
        if isinstance(z, Value) and z.graph.nodes[z.index].op == "operand":
            given = [z if isinstance(x, Value) else x for x in given]
    for k, arg in enumerate(args):
        if arg in wanted and not (node.op == "where" and k == 0):
            yield arg, rule(z, *given, *[gradient if j == k else 0.0 for j in range(len(args))])


def _of_group(name: str, op: str, gradient: Operand) -> Operand:
    if name not in ("group_sum", *MOVED):
        raise ProgramError(
            f"{name} has no derivative here: its gradient goes to the one place that has it",
            hint="keep it out of what needs a gradient",
        )
    found = operation(op).call(gradient)
    return -found if name == ROTATED else found
