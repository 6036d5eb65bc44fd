"""One reading of a traced graph: roles, ports, and the problem that the rewriter solves."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from coda_agent import primitives
from coda_agent.agent.authors.composer.assemble import assemble
from coda_agent.agent.authors.composer.axes import Axes, Axis, Dim, unify
from coda_agent.agent.authors.composer.calls import name_of, shape_of
from coda_agent.agent.authors.composer.check import check_numbers
from coda_agent.agent.authors.composer.merge import Merged, products
from coda_agent.agent.authors.composer.order import Order
from coda_agent.agent.authors.composer.ports import (
    Extent,
    Port,
    Stand,
    Step,
    applied,
    entering,
    leaving,
)
from coda_agent.agent.authors.composer.problem import (
    Columns,
    Problem,
    Refusal,
    Rewritten,
    Slot,
)
from coda_agent.agent.authors.composer.resize import Roles, resized, small_sizes
from coda_agent.agent.authors.composer.retrace import SYMBOLIC, Retraced
from coda_agent.agent.authors.composer.rewrite import rewrite
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import RowMean, WideTile

SCALES = ("mul", "div", "neg")
VIEWS = frozenset(
    """
    alias clone contiguous detach permute reshape _reshape_alias squeeze t transpose _unsafe_view
    unsqueeze view
    """.split()  # noqa: SIM905
)
CASTS = ("_to_copy", "convert_element_type")
SLICE = torch.ops.aten.slice.Tensor
TURN: tuple[Step, ...] = ((torch.ops.aten.permute.default, ([1, 0],)),)


class Reordered(Exception):
    """The graph was changed, and is to be read again."""


class Reading:
    """One attempt at a traced graph.

    Attributes:
        original: The traced nodes of those at small sizes.
        product: The first product.
        roles: Of its axes, with columns in the kernel's order.
        halves: Whether column j of the graph's pairs meets j + N/2.
        paired: Whether it might.
        a: The placeholder of A.
        b: The placeholder of B.
        stands: Of each placeholder, how it stands to the kernel's tensor.
        leaving: The same of each output.
    """

    def __init__(self, traced: Retraced, merged: Merged, *, halves: bool) -> None:
        self.traced, self.merged, self.halves = traced, merged, halves
        self.original: dict[fx.Node, fx.Node] = {}
        self.parts: Mapping[str, tuple[str, int, int]] = {}
        self.product = products(traced.graph)[0]
        self.axes = Axes(traced.graph)
        self.a, self.b = self._sources()
        self.axes = Axes(traced.graph)
        if merged.a and merged.b:
            unify(self.axes.dims[merged.a][-1], self.axes.dims[merged.b][-1])
        *batch, rows, columns = self.axes.of(self.product)
        if any(batch):
            raise Refusal("is a batch of products", "make a kernel of each", self.product)
        self.paired = len(columns) > 1 and columns[0].size == 2 and columns[0].unit
        columns = [*columns[1:], columns[0]] if halves and self.paired else columns
        inner = self.axes.of(self.a)[-1] if merged.a else self._side(0)[-1]
        self.roles = Roles(rows, columns, inner)
        every = [a for axes in self.roles for a in axes]
        if len({*every}) < len(every) or not all(self.roles):
            message = "has rows, columns and summed elements that are alike"
            raise Refusal(message, "", self.product)
        self.order = Order(self.roles, halves=self.halves)
        if self.order.reductions(traced, self.axes):
            raise Reordered
        for node in traced.results.values():
            self._rename(node)
        places = [n for n in traced.graph.nodes if n.op == "placeholder"]
        self.stands = {node: self._stand(node) for node in places}
        self.leaving = {x: self._leaving(n) for x, n in traced.results.items()}

    def _rename(self, node: fx.Node) -> None:
        """Take parts that an output puts together for those that its columns were cut into."""
        own = {a for dim in self.axes.of(node) for a in dim}
        missing = [a for a in self.roles.columns if a not in own]
        extra = [*own.difference(self.roles.rows, self.roles.columns)]
        if len(missing) == len(extra) == 1 and missing[0].size == extra[0].size:
            if missing[0].unit and extra[0].unit:
                extra[0].become(missing[0])

    def _side(self, side: int) -> list[Dim]:
        operand: Any = self.product.args[side]
        return self.axes.of(operand)

    def _sources(self) -> tuple[fx.Node, fx.Node]:
        """The placeholders of A and B; values that are none enter the graph."""
        known = self.merged.a, self.merged.b
        for casts in (True, False):
            sides = [node or self._source(i, casts=casts) for i, node in enumerate(known)]
            if len({node.meta["val"].dtype for node in sides}) == 1:
                break
        a, b = (n if n.op == "placeholder" else self.traced.enter(n) for n in sides)
        return a, b

    def _source(self, side: int, *, casts: bool) -> fx.Node:
        """The first value from which only views, casts and scales lead to the product."""
        own = {a for dim in self._side(side) for a in dim}
        inner = {*self._side(side)[-1 if side == 0 else -2]}
        entry: fx.Node | None = None
        for node in self._chain(self.product.args[side], inner, casts=casts):
            known = node.op == "placeholder" or self.traced.user(node) is not None
            if known and {a for dim in self.axes.of(node) for a in dim} == own:
                entry = node
        if entry is None:
            raise Refusal("has an operand that is no value of the graph", "", self.product)
        return entry

    def _chain(self, node: Any, inner: set[Axis], *, casts: bool) -> Iterator[fx.Node]:
        """The values that an operand is made of by views, casts and scales, itself first."""
        while isinstance(node, fx.Node):
            yield node
            op, tensors = name_of(node), [x for x in node.args if isinstance(x, fx.Node)]
            if op in SCALES:
                over = [x for x in tensors if inner & {a for d in self.axes.of(x) for a in d}]
                scaled = len(over) == 1 and (op != "div" or over[0] is node.args[0])
                node = over[0] if scaled else None
            elif op in VIEWS or (op in CASTS and casts and _widens(node)):
                node = tensors[0]
            else:
                return

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

    def _leaving(self, node: fx.Node) -> Stand | None:
        """How an output stands to the kernel's; a range of columns stands so to that range."""
        axes = self.axes.of(node)
        if (stand := leaving(axes, self.roles)) is not None:
            return stand
        flat = [a for dim in axes for a in dim]
        columns = [a for a in self.order.sorted(flat) if a not in self.roles.rows]
        last = [a for a in self.roles.columns if a in columns]
        if len(flat) - len(columns) < len(self.roles.rows) or last[:1] == self.roles.columns[:1]:
            return None
        if self.halves or len({*flat}) < len(flat) or columns[-len(last) :] != last:
            return None
        ranged = self.roles.columns[-len(last) :] == last
        return Stand(axes, [self.roles.rows, columns], Columns) if ranged and last else None

    def rewritten(self) -> tuple[Rewritten, Program]:
        """The program, checked by numbers.

        Raises:
            Refusal: there is none; its node is one at small sizes.
        """
        problem = self._problem(turn=0)
        result = rewrite(problem)
        try:
            program = assemble(result)
        except ProgramError as error:
            wide = (x for x, s in self.leaving.items() if s is not None and s.kind is WideTile)
            raise Refusal(error.message, error.hint, output=next(wide, "")) from None
        # A mean that is a sum by a number, and a range of columns, hold at the call's sizes only.
        bound = result.parts or any(kind is RowMean for kind in program.outputs.values())
        checked = rewrite(replace(problem, counts={})) if bound else result
        other = problem if result.parts else self._problem(turn=4)
        check_numbers(other, assemble(checked), checked.parts)
        self.parts = result.parts
        return result, program

    def ports(self) -> dict[str, Port]:
        """What enters, by the name of the operand; A and B by theirs."""
        sizes = self._call()
        result: dict[str, Port] = {}
        for node, stand in self.stands.items():
            if stand is not None:
                name = {self.a: "A", self.b: "B"}.get(node, self._name(node))
                result[name] = self._port(name, node, stand, sizes)
        return result

    def outputs(self) -> dict[str, Port]:
        """What leaves, by the name of the output."""
        sizes = self._call()
        result: dict[str, Port] = {}
        for x, user in self.traced.outputs.items():
            if (stand := self.leaving[x]) is not None:
                port = self._port(x, self.traced.results[x], stand, sizes)
                name, start, stop = self.parts.get(x, (x, 0, 0))
                taken: tuple[Step, ...] = ((SLICE, (1, start, stop)),) if x in self.parts else ()
                result[x] = replace(port, name=name, node=user, back=taken + port.back)
        return result

    def reduced(self) -> dict[str, torch.dtype]:
        """The element type of what each output is computed of, before it was widened, by name."""
        types: dict[str, torch.dtype] = {}
        for x, node in self.traced.results.items():
            source = (node.all_input_nodes or [node])[0]
            while source.op == "call_function" and name_of(source) in (*VIEWS, *CASTS):
                source = source.all_input_nodes[0]
            types[self.parts.get(x, (x,))[0]] = source.meta["val"].dtype
        return types

    def _port(self, name: str, node: fx.Node, stand: Stand, sizes: Mapping[Axis, int]) -> Port:
        steps, back = tuple(stand.steps(sizes)), tuple(stand.back(sizes))
        dtype = node.meta["val"].dtype
        if node not in self.merged.packed:
            return Port(name, self.traced.user(node), steps, back, dtype)
        pieces, dim = self.merged.packed[node]
        parts = tuple(Port(name, x, TURN * turned, (), dtype) for x, turned in pieces)
        return Port(name, None, steps, back, dtype, parts, dim)

    def _call(self) -> dict[Axis, int]:
        """The extents of the call; those that are symbols of the graph as such."""
        sizes, symbols = {a: a.size for a in self._every()}, dict[Axis, Any]()
        dims = [*self._sized()]
        fixed = {a for size, dim in dims if isinstance(size, int) for a in dim}
        for _ in range(len(dims)):  # a dim of several gives the last that no other gives
            for size, dim in dims:
                left = [a for a in dim if a not in fixed and a not in symbols]
                if not isinstance(size, int) and len(left) == 1:
                    others = [symbols.get(a, a.size) for a in dim if a is not left[0]]
                    symbols[left[0]] = size // math.prod(others)
        for size, dim in dims:
            if not isinstance(size, int) and any(a not in fixed and a not in symbols for a in dim):
                raise Refusal("has a dim whose parts are no sizes of the graph", "", self.product)
        for axis in {*symbols}.difference(self.roles.rows):
            if axis in (*self.roles.columns, *self.roles.inner):
                raise Refusal("has a number of columns that changes", "", self.product)
        return sizes | {a: Extent(a.size, (str(x),)) for a, x in symbols.items()}

    def _sized(self) -> Iterator[tuple[Any, Dim]]:
        """Sizes of the graph's dims, with their axes."""
        for node in self.axes.dims:
            user = self.traced.user(node)
            shape = getattr(None if user is None else user.meta.get(SYMBOLIC), "shape", ())
            if len(shape) == len(self.axes.of(node)):
                yield from zip(shape, self.axes.of(node), strict=True)

    def extents(self) -> dict[str, int]:
        """M, N and K of the call."""
        return {name: int(size) for name, size in self.roles.extents(self._call()).items()}

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
        extents, lengths = self.roles.extents(sizes), self.merged.lengths
        return Problem(
            name="kernel",
            module=module,
            extents=extents,
            gemm=(self._name(self.a), self._name(self.b)),
            inputs=inputs,
            outputs={
                x: _exit(n, self.leaving[x], self.axes, sizes)
                for x, n in self.traced.results.items()
            },
            narrow=partial(_narrow, types),
            place=lambda node: "",
            counts=self.extents(),
            lead=tuple(sizes[a] for a in self.roles.rows),
            inner=tuple(x * extents["K"] // sum(lengths) for x in lengths),
            halves=self.halves,
            moved=self.order.moved(self.axes, self.original, sizes),
        )


def _widens(node: fx.Node) -> bool:
    source: Any = node.args[0]
    dtype = source.meta["val"].dtype
    return dtype.is_floating_point and dtype.itemsize <= node.meta["val"].dtype.itemsize


def _narrow(types: set[torch.dtype], dtype: torch.dtype) -> bool:
    """Whether a cast means rounding: to 8 bits, or to 16 in a type that nothing else has."""
    if not dtype.is_floating_point or dtype.itemsize > 2:
        return False
    return dtype.itemsize == 1 or dtype not in types


def _entry(node: fx.Node, stand: Stand | None, sizes: Mapping[Axis, int]) -> Slot:
    value = node.meta["val"]
    if stand is None:
        words = f"is {value.dtype} {[*shape_of(node)]}".replace("torch.", "")
        return Slot((), None, reason=f"{node.name} {words}, which is not over rows and columns")
    shape = tuple(_extent(dim, sizes) for dim in stand.groups)
    straight = partial(applied, stand.steps(sizes))
    restored = partial(applied, stand.back(sizes))
    return Slot(shape, stand.kind, straight=straight, restored=restored)


def _exit(node: fx.Node, stand: Stand | None, axes: Axes, sizes: Mapping[Axis, int]) -> Slot:
    shape = tuple(_extent(dim, sizes) for dim in axes.of(node))
    dtype = str(node.meta["val"].dtype).removeprefix("torch.")
    if stand is None:
        return Slot(shape, None, words=str([*shape_of(node)]), dtype=dtype)
    straight = partial(applied, stand.steps(sizes))
    return Slot(shape, stand.kind, dtype=dtype, straight=straight)


def _extent(dim: Dim, sizes: Mapping[Axis, int]) -> int:
    return math.prod(sizes[axis] for axis in dim)
