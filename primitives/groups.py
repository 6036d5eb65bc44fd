"""Statistics over groups of adjacent columns, which flow back into the tile.

A group lies in one tile and one warp, so a kernel has its statistic before it stores anything: it
visits the accumulator once for the statistics and once for the outputs.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import TYPE_CHECKING

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Shape, Value
from coda_agent.primitives.kinds import FLOATS, Lowering, Operand, Output
from coda_agent.primitives.operation import GROUPS, PLACED, Degree, Op, kept, nonlinear, untraced
from coda_agent.primitives.tables import Table

if TYPE_CHECKING:
    from quack.epilogue.ops import EpiOp

__all__ = ["GroupTile4", "GroupTile8", "GroupTile16", "GroupTile32", "GroupTile64", "GroupTile128"]
__all__ += ["exchange", "group_max", "group_mean", "group_min", "group_sum", "rotate_half"]

WIDTHS = (4, 8, 16, 32, 64, 128)
ROTATED, EXCHANGED = "rotate_half", "exchange"
MOVED = (ROTATED, EXCHANGED)
"""What moves a group's columns, and folds none."""
_ALLOWED = {EXCHANGED: (1, 2, 4, 8, 16, 32, 64), ROTATED: (2, *WIDTHS)}


def group_sum(x: Value, width: int) -> Value:
    """The sum of each group of `width` adjacent columns of x (M, N), in each column of the group.

    `width` is 4, 8, 16, 32, 64 or 128 and divides N; of a half-width x at most 64. x is made of the
    accumulator, vectors and numbers: tiles arrive too late. Cost: x is computed twice, and each
    thread folds its columns and exchanges two words a group.

        return {"O": acc / group_sum(exp(acc), 64)}
    """
    return _recorded("sum", x, width)


def group_mean(x: Value, width: int) -> Value:
    """The mean of each group of `width` adjacent columns; see `group_sum`.

    Use it for GroupNorm, and for the RMS norms of queries and keys, a head being a group.

        return {"O": acc * rsqrt(group_mean(acc * acc, 64) + 1e-6)}
    """
    return _recorded("sum", x, width) * (1.0 / width)


def group_max(x: Value, width: int) -> Value:
    """The maximum of each group of `width` adjacent columns; see `group_sum`. NaN stays NaN.

    Use it for the scales of quantisation in blocks of 1 x 128, and for a softmax over a group.

        return {"O": acc * (448.0 / group_max(absolute(acc), 128))}
    """
    return _recorded("max", x, width)


def group_min(x: Value, width: int) -> Value:
    """The minimum of each group of `width` adjacent columns; see `group_max`.

    return {"O": acc - group_min(acc, 32)}
    """
    return _recorded("min", x, width)


def rotate_half(x: Value, width: int) -> Value:
    """Each group of `width` adjacent columns of x (M, N) with its halves exchanged, and what comes
    to stand first negated: (-second, first).

    `width` and x are as for `group_sum`, or `width` is 2, and x may need tables too, but no tile.
    Use it for rotary embedding whose pairs are columns j and j + width / 2 of each head, as Hugging
    Face has them; the weight stays as it is. Cost: the sign, since a thread holds both columns; up
    to a width of 8 a word from another thread.

        @epilogue(O=Tile)
        def rope(acc, c: PositionTable, s: PositionTable):
            return {"O": acc * c + rotate_half(acc, 64) * s}
    """
    if isinstance(x, Value) and x.shape is Shape.HALF:
        raise ProgramError("rotate_half() takes a value (M, N)")
    return _recorded(ROTATED, x, width)


def exchange(x: Value, distance: int) -> Value:
    """In each column j of x (M, N) the value of column j XOR `distance`.

    `distance` is 1, 2, 4, 8, 16, 32 or 64, and twice that divides N; of a half-width x at most 32.
    x is as for `rotate_half`. Use it for transforms by butterflies, as Hadamard's, and for what
    compares the columns of a small group. Cost: nothing from 8 on and at 1, since a thread holds
    both columns; else a word from another thread.

        y = exchange(acc + rotate_half(acc, 2), 1)  # sums in even columns, differences in odd ones
    """
    return _recorded(EXCHANGED, x, distance)


