"""The epilogue graph: what a program computes, as data.

- A program's expressions are evaluated once, on `Value`s; each operation appends one `Node`. Equal
  nodes are shared.
- Nodes are stored in topological order, so every reading is a single loop.
- Every value has a `Shape`: how it varies over the (M, N) output tile. Shapes are joined like
  broadcasting, and full-width and half-width values never mix silently.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from enum import Enum
from typing import Any, NoReturn

from coda_agent.primitives.errors import ProgramError


class Shape(Enum):
    """How a value varies over the output: with M, N, N/2."""

    SCALAR = "()"
    COL = "(M, 1)"
    ROW = "(1, N)"
    TILE = "(M, N)"
    HALF_ROW = "(1, N/2)"
    HALF = "(M, N/2)"
    WIDE = "(M, 2N)"
    INDEX = "(M,) integers"
    GATHERED = "(M,)"

    @property
    def half_width(self) -> bool:
        return self in (Shape.HALF_ROW, Shape.HALF)

    @property
    def full_width(self) -> bool:
        return self in (Shape.ROW, Shape.TILE)


def join(shapes: list[Shape], op: str) -> Shape:
    """Join `shapes` as broadcasting does.

    Raises:
        ProgramError: a full-width value meets a half-width one, or an index, a gathered or a
            double-width value is computed with.
    """
    if Shape.WIDE in shapes:
        raise ProgramError(
            f"{op} cannot compute with a double-width value",
            hint="take it apart with pairs() into two full-width ones",
        )
    if Shape.INDEX in shapes or Shape.GATHERED in shapes:
        raise ProgramError(
            f"{op} cannot compute with an index or a gathered value",
            hint="an index goes into gather(), and what that gives into a RowGather output",
        )
    half = any(s.half_width for s in shapes)
    if half and any(s.full_width for s in shapes):
        raise ProgramError(
            f"{op} mixes a full-width value with a half-width one",
            hint="take both apart with pairs(), or join halves with interleave()",
        )
    rows = any(s in (Shape.COL, Shape.TILE, Shape.HALF) for s in shapes)
    cols = half or any(s.full_width for s in shapes)
    if rows and cols:
        return Shape.HALF if half else Shape.TILE
    if cols:
        return Shape.HALF_ROW if half else Shape.ROW
    return Shape.COL if rows else Shape.SCALAR


@dataclass(frozen=True, slots=True)
class Node:
    """One value of the graph.

    `op` is an operation's name, or that of a leaf, without `args`: "acc" (the fp32 accumulator),
    "operand" (`name`) and "const" (`value`).
    """

    op: str
    args: tuple[int, ...]
    shape: Shape
    name: str = ""
    value: float = 0.0


@dataclass
class Graph:
    """Nodes in topological order and the outputs' node numbers."""

    nodes: list[Node] = field(default_factory=list)
    outputs: dict[str, int] = field(default_factory=dict)
    _index: dict[Node, int] = field(default_factory=dict, repr=False)

    def add(self, node: Node) -> Value:
        """Append `node`, or find the equal one already there."""
        if node not in self._index:
            self._index[node] = len(self.nodes)
            self.nodes.append(node)
        return Value(self, self._index[node])

    def const(self, value: float) -> Value:
        return self.add(Node("const", (), Shape.SCALAR, value=float(value)))

    def replay(
        self,
        acc: object,
        operands: Mapping[str, object],
        apply: Callable[..., object],
        known: Mapping[int, object] | None = None,
        number: Callable[[float], object] = lambda x: x,
    ) -> list[Any]:
        """Compute every node, in the caller's kind of value.

        Operations mean `apply(op, *arguments)`, constants `number(value)`; `known` are values of
        some nodes.
        """
        values: list[Any] = []
        for i, n in enumerate(self.nodes):
            match n.op:
                case _ if known and i in known:
                    value = known[i]
                case "acc":
                    value = acc
                case "operand":
                    value = operands[n.name]
                case "const":
                    value = number(n.value)
                case op:
                    value = apply(op, *(values[a] for a in n.args))
            values.append(value)
        return values

    def prune(self) -> Graph:
        """Leave out nodes that no output depends on."""
        live: set[int] = set(self.outputs.values())
        for i in reversed(range(len(self.nodes))):
            if i in live:
                live.update(self.nodes[i].args)
        kept = sorted(live)
        renumber = {old: new for new, old in enumerate(kept)}
        pruned = Graph()
        for old in kept:
            n = self.nodes[old]
            pruned.add(Node(n.op, tuple(renumber[a] for a in n.args), n.shape, n.name, n.value))
        pruned.outputs = {name: renumber[i] for name, i in self.outputs.items()}
        return pruned


class Value:
    """A symbolic value, for the vocabulary and + - * / alone."""

    __slots__ = ("graph", "index")

    def __init__(self, graph: Graph, index: int) -> None:
        self.graph = graph
        self.index = index

    @property
    def shape(self) -> Shape:
        return self.graph.nodes[self.index].shape

    def __add__(self, other: Operand) -> Value:
        return record("add", self, other)

    def __radd__(self, other: Operand) -> Value:
        return record("add", other, self)

    def __sub__(self, other: Operand) -> Value:
        return record("sub", self, other)

    def __rsub__(self, other: Operand) -> Value:
        return record("sub", other, self)

    def __mul__(self, other: Operand) -> Value:
        return record("mul", self, other)

    def __rmul__(self, other: Operand) -> Value:
        return record("mul", other, self)

    def __truediv__(self, other: Operand) -> Value:
        if isinstance(other, (int, float)):
            if other == 0:
                raise ProgramError("division by the constant 0")
            return record("mul", self, 1.0 / other)
        return record("div", self, other)

    def __rtruediv__(self, other: Operand) -> Value:
        return record("div", other, self)

    def __neg__(self) -> Value:
        return record("neg", self)

    def __pow__(self, _: object) -> NoReturn:
        raise ProgramError("** is not in the language", hint="write the product, x * x")

    def _branch(self, *_: object) -> NoReturn:
        raise ProgramError(
            "a program cannot branch on a value: it runs once, for every element",
            hint="use maximum, minimum or clamp",
        )

    __bool__ = __lt__ = __le__ = __gt__ = __ge__ = __eq__ = __ne__ = _branch  # pyright: ignore
    __hash__ = None  # pyright: ignore


Operand = Value | int | float


def record(name: str, *args: Operand) -> Value:
    """Record operation `name` on `args`, one of which is a `Value`.

    Raises:
        ProgramError: an argument is neither a value nor a number, or widths do not match.
    """
    graph = next(a.graph for a in args if isinstance(a, Value))
    values = []
    for a in args:
        if isinstance(a, Value):
            if a.graph is not graph:
                raise ProgramError(f"{name} got a value of another program")
            values.append(a)
        elif isinstance(a, (int, float)) and not isinstance(a, bool):
            values.append(graph.const(a))
        else:
            raise ProgramError(
                f"{name} got {type(a).__name__}, expected a value of the program or a number"
            )
    shape = join([v.shape for v in values], name)
    return graph.add(Node(name, tuple(v.index for v in values), shape))
