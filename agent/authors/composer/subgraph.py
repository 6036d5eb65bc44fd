"""A program of an ATen subgraph: the kernel of one product and of what is computed around it.

- The graph is traced again in the operations that the composer reads (`retrace`).
- Dims get their roles by what the graph does with them (`axes`); at small sizes of each role's own
  (`resize`) the rewriter reads it, and another choice of sizes checks what came out.
- What no product is needed for, and no program reads, is left outside: the kernel takes its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from operator import itemgetter
from typing import Any

import torch
from torch import fx

from coda_agent import primitives
from coda_agent.agent.authors.composer.assemble import assemble
from coda_agent.agent.authors.composer.axes import (
    PRODUCTS,
    Axes,
    Axis,
    Unread,
    leaves,
    name_of,
    shape_of,
)
from coda_agent.agent.authors.composer.check import check_numbers
from coda_agent.agent.authors.composer.ports import Port, Stand, entering, leaving, ordered
from coda_agent.agent.authors.composer.problem import Problem, Slot, View
from coda_agent.agent.authors.composer.resize import Roles, Unfit, resized, small_sizes
from coda_agent.agent.authors.composer.retrace import Retraced, retraced
from coda_agent.agent.authors.composer.rewrite import Refusal, rewrite
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import WideTile

_SCALES = ("mul", "div", "neg")
_PLAIN_VIEWS = frozenset(
    """
    alias clone contiguous detach permute reshape _reshape_alias squeeze t transpose _unsafe_view
    unsqueeze view
    """.split()  # noqa: SIM905
)
_CASTS = ("_to_copy", "convert_element_type")
# Values that may be computed before the kernel, one after the other, until it is refused.
_OUTSIDE = 16


@dataclass(frozen=True)
class Composition:
    """A subgraph as a kernel.

    Attributes:
        program: What the kernel computes.
        a: Where A (M, K) comes from.
        b: Where B (N, K) comes from.
        operands: Where the program's operands come from.
        outputs: Where its outputs go, in the order of the graph's.
        extents: M, N and K of the call.
    """

    program: Program
    a: Port
    b: Port
    operands: Mapping[str, Port]
    outputs: Mapping[str, Port]
    extents: Mapping[str, int]


def compose_graph(graph: fx.Graph, *, name: str = "kernel") -> Composition:
    """Compose the program of an ATen subgraph.

    Args:
        graph: Calls of ATen, each with `meta["val"]`; its placeholders are tensors, its output is
            a list of nodes that need the product.
        name: Of the program.

    Raises:
        Refusal: no program computes it; names the node that is the reason.
    """
    traced = retraced(graph)
    for _ in range(_OUTSIDE):
        reading = None
        try:
            reading = _Reading(traced, name)
            return reading.composition()
        except (Unread, Unfit, Refusal) as error:
            node, output = error.node, getattr(error, "output", "")
            if reading is not None and node is not None:
                node = reading.original.get(node, node)
            at = None if node is None else traced.origin(node)
            if at is None or not traced.put_outside(at):
                at = traced.outputs.get(output, at)
                raise Refusal(error.message, error.hint, at, output) from None
    raise Refusal("needs too many values that are computed before the product")


def _product(graph: fx.Graph) -> fx.Node:
    """The one product of a graph.

    Raises:
        Refusal: there is none, or there are several.
    """
    first, *others = [n for n in graph.nodes if name_of(n) in PRODUCTS] or [None]
    if first is None:
        raise Refusal("has no product of two matrices")
    if others:
        raise Refusal("is a second GEMM; a kernel has one", "make a kernel of each", others[0])
    return first


class _Reading:
    """One attempt at a traced graph.

    Attributes:
        original: The traced nodes of those at small sizes.
    """

    def __init__(self, traced: Retraced, name: str) -> None:
        self.traced, self.name = traced, name
        self.original: dict[fx.Node, fx.Node] = {}
        product = _product(traced.graph)
        self.axes = Axes(traced.graph)
        for side in (0, 1):
            self._enter(product, side)
        self.axes = Axes(traced.graph)
        (*batch, rows, columns), inner = self.axes.of(product), self._inner(product)
        if any(batch):
            raise Refusal("is a batch of products", "make a kernel of each", product)
        columns, self.halves = ordered(columns)
        self.roles = Roles(rows, columns, inner)
        every = [*rows, *columns, *inner]
        if len({*every}) < len(every) or not (rows and columns and inner):
            raise Refusal("has rows, columns and summed elements that are alike", "", product)
        self.product = product
        self.a, self.b = (self._source(product, side) for side in (0, 1))
        places = [n for n in traced.graph.nodes if n.op == "placeholder"]
        self.stands = {node: self._stand(node) for node in places}
        self.leaving = {x: leaving(self.axes.of(n), self.roles) for x, n in traced.results.items()}

    def _inner(self, product: fx.Node) -> list[Axis]:
        first: Any = product.args[0]
        return self.axes.of(first)[-1]

    def _enter(self, product: fx.Node, side: int) -> None:
        """Let the operand of a product enter the graph where nothing but views, casts and scales
        lies between the two."""
        wanted = {a for dim in self._sides(product, side) for a in dim}
        entry: Any = product.args[side]
        for node in _chain(product.args[side]):
            if self.traced.user(node) is None and node.op != "placeholder":
                continue
            if node in self.axes.dims and {*leaves(a for d in self.axes.dims[node] for a in d)} == {
                *leaves(wanted)
            }:
                entry = node
        if entry.op != "placeholder" and not self.traced.enter(entry):
            raise Refusal("has an operand that is no value of the graph", "", product)

    def _sides(self, product: fx.Node, side: int) -> list[list[Axis]]:
        operand: Any = product.args[side]
        return self.axes.of(operand)

    def _source(self, product: fx.Node, side: int) -> fx.Node:
        """The placeholder of A or of B."""
        for node in _chain(product.args[side]):
            if node.op == "placeholder":
                return node
        raise Refusal("has an operand that does not enter the graph", "", product)

    def _stand(self, node: fx.Node) -> Stand | None:
        axes = self.axes.of(node)
        own, (rows, columns, inner) = {a for dim in axes for a in dim}, self.roles
        for source, first in ((self.a, rows), (self.b, columns)):
            if node is source:
                if own != {*first, *inner}:
                    raise Refusal("multiplies other than two matrices", "", self.product)
                return Stand(axes, [first, inner], None)
        value = node.meta["val"]
        if value.dtype is torch.bool or value.is_complex():
            return None
        return entering(axes, self.roles, whole=not value.is_floating_point())

    def composition(self) -> Composition:
        """The program, checked, and its ports."""
        problem = self._problem(turn=0)
        try:
            program = assemble(rewrite(problem))
        except Refusal:
            raise
        except ProgramError as error:
            wide = (x for x, s in self.leaving.items() if s is not None and s.kind is WideTile)
            raise Refusal(error.message, error.hint, output=next(wide, "")) from None
        self._check(problem, program)
        sizes = {a: a.size for a in self._every()}
        ports = {
            name: self._port(node, stand, sizes)
            for name, (node, stand) in self._inputs().items()
            if stand is not None
        }
        a, b = (ports[self._name(x)] for x in (self.a, self.b))
        outputs = {
            name: self._port(self.traced.results[name], stand, sizes, self.traced.outputs[name])
            for name, stand in self.leaving.items()
            if stand is not None
        }
        operands = {name: ports[name] for name in program.operands}
        return Composition(program, a, b, operands, outputs, self.roles.extents(sizes))

    def _check(self, problem: Problem, program: Program) -> None:
        """Compare the program with the graph by numbers."""
        if any(kind.__name__ == "RowMean" for kind in program.outputs.values()):
            # A mean that is a sum by a number is one at the sizes of the call only.
            program = assemble(rewrite(replace(problem, counts={})))
        check_numbers(self._problem(turn=4), program)

    def _port(
        self, node: fx.Node, stand: Stand, sizes: Mapping[Axis, int], user: fx.Node | None = None
    ) -> Port:
        user = user or self.traced.user(node)
        assert user is not None  # else it would not have entered
        steps, back = stand.steps(sizes), stand.back(sizes)
        return Port(user, tuple(steps), tuple(back), node.meta["val"].dtype)

    def _name(self, node: fx.Node) -> str:
        """A placeholder's name as an operand."""
        user = self.traced.user(node)
        name = node.name if user is None else user.name
        return f"{name}_" if name in ("acc", *primitives.__all__) else name

    def _inputs(self) -> dict[str, tuple[fx.Node, Stand | None]]:
        return {self._name(node): (node, stand) for node, stand in self.stands.items()}

    def _every(self) -> Iterator[Axis]:
        for dims in self.axes.dims:
            for dim in self.axes.of(dims):
                yield from dim

    def _problem(self, *, turn: int) -> Problem:
        """What the rewriter reads, at small sizes."""
        try:
            sizes = small_sizes(self.roles, self._every(), turn=turn)
        except ProgramError as error:
            raise Refusal(error.message, error.hint, self.product) from None
        module, self.original = resized(self.traced.module, self.axes, sizes)
        types = {n.meta["val"].dtype for n in (*self.stands, *self.traced.results.values())}
        inputs = {x: _entry(n, s, sizes) for x, (n, s) in self._inputs().items()}
        whole = {a: a.size for a in self._every()}
        return Problem(
            name=self.name,
            module=module,
            extents=self.roles.extents(sizes),
            gemm=(self._name(self.a), self._name(self.b)),
            inputs=inputs,
            outputs={
                x: _exit(n, self.leaving[x], self.axes, sizes)
                for x, n in self.traced.results.items()
            },
            narrow=partial(_narrow, types),
            place=lambda node: "",
            counts=self.roles.extents(whole),
            lead=tuple(sizes[a] for a in self.roles.rows),
            halves=self.halves,
            moved=self._moved(sizes),
        )

    def _moved(self, sizes: Mapping[Axis, int]) -> dict[fx.Node, tuple[View, View]]:
        """Nodes at small sizes whose dims are to be put in order."""
        order = {axis: i for i, axis in enumerate((*self.roles.rows, *self.roles.columns))}
        if self.halves:
            order[self.roles.columns[-1]] = len(self.roles.rows) - 1
        result: dict[fx.Node, tuple[View, View]] = {}
        for node, original in self.original.items():
            flat = (
                [a for dim in self.axes.of(original) for a in dim]
                if original in self.axes.dims
                else []
            )
            # A count of parts stands before the part.
            ranks = [order.get(a, -1.0) for a in flat]
            for i in reversed(range(len(flat) - 1)):
                ranks[i] = ranks[i] if ranks[i] >= 0 else ranks[i + 1] - 0.5
            if ranks != sorted(ranks) and len({*flat}) == len(flat):
                groups = [[a] for _, a in sorted(zip(ranks, flat, strict=True), key=itemgetter(0))]
                stand = Stand(self.axes.of(original), groups, None)
                straight, restored = stand.steps(sizes), stand.back(sizes)
                result[node] = partial(_applied, straight), partial(_applied, restored)
        return result


