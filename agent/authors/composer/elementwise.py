"""Elementwise operations on tensors of a trace, whatever views they went through."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any

import torch

from coda_agent.agent.authors.composer.codes import Elements, Frame
from coda_agent.agent.authors.composer.expression import Expr, const
from coda_agent.agent.authors.composer.halves import apart
from coda_agent.agent.authors.composer.layout import Layout
from coda_agent.agent.authors.composer.problem import View
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.groups import WIDTHS
from coda_agent.specs.layout import halved, interleaved


class Elementwise:
    """Functions of expressions, applied to tensors of one trace."""

    def __init__(self, layout: Layout) -> None:
        self.problem, self.layout, self.codes = layout.problem, layout, layout.codes
        self.moved: tuple[View, View] | None = None

    def lift(self, value: object) -> Elements:
        if isinstance(value, Elements):
            return value
        return self.codes.constants(torch.as_tensor(value))

    def apply(
        self, function: Callable[..., Expr], args: Iterable[object], kwargs: Mapping[str, object]
    ) -> Elements:
        """An elementwise function of tensors and numbers."""
        args = [*args]

        def bound(*exprs: Expr) -> Expr:
            rest = iter(exprs)

            def given(value: Any) -> object:
                if is_tensor(value):
                    return next(rest)
                number = isinstance(value, (int, float)) and not isinstance(value, bool)
                return const(value) if number else value

            values = [given(v) for v in args]  # before those by name
            return function(*values, **{k: given(v) for k, v in kwargs.items()})

        tensors = [self.lift(v) for v in (*args, *kwargs.values()) if is_tensor(v)]
        return self._applied(bound, tensors)

    @contextmanager
    def in_order(self, node: torch.fx.Node) -> Iterator[None]:
        """Compute with a node's dims in the order of rows and columns."""
        self.moved = self.problem.moved.get(node)
        try:
            yield
        finally:
            self.moved = None

    def _applied(self, function: Callable[..., Expr], tensors: list[Elements]) -> Elements:
        shape = torch.broadcast_shapes(*(t.codes.shape for t in tensors))
        if self.moved is None:
            return self._straight(function, tensors)
        straight, restored = self.moved
        codes = (straight(t.codes.broadcast_to(shape)) for t in tensors)
        return Elements(restored(self._straight(function, [*map(Elements, codes)]).codes))

    def _straight(self, function: Callable[..., Expr], tensors: list[Elements]) -> Elements:
        shape = tuple(torch.broadcast_shapes(*(t.codes.shape for t in tensors)))
        if (found := self.layout.whole(tensors, shape)) is not None:
            # One weight's columns of several: computed as if of all.
            return Elements(self._straight(function, found[0]).codes[..., found[1]].reshape(shape))
        frame = self.layout.frame(shape)
        parts = any(e.op == "table" for t in tensors for e in self.codes.sources(t))
        if frame is None and parts and (found := self._table_wise(function, tensors, shape)):
            return found
        if frame is None and (part := self._part_wise(function, tensors)):
            return part
        if frame is None and (width := self.layout.group(shape)):
            # What is one for each group is computed as if for each column.
            over = (self.layout.over_group(t.codes.broadcast_to(shape), width) for t in tensors)
            whole = self._straight(function, [*map(Elements, over)])
            return Elements(whole.codes[..., ::width].reshape(shape))
        if frame is None:
            words = self.problem.shape_words(shape)
            raise ProgramError(
                f"works on a shape {words} that is neither (M, N) nor part of it",
                hint="return the tensor itself, and do this in the next kernel or with torch",
            )
        if self.layout.in_halves(shape):
            paired = [self._ordered(t, interleaved) for t in tensors]
            return self._ordered(self._elementwise(function, paired, shape, frame), halved)
        try:
            return self._elementwise(function, tensors, shape, frame)
        except ProgramError:
            if (found := self._half_wise(function, tensors, shape)) is None:
                raise
            return found

    def _half_wise(
        self, function: Callable[..., Expr], tensors: Iterable[Elements], shape: tuple[int, ...]
    ) -> Elements | None:
        """A function of halves of groups, as if of the tile."""
        m, n, width = self.layout.extents["M"], self.layout.extents["N"], 2 * shape[-1]
        if width not in WIDTHS or math.prod(shape) != m * n // 2:
            return None
        codes = (t.codes.broadcast_to(shape).reshape(m, n // 2) for t in tensors)
        given = [self.layout.halves.half(half, width) for half in codes]
        if any(expr is None for expr in given):
            return None
        whole = self.codes.write(function(*given), (m, n), Frame(("M", "N")))
        return Elements(apart(whole.codes, width)[0].reshape(shape))

    def _part_wise(self, function: Callable[..., Expr], tensors: list[Elements]) -> Elements | None:
        """A function of part of an operand, as if of all."""
        codes = tensors[0].codes
        if len(tensors) != 1 or (expr := self.codes.only(codes)) is None:
            return None
        dims = ("M" if "M" in expr.dims else "N", "K")
        if {*dims} != expr.dims or codes.ndim != 2:
            return None
        for matrix, turned in ((codes, False), (codes.mT, True)):
            if (at := self.codes.taken(matrix, expr, dims)) is not None:
                found = self.codes.grid(function(expr), dims)[at[0]][:, at[1]]
                return Elements(found.mT if turned else found)
        return None

    def _table_wise(
        self, function: Callable[..., Expr], tensors: list[Elements], shape: tuple[int, ...]
    ) -> Elements | None:
        """A function of part of the rows or columns, as if whole."""
        tile = Frame(("M", "N"))
        found: list[tuple[Expr, torch.Tensor]] = []
        for at in self.layout.parts.ways(shape):
            full = tuple(at.shape)
            over = [Elements(t.codes.broadcast_to(shape).flatten()[at]) for t in tensors]
            with suppress(ProgramError):
                whole = self._elementwise(function, over, full, tile)
                found.append((self.layout.read(whole, full, tile), at))
        return self.layout.parts.read_as(found, shape) if found else None

    def _ordered(self, value: Elements, order: Callable[..., torch.Tensor]) -> Elements:
        """A value with all the product's columns in another order; else itself."""
        halves = self.layout.in_halves(tuple(value.codes.shape))
        return Elements(order(value.codes, -1)) if halves else value

    def _elementwise(
        self,
        function: Callable[..., Expr],
        tensors: list[Elements],
        shape: tuple[int, ...],
        frame: Frame,
    ) -> Elements:
        seen, wide = shape, frame.dims == ("M", "2*N")
        if wide:
            seen, frame = tuple(self.layout.extents[d] for d in "MN"), Frame(("M", "N"))

        def computed(side: int) -> torch.Tensor:
            """The result; of a wide value one of its sides."""

            def expr(tensor: Elements) -> Expr:
                codes = tensor.codes.broadcast_to(shape)
                codes = codes.reshape(*seen, 2)[..., side] if wide else codes
                return self.layout.read(Elements(codes), seen, frame)

            return self.codes.write(function(*map(expr, tensors)), seen, frame).codes

        codes = torch.stack([computed(0), computed(1)], -1) if wide else computed(0)
        return Elements(codes.reshape(shape))


def is_tensor(value: object) -> bool:
    return isinstance(value, (Elements, torch.Tensor))