def _recorded(which: str, x: Value, width: int) -> Value:
    word, allowed = "distance" if which == EXCHANGED else "width", _ALLOWED.get(which, WIDTHS)
    if width not in allowed:
        raise ProgramError(f"{_named(which)}(): {word} is {width!r}, expected one of {allowed}")
    if not isinstance(x, Value) or x.shape not in (Shape.TILE, Shape.HALF):
        raise ProgramError(f"{_named(which)}() takes a value (M, N) or (M, N/2)")
    op = f"{_named(which)} {width}"
    if x.shape is Shape.HALF and (columns := 2 * _span(op)) > 128:
        raise ProgramError(
            f"{_named(which)}(): {columns // 2} columns of half width are {columns} of the "
            "accumulator, expected at most 128"
        )
    return x.graph.add(Node(op, (x.index,), x.shape))


def _named(which: str) -> str:
    return which if which in MOVED else f"group_{which}"


def _span(op: str) -> int:
    """Count the columns of an operation's group."""
    name, number = op.split()
    return int(number) * (2 if name == EXCHANGED else 1)


def folded(which: str, x: torch.Tensor, width: int) -> torch.Tensor:
    """Compute the meaning in torch."""
    if which == EXCHANGED:
        return x.unflatten(-1, (-1, 2, width)).flip(-2).flatten(-3)
    groups = x.unflatten(-1, (-1, width))
    if which == ROTATED:
        return torch.cat([-groups[..., width // 2 :], groups[..., : width // 2]], -1).flatten(-2)
    found = {"sum": groups.sum, "max": groups.amax, "min": groups.amin}[which](-1, keepdim=True)
    return found.expand_as(groups).flatten(-2)


for _which in ("sum", "max", "min", *MOVED):
    for _width in _ALLOWED.get(_which, WIDTHS):
        _name = f"{_named(_which)} {_width}"
        GROUPS[_name] = Op(
            _name,
            partial(folded, _which, width=_width),
            untraced,
            arity=1,
            call=partial(_recorded, _which, width=_width),
            edge=kept,
            degree=(lambda x: Degree(x)) if _which in ("sum", *MOVED) else nonlinear,
        )


def spans(graph: Graph) -> dict[int, int]:
    """Count the accumulator's columns in each statistic's group, by its node."""
    found = {}
    for i, node in enumerate(graph.nodes):
        if node.op in GROUPS:
            found[i] = _span(node.op) * (2 if node.shape is Shape.HALF else 1)
    return found


def statistics(graph: Graph) -> Graph:
    """Cut out what statistics need: outputs that are named by their nodes."""
    below = Graph(graph.nodes, {str(i): i for i in spans(graph)})
    return below.prune()


def check(graph: Graph, operands: Mapping[str, type[Operand]], wide: bool) -> None:
    """Refuse a statistic of what a kernel does not have in time."""
    found = spans(graph)
    if wide and any(n.op in (*GROUPS, *PLACED) for n in graph.nodes):
        raise ProgramError("a program with a WideTile has no statistics of groups and no places")
    for node in statistics(graph).nodes if found else ():
        late = node.shape in (Shape.TILE, Shape.INDEX)
        if node.op == "operand" and late and not issubclass(operands[node.name], Table):
            raise ProgramError(
                f"a group's statistic needs {node.name!r}, a {operands[node.name].__name__}, which "
                "is loaded after it",
                hint="take it of the accumulator, vectors, tables and numbers alone",
            )
        if node.op in PLACED:
            raise ProgramError(f"a group's statistic cannot take {node.op}() in")


class GroupTile(Output):
    """An output (M, N / width): one element a group of columns."""

    values = (Shape.TILE,)
    stored = FLOATS
    element_bytes = 4
    width = 0

    @classmethod
    def taken(cls, value: torch.Tensor) -> torch.Tensor:
        # Of one row and one group, `contiguous` would leave the strides that are not.
        return value[:, :: cls.width].clone(memory_format=torch.contiguous_format)

    @classmethod
    def store(cls, lowering: Lowering, o: str) -> EpiOp:
        from coda_agent.primitives.group_store import GroupStore

        return GroupStore(lowering.names[o], cls.width)


_DOC = """An output (M, N/{0}): the value in the first of each {0} adjacent columns.

Of float32 or 16 bits; costs 4·M·N/{0} bytes in float32. Use it for what a `group_max` or
`group_mean` of that width gave.

    @epilogue(D=Tile, s=GroupTile{0})
    def amax(acc):
        return {{"D": acc, "s": group_max(absolute(acc), {0})}}
"""


def _kind(width: int) -> type[GroupTile]:
    facts = {"width": width, "dims": ("M", f"N/{width}"), "__doc__": _DOC.format(width)}
    return type(f"GroupTile{width}", (GroupTile,), {**facts, "__module__": __name__})


GROUP_TILES = tuple(map(_kind, WIDTHS))
GroupTile4, GroupTile8, GroupTile16, GroupTile32, GroupTile64, GroupTile128 = GROUP_TILES
