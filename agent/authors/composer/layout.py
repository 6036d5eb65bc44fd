"""Which value stands where in a tensor, whatever views it went through.

- A tensor of the trace is an integer tensor of the same shape: which expression stands at each
  element, and which element of it.
- Views, slices, stacks and scatters run on those integers as ATen defines them, so no spelling of
  them needs a rule.
- `read` then asks what an elementwise operation would see: one expression, its even or its odd
  columns, or two expressions interleaved.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import torch

from coda_agent.agent.authors.composer.expression import (
    Expr,
    before_column,
    const,
    group_width,
    leaf,
    make,
)
from coda_agent.agent.authors.composer.halves import exchanged, joined
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.groups import WIDTHS
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.tables import TABLES, Table

_SHIFT = 40
_FRAMES = (
    *(("M",), ("N",), ("N/2",), ("K",)),
    *(("M", "N"), ("M", "N/2"), ("M", "2*N"), ("M", "K"), ("N", "K")),
)
_HALF = {"N": "N/2", "2*N": "N"}
_DOUBLE = {half: whole for whole, half in _HALF.items()}


@dataclass(frozen=True)
class Frame:
    """The dims a shape is over, in canonical order; `flipped` if the shape has them reversed."""

    dims: tuple[str, ...]
    flipped: bool = False


@dataclass(frozen=True, eq=False)
class Elements:
    """A tensor of the trace, element by element."""

    codes: torch.Tensor


@dataclass(frozen=True)
class Unusable:
    """A value that an epilogue cannot take, and what to do; an error only where it is used."""

    reason: str
    hint: str


class Layout:
    """Expressions as elements of tensors, at one trace's extents of M, N, N/2, 2*N and K.

    With `halves` a spec has columns j and j + N/2 of the product where a kernel has 2j and 2j + 1.
    `lead` are the extents of the dims of rows. With `fixed` N is the only one that a kernel takes.
    `counts` are the call's M and N, where the trace has others.
    """

    def __init__(
        self,
        extents: Mapping[str, int],
        *,
        halves: bool = False,
        lead: Sequence[int] = (),
        fixed: bool = False,
        counts: Mapping[str, int] | None = None,
    ) -> None:
        self.extents, self.halves, self.lead, self.fixed = extents, halves, [*lead], fixed
        counts = counts or {}
        of_call = {d: counts.get(d, extents[d]) for d in "MN"}
        of_call["N/2"] = of_call["N"] // 2
        self._counts = {extents[d]: count for d, count in of_call.items()}
        self._numbers: dict[Expr, int] = {}
        self._exprs: list[Expr] = []
        # What the tile reads of a tensor, and which of the tensor's elements each of its own is.
        self._tables: dict[Expr, list[tuple[Expr, torch.Tensor]]] = {}

    def count(self, extent: int) -> int:
        """How many elements of the call an extent of the trace stands for."""
        return self._counts.get(extent, extent)

    def frame(self, shape: tuple[int, ...]) -> Frame | None:
        """The dims that `shape` is over, its unit extents dropped, its rows joined and its columns
        too."""
        extents = [s for s in shape if s != 1]
        if not extents:
            return Frame(())
        sides = [(math.prod(extents[:i]), math.prod(extents[i:])) for i in range(1, len(extents))]
        for dims in _FRAMES:
            wanted = tuple(self.extents[d] for d in dims)
            if wanted == (math.prod(extents),) or wanted in sides:
                return Frame(dims)
            if len(dims) == 2 and tuple(extents) == wanted[::-1]:
                return Frame(dims, flipped=True)
        return None

    def group(self, shape: tuple[int, ...]) -> int:
        """The width of the groups of adjacent columns that `shape` has an element for; 0 where it
        has not."""
        rows, count = self.extents["M"], math.prod(shape)
        wide = (self.extents[columns] * rows for columns in ("N", "N/2"))
        found = (width for whole in wide for width in WIDTHS if count * width == whole)
        return next(found, 0) if rows in itertools.accumulate(shape, operator.mul) else 0

    def over_group(self, codes: torch.Tensor, width: int) -> torch.Tensor:
        """One element for each group as the same in each of its columns, (M, columns)."""
        return codes.reshape(self.extents["M"], -1).repeat_interleave(width, -1)

    def stored(self, elements: Elements, shape: tuple[int, ...], kind: type[Resource]) -> Expr:
        """What an output of a kind holds.

        Raises:
            ProgramError: as `read`.
        """
        if width := getattr(kind, "width", 0):
            full = Elements(self.over_group(elements.codes, width))
            return self.read(full, tuple(full.codes.shape), Frame(("M", "N")))
        return self.read(elements, shape, Frame(kind.dims))

    def write(self, expr: Expr, shape: tuple[int, ...], frame: Frame) -> Elements:
        """`expr` broadcast over a tensor of `shape`."""
        full = self.grid(expr, frame.dims)
        return Elements((full.mT if frame.flipped else full).reshape(shape))

    def table(self, name: str, position: int, shape: tuple[int, ...]) -> Elements:
        """A matrix of part of the rows or columns. As which kind of table a program reads it, the
        `value` of its leaf tells: the place among `TABLES`."""
        key, dims = (f"{position:04d}",), frozenset({"M", "N"})
        return self.partly(
            [
                (Expr("operand", (), dims, name, float(i), key), at)
                for i, kind in enumerate(TABLES)
                if (at := self._places(kind, *shape)) is not None
            ],
            shape,
        )

    def partly(self, readings: list[tuple[Expr, torch.Tensor]], shape: tuple[int, ...]) -> Elements:
        """A tensor that is part of the rows or columns: what the tile reads, if it reads so."""
        raw = leaf("table", str(len(self._tables)), 0, frozenset({"M", "N"}))
        self._tables[raw] = readings
        codes = torch.arange(math.prod(shape)) + (self._number(raw) << _SHIFT)
        return Elements(codes.reshape(shape))

    def readings(self, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Ways in which the tile may read such a tensor: which of the tensor's elements each of its
        own, (M, N), is."""
        for i in range(len(shape) + 1):
            rows = [s for s in shape[:i] if s != 1]
            sample = rows == self.lead[:1] != self.lead
            if rows and not sample and rows not in (self.lead, self.lead[-1:]):
                continue
            for kind in TABLES:
                at = self._places(kind, math.prod(rows), math.prod(shape[i:]))
                if kind.sample == sample and at is not None:
                    yield at

    def half(self, codes: torch.Tensor, width: int) -> Expr | None:
        """The expression over (M, N) whose elements in the first halves of groups of columns stand
        in `codes` (M, N/2); of those in the second halves with the halves exchanged."""
        if len(numbers := (codes >> _SHIFT).unique()) > 1:
            return None
        expr = self._exprs[int(numbers)]
        if expr.dims <= {"M"}:
            return expr if torch.equal(codes, self.grid(expr, ("M", "N/2"))) else None
        base = self._number(expr) << _SHIFT
        known = [(whole, at + base) for whole, at in self._tables.get(expr, ())]
        if expr.op != "table" and expr.dims <= {"M", "N"}:
            known.append((expr, self.grid(expr, ("M", "N"))))
        for whole, full in known:
            for side, part in enumerate(self.apart(full, width)):
                if torch.equal(codes, part):
                    return exchanged(whole, width, partial(self._alike, width)) if side else whole
        return None

    def apart(self, full: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
        """First and second halves of the groups of columns of (M, N), each (M, N/2)."""
        halves = full.unflatten(-1, (-1, 2, width // 2))
        return halves[..., 0, :].flatten(-2), halves[..., 1, :].flatten(-2)

    def _alike(self, width: int, expr: Expr) -> bool:
        """Whether it is the same in both halves of a group, column by column."""
        if expr.op.startswith("group_"):
            return int(expr.value) % width == 0
        read = [at for some in self._tables.values() for whole, at in some if whole == expr]
        return any(torch.equal(*self.apart(at, width)) for at in read)

    def _joined(self, codes: torch.Tensor) -> Expr | None:
        """What two halves of groups, computed apart, are together."""
        for width in WIDTHS:
            if self.extents["N"] % width == 0:
                first, second = (self.half(part, width) for part in self.apart(codes, width))
                if first is not None and second is not None:
                    second = exchanged(second, width, partial(self._alike, width))
                    if (found := joined(first, second)) is not None:
                        return found
        return None

    def _ranges(self, codes: torch.Tensor) -> Expr | None:
        """What is one expression in the first columns and others in the next ones, where N has one
        size: chosen by the column."""
        numbers = codes[0] >> _SHIFT
        starts = [0, *(1 + (numbers.diff() != 0).nonzero().flatten()).tolist(), len(numbers)]
        if len(starts) > 8:
            return None
        found: Expr | None = None
        for start, stop in reversed([*itertools.pairwise(starts)]):
            expr = self._exprs[int(numbers[start])]
            if not expr.dims <= {"M", "N"}:
                return None
            if not codes[:, start:stop].equal(self.grid(expr, ("M", "N"))[:, start:stop]):
                return None
            found = expr if found is None else before_column(float(stop), expr, found)
        return found

    def _places(self, kind: type[Table], r: int, c: int) -> torch.Tensor | None:
        """Which element of an (R, C) table each of the tile's reads; None where it does not fit."""
        m, n = self.extents["M"], self.extents["N"]
        if m % r or n % (c * (kind.step or 1)):
            return None
        rows, columns = kind.entry(torch.arange(m), torch.arange(n), (m, n), (r, c))
        return rows[:, None] * c + columns

    def taken(
        self, codes: torch.Tensor, expr: Expr, dims: tuple[str, str]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """The rows and columns of a matrix `expr` whose elements `codes` (R, C) are; None where
        they are others."""
        width = self.extents[dims[1]]
        at = codes - (self._number(expr) << _SHIFT)
        if not codes.numel() or at.min() < 0 or at.max() >= self.extents[dims[0]] * width:
            return None
        rows, columns = at[:, 0] // width, at[0] % width
        same = at == rows[:, None] * width + columns
        return (rows, columns) if bool(same.all()) else None

    def range(self, value: Elements) -> tuple[Expr, int] | None:
        """Of which tile a matrix (M, w) is a range of columns, and where it starts."""
        codes = value.codes
        expr = self._exprs[int(codes[0, 0]) >> _SHIFT]
        if not expr.dims <= {"M", "N"}:
            return None
        start = int(codes[0, 0]) % (1 << _SHIFT) if "N" in expr.dims else 0
        full = self.grid(expr, ("M", "N"))[:, start : start + codes.shape[1]]
        return (expr, start) if torch.equal(codes, full) else None

    def in_halves(self, shape: tuple[int, ...]) -> bool:
        """Whether the columns of such a tensor are in another order than a kernel's."""
        return self.halves and shape[-1:] == (self.extents["N"],)

    def whole(
        self, tensors: Sequence[Elements], shape: tuple[int, ...]
    ) -> tuple[list[Elements], slice] | None:
        """The tensors of which the given ones, broadcast, are the same neighbouring columns; None
        where there are no such. What does not vary over columns is the same in all of them."""
        m, n = self.extents["M"], self.extents["N"]
        width = shape[-1] if shape else n
        rows = math.prod(shape) // width
        if not width < n or rows not in (1, m):
            return None
        dims = ("M", "N")[rows == 1 :]
        found, starts = list[Elements](), set[int]()
        for tensor in tensors:
            codes = tensor.codes.broadcast_to(shape).reshape(rows, width)
            expr = self._exprs[int(codes[0, 0]) >> _SHIFT]
            start = 0
            if not expr.dims <= {*dims}:
                return None
            if "N" in expr.dims:
                start = int(codes[0, 0]) % (1 << _SHIFT)
                starts.add(start)
            full = self.grid(expr, dims)
            part = full[..., start : start + width].reshape(rows, -1)
            if not codes.equal(part):  # which the last column may end
                return None
            found.append(Elements(full))
        return (found, slice(start := starts.pop(), start + width)) if len(starts) == 1 else None

    def constants(self, values: torch.Tensor) -> Elements:
        """A tensor whose values are known; few different ones, or it would be an operand."""
        distinct, which = torch.unique(values.double(), return_inverse=True)
        if len(distinct) > 4:
            raise ProgramError(
                "computes with a table of constants",
                hint="give the table to the reference as an input",
            )
        codes = [self._number(const(float(v))) << _SHIFT for v in distinct]
        return Elements(torch.tensor(codes, dtype=torch.int64)[which].reshape(values.shape))

    def read(self, elements: Elements, shape: tuple[int, ...], frame: Frame) -> Expr:
        """The expression an elementwise operation over `shape` sees in `elements`, broadcast.

        Raises:
            ProgramError: Elements were moved other than within adjacent column pairs.
        """
        codes = elements.codes.broadcast_to(shape)
        if frame.flipped:
            codes = codes.reshape([self.extents[d] for d in reversed(frame.dims)]).mT
        found = self._find(codes.reshape([self.extents[d] for d in frame.dims]), frame.dims)
        if found is None:
            if self._is_half(elements, shape):
                raise ProgramError(
                    "takes half of the product's columns, as `chunk` does",
                    hint="declare `pairs: halves`: the kernel then takes a packed weight, which has"
                    " rows j and j + N/2 side by side",
                )
            raise ProgramError(
                "moves values between rows or columns; a kernel combines columns 2j and 2j + 1",
                hint="store the weight's rows so that what meets is adjacent, or declare"
                " `pairs: halves` where column j meets j + N/2",
            )
        return found

    def _is_half(self, elements: Elements, shape: tuple[int, ...]) -> bool:
        """Whether it is the first or the second half of the columns of something."""
        codes, half = elements.codes.broadcast_to(shape), self.extents["N/2"]
        if shape[-1:] != (half,) or len(self.sources(elements)) != 1:
            return False
        columns = (codes & ((1 << _SHIFT) - 1)) % (2 * half)
        return not bool((columns.diff(dim=-1) != 1).any() or (columns[..., 0] % half).any())

    def sources(self, elements: Elements) -> list[Expr]:
        """The expressions that `elements` takes values from."""
        return [self._exprs[int(i)] for i in (elements.codes >> _SHIFT).unique()]

    def _find(self, codes: torch.Tensor, dims: tuple[str, ...]) -> Expr | None:
        numbers = codes >> _SHIFT
        number = int(numbers.flatten()[0])
        if bool((numbers == number).all()):
            expr = self._exprs[number]
            if expr.dims <= set(dims) and torch.equal(codes, self.grid(expr, dims)):
                return expr
            for whole, at in self._tables.get(expr, ()):
                places = at + (self._number(expr) << _SHIFT)
                if dims == ("M", "N") and torch.equal(codes, places):
                    return whole
                if dims == ("M", "N/2") and torch.equal(codes, places[:, ::2]):
                    return make("even", whole, dims=frozenset(dims))
            columns = dims[-1] if dims else ""
            if columns in expr.dims and (width := group_width(expr)):
                first = self.grid(expr, dims)[..., ::width]
                if torch.equal(codes, first.repeat_interleave(width, -1)):
                    return expr
            double = _DOUBLE.get(columns)
            if double in expr.dims:
                whole = self.grid(expr, (*dims[:-1], double))
                for side, half in (("even", whole[..., 0::2]), ("odd", whole[..., 1::2])):
                    if torch.equal(codes, half):
                        return make(side, expr, dims=expr.dims - {double} | {columns})
        if not dims or dims[-1] not in _HALF:
            return None
        if dims == ("M", "N") and (found := self._joined(codes)) is not None:
            return found
        if dims == ("M", "N") and self.fixed and (found := self._ranges(codes)) is not None:
            return found
        half = _HALF[dims[-1]]
        sides = [self._find(codes[..., start::2], (*dims[:-1], half)) for start in (0, 1)]
        even, odd = sides
        if even is None or odd is None or not {"M", half} <= even.dims | odd.dims:
            return None
        if "const" in (even.op, odd.op):
            return None
        return make("interleave", even, odd, dims=frozenset({"M", dims[-1]}))

    def grid(self, expr: Expr, dims: tuple[str, ...]) -> torch.Tensor:
        """Codes of `expr` over `dims`, which include its own."""
        own = [self.extents[d] if d in expr.dims else 1 for d in dims]
        codes = torch.arange(math.prod(own)).reshape(own) + (self._number(expr) << _SHIFT)
        return codes.expand([self.extents[d] for d in dims])

    def _number(self, expr: Expr) -> int:
        if expr not in self._numbers:
            self._numbers[expr] = len(self._exprs)
            self._exprs.append(expr)
        return self._numbers[expr]
