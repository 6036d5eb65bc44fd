"""One reading of a traced graph, as the problem of the rewriter."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import replace
from functools import cached_property, partial
from typing import Any

import torch
from torch import fx

from coda_agent import primitives
from coda_agent.agent.authors.composer.axes import Axes, Axis, Dim, unify
from coda_agent.agent.authors.composer.calls import CASTS, VIEWS, behind, shape_of
from coda_agent.agent.authors.composer.check import check_numbers
from coda_agent.agent.authors.composer.emit import program_of
from coda_agent.agent.authors.composer.expression import joins_columns, walk
from coda_agent.agent.authors.composer.merge import Merged
from coda_agent.agent.authors.composer.order import Order
from coda_agent.agent.authors.composer.ports import (
    Port,
    Stand,
    applied,
    entering,
    extents_of_call,
    leaving,
)
from coda_agent.agent.authors.composer.problem import Columns, Problem, Refusal, Rewritten, Slot
from coda_agent.agent.authors.composer.remainders import (
    check_sums,
    is_copy,
    is_rounding,
    kept_roundings,
)
from coda_agent.agent.authors.composer.resize import Roles, resized, small_sizes
from coda_agent.agent.authors.composer.retrace import SLICE, Retraced, Step
from coda_agent.agent.authors.composer.rewrite import rewrite
from coda_agent.agent.authors.composer.sources import Sources
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.resources import RowMean, WideTile


class Reordered(Exception):
    """The graph was changed, and is to be read again."""


class Reading:
    """One attempt at a traced graph.

    Attributes:
        original: The traced nodes of those at small sizes.
        roles: Of the product's axes, with columns in the kernel's order.
        halves: Whether column j of the graph's pairs meets j + N/2; `paired` whether it might.
        stands: Of each placeholder, how it stands to the kernel's tensor.
        leaving: The same of each output.
    """

    def __init__(self, traced: Retraced, merged: Merged, *, halves: bool) -> None:
        self.traced, self.merged, self.halves = traced, merged, halves
        self.original: dict[fx.Node, fx.Node] = {}
        self.parts: Mapping[str, tuple[str, int, int]] = {}
        sources = Sources(traced, merged)
        self.product, (self.a, self.b) = sources.product, sources.entered()
        self.axes = Axes(traced.graph)
        if merged.a and merged.b:
            unify(self.axes.dims[merged.a][-1], self.axes.dims[merged.b][-1])
        *batch, rows, columns = self.axes.of(self.product)
        if any(batch):
            raise Refusal("is a batch of products", "make a kernel of each", self.product)
        self.paired = len(columns) > 1 and columns[0].size == 2 and columns[0].unit
        columns = [*columns[1:], columns[0]] if halves and self.paired else columns
        left: Any = merged.a or self.product.args[0]
        self.roles = Roles(rows, columns, self.axes.of(left)[-1])
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
        """Take parts an output puts together for those its columns had."""
        own = {a for dim in self.axes.of(node) for a in dim}
        missing = [a for a in self.roles.columns if a not in own]
        extra = [*own.difference(self.roles.rows, self.roles.columns)]
        if len(missing) == len(extra) == 1 and missing[0].size == extra[0].size:
            if missing[0].unit and extra[0].unit:
                extra[0].become(missing[0])

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
        """How an output, or a range of columns, stands to the kernel's."""
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

    def rewritten(self) -> Rewritten:
        """The program's expressions, checked by numbers.

        Raises:
            Refusal: there is none; its node is one at small sizes.
        """
        check_sums(self.traced.graph)
        problem = self._problem(turn=0)
        result = rewrite(problem)
        try:
            program = program_of(result)
        except ProgramError as error:
            wide = [x for x, s in self.leaving.items() if s is not None and s.kind is WideTile]
            wide += [x for x, e in result.values.items() if any(map(joins_columns, walk([e])))]
            raise Refusal(error.message, error.hint, output=next(iter(wide), "")) from None
        # A mean that is a sum by a number, and a range of columns, hold at the call's sizes only.
        bound = result.parts or any(kind is RowMean for kind in program.outputs.values())
        checked, tried = result, program
        if bound:
            checked = rewrite(replace(problem, counts={}))
            tried = program_of(checked)
        other = problem if result.parts else self._problem(turn=4)
        check_numbers(other, tried, checked.parts)
        self.parts = result.parts
        return result

    def ports(self) -> dict[str, Port]:
        """Collect what enters, by the operand's name, A and B included."""
        result: dict[str, Port] = {}
        for node, stand in self.stands.items():
            if stand is not None:
                name = {self.a: "A", self.b: "B"}.get(node, self._name(node))
                result[name] = self._port(name, node, stand)
        return result

    def outputs(self) -> dict[str, Port]:
        """What leaves, by the name of the output."""
        result: dict[str, Port] = {}
        for x, user in self.traced.outputs.items():
            if (stand := self.leaving[x]) is not None:
                port = self._port(x, self.traced.results[x], stand)
                name, start, stop = self.parts.get(x, (x, 0, 0))
                taken: tuple[Step, ...] = ((SLICE, (1, start, stop)),) if x in self.parts else ()
                result[x] = replace(port, name=name, node=user, back=taken + port.back)
        return result

    def copies(self) -> set[str]:
        """Name outputs that are rounded copies of what else is read unrounded."""
        found = set[str]()
        for x, node in self.traced.results.items():
            cast = behind(node, VIEWS)
            if is_rounding(cast) and is_copy(cast):
                found.add(self.parts.get(x, (x,))[0])
        return found

    def reduced(self) -> dict[str, torch.dtype]:
        """Find the types of what outputs were computed of, before they widened."""
        types: dict[str, torch.dtype] = {}
        for x, node in self.traced.results.items():
            source = behind((node.all_input_nodes or [node])[0], (*VIEWS, *CASTS))
            types[self.parts.get(x, (x,))[0]] = source.meta["val"].dtype
        return types

    def _port(self, name: str, node: fx.Node, stand: Stand) -> Port:
        steps, back = tuple(stand.steps(self._sizes)), tuple(stand.back(self._sizes))
        dtype = node.meta["val"].dtype
        steps = self.traced.part(node) + steps
        if (packed := self.merged.packed.get(node)) is not None:
            return replace(packed, steps=steps, back=back)
        return Port(name, self.traced.user(node), steps, back, dtype)

    @cached_property
    def _sizes(self) -> dict[Axis, int]:
        return extents_of_call(self.traced, self.axes, self.roles, self.product)

    def extents(self) -> dict[str, int]:
        """M, N and K of the call."""
        return {name: int(size) for name, size in self.roles.extents(self._sizes).items()}

    def _name(self, node: fx.Node) -> str:
        """A placeholder's name as an operand."""
        user = None if self.traced.part(node) else self.traced.user(node)
        name = (node.name if user is None else user.name).replace("__", "_0_")  # no program has it
        return f"{name}_" if name in ("acc", *primitives.__all__) else name

    def _problem(self, *, turn: int) -> Problem:
        """What the rewriter reads, at small sizes."""
        try:
            sizes = small_sizes(self.roles, self.axes.every(), turn=turn)
        except ProgramError as error:
            raise Refusal(error.message, error.hint, self.product) from None
        module, self.original = resized(self.traced.module, self.axes, sizes)
        types = {n.meta["val"].dtype for n in (*self.stands, *self.traced.results.values())}
        inputs = {self._name(n): _entry(n, s, sizes) for n, s in self.stands.items()}
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
            kept=kept_roundings(module.graph),
            moved=self.order.moved(self.axes, self.original, sizes),
        )


def _narrow(types: set[torch.dtype], dtype: torch.dtype) -> bool:
    """Whether a cast means rounding, to a type that nothing else has."""
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