def _chain(node: Any) -> Iterator[fx.Node]:
    """The values that an operand is made of by views, casts and scales, itself first."""
    while isinstance(node, fx.Node):
        yield node
        op = name_of(node)
        if op in _CASTS and not _widens(node):
            return
        if op not in (*_PLAIN_VIEWS, *_CASTS, *_SCALES):
            return
        tensors = [x for x in node.args if isinstance(x, fx.Node)]
        node = max(tensors[: 1 if op == "div" else None], key=_count, default=None)


def _count(node: fx.Node) -> int:
    return node.meta["val"].numel()


def _widens(node: fx.Node) -> bool:
    source: Any = node.args[0]
    return source.meta["val"].dtype.itemsize <= node.meta["val"].dtype.itemsize


def _narrow(types: set[torch.dtype], dtype: torch.dtype) -> bool:
    """Whether a cast means rounding: to 8 bits, or to 16 in a type that nothing else has."""
    if not dtype.is_floating_point or dtype.itemsize > 2:
        return False
    return dtype.itemsize == 1 or dtype not in types


def _applied(steps: Sequence[tuple[Any, list[int]]], x: torch.Tensor) -> torch.Tensor:
    for view, argument in steps:
        x = view(x, argument)
    return x


def _entry(node: fx.Node, stand: Stand | None, sizes: Mapping[Axis, int]) -> Slot:
    value = node.meta["val"]
    if stand is None:
        words = f"is {value.dtype} {[*shape_of(node)]}".replace("torch.", "")
        return Slot((), None, reason=f"{node.name} {words}, which is not over rows and columns")
    shape = tuple(_extent(dim, sizes) for dim in stand.groups)
    straight = partial(_applied, stand.steps(sizes))
    restored = partial(_applied, stand.back(sizes))
    return Slot(shape, stand.kind, straight=straight, restored=restored)


def _exit(node: fx.Node, stand: Stand | None, axes: Axes, sizes: Mapping[Axis, int]) -> Slot:
    shape = tuple(_extent(dim, sizes) for dim in axes.of(node))
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    if stand is None:
        return Slot(shape, None, words=str([*shape_of(node)]), dtype=dtype)
    straight = partial(_applied, stand.steps(sizes))
    return Slot(shape, stand.kind, dtype=dtype, straight=straight)


def _extent(dim: Sequence[Axis], sizes: Mapping[Axis, int]) -> int:
    extent = 1
    for axis in dim:
        extent *= sizes[axis]
    return extent
