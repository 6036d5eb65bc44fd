"""Which value stands where in a tensor, whatever its views.

`read` asks what an elementwise operation would see: one expression, its even or its odd columns,
or two expressions interleaved.
"""

from __future__ import annotations

import itertools
import math
import operator
from collections.abc import Sequence

import torch

from coda_agent.agent.authors.composer.codes import Codes, Elements, Frame
from coda_agent.agent.authors.composer.expression import Expr, by_columns, group_width, make
from coda_agent.agent.authors.composer.halves import Halves
from coda_agent.agent.authors.composer.parts import Parts
from coda_agent.agent.authors.composer.problem import Problem
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.groups import WIDTHS
from coda_agent.primitives.kinds import Resource

_FRAMES = (
    *(("M",), ("N",), ("N/2",), ("K",)),
    *(("M", "N"), ("M", "N/2"), ("M", "2*N"), ("M", "K"), ("N", "K")),
)
_HALF = {"N": "N/2", "2*N": "N"}
_DOUBLE = {half: whole for whole, half in _HALF.items()}


class Layout:
    """Expressions as elements of tensors, at the extents of one problem's trace."""

    def __init__(self, problem: Problem) -> None:
        m, n, k = (problem.extents[d] for d in "MNK")
        self.problem = problem
        self.extents = {"M": m, "N": n, "N/2": n // 2, "2*N": 2 * n, "K": k}
        rows, columns = (problem.counts.get(d, problem.extents[d]) for d in "MN")
        self._counts = {m: rows, n: columns, n // 2: columns // 2}
        self.codes = Codes(self.extents)
        self.parts = Parts(self.codes, problem.lead or [m])
        self.halves = Halves(self.codes, self.parts)

    def count(self, extent: int) -> int:
        """Count the elements of the call that an extent stands for."""
        return self._counts.get(extent, extent)

    def frame(self, shape: tuple[int, ...]) -> Frame | None:
        """Find a shape's dims, its rows and its columns joined."""
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
        """Find the width of the groups that `shape` has elements for."""
        rows, count = self.extents["M"], math.prod(shape)
        wide = (self.extents[columns] * rows for columns in ("N", "N/2"))
        found = (width for whole in wide for width in WIDTHS if count * width == whole)
        return next(found, 0) if rows in itertools.accumulate(shape, operator.mul) else 0

    def over_group(self, codes: torch.Tensor, width: int) -> torch.Tensor:
        """Repeat what is one for each group in its columns."""
        return codes.reshape(self.extents["M"], -1).repeat_interleave(width, -1)

    def in_halves(self, shape: tuple[int, ...]) -> bool:
        """Whether the columns of such a tensor are in another order."""
        return self.problem.halves and shape[-1:] == (self.extents["N"],)

    def stored(self, codes: torch.Tensor, kind: type[Resource]) -> Expr:
        """What an output of a kind holds, as of `read`."""
        dims = kind.dims
        if width := getattr(kind, "width", 0):
            codes, dims = self.over_group(codes, width), ("M", "N")
        return self.read(Elements(codes), tuple(codes.shape), Frame(dims))

    def range(
        self, codes: torch.Tensor, dims: tuple[str, ...] = ("M", "N")
    ) -> tuple[Expr, int] | None:
        """Find what these are neighbouring columns of, and the first one."""
        expr = self.codes.first(codes)
        if not expr.dims <= {*dims}:
            return None
        start = int(self.codes.places(codes.flatten()[0])) if "N" in expr.dims else 0
        part = self.codes.grid(expr, dims)[..., start : start + codes.shape[-1]]
        return (expr, start) if torch.equal(codes, part) else None

    def whole(
        self, tensors: Sequence[Elements], shape: tuple[int, ...]
    ) -> tuple[list[Elements], slice] | None:
        """Find what tensors, broadcast, are the same neighbouring columns of.

        None where there are no such columns. What does not vary over columns is the same in all of
        them.
        """
        m, n = self.extents["M"], self.extents["N"]
        width = shape[-1] if shape else n
        rows = math.prod(shape) // width
        if not width < n or rows not in (1, m):
            return None
        dims, sizes = ("M", "N")[rows == 1 :], (rows, width)[rows == 1 :]
        found = [self.range(t.codes.broadcast_to(shape).reshape(sizes), dims) for t in tensors]
        known = [part for part in found if part is not None]
        starts = {start for expr, start in known if "N" in expr.dims}
        if len(known) < len(found) or len(starts) != 1:
            return None
        start = starts.pop()
        grids = [Elements(self.codes.grid(expr, dims)) for expr, _ in known]
        return grids, slice(start, start + width)

    def read(self, elements: Elements, shape: tuple[int, ...], frame: Frame) -> Expr:
        """What an elementwise operation over `shape` sees in `elements`, broadcast.

        Raises:
            ProgramError: Elements were moved other than within adjacent column pairs.
        """
        codes = elements.codes.broadcast_to(shape)
        if frame.flipped:
            codes = codes.reshape([self.extents[d] for d in reversed(frame.dims)]).mT
        found = self._find(codes.reshape([self.extents[d] for d in frame.dims]), frame.dims)
        if found is None:
            if self._is_half(elements.codes.broadcast_to(shape)):
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

    def _is_half(self, codes: torch.Tensor) -> bool:
        """Whether it is the first or the second half of something's columns."""
        half = self.extents["N/2"]
        if codes.shape[-1:] != (half,) or self.codes.only(codes) is None:
            return False
        columns = self.codes.places(codes) % (2 * half)
        return not bool((columns.diff(dim=-1) != 1).any() or (columns[..., 0] % half).any())

    def _find(self, codes: torch.Tensor, dims: tuple[str, ...]) -> Expr | None:
        if (expr := self.codes.only(codes)) and (found := self._seen(codes, expr, dims)):
            return found
        if not dims or dims[-1] not in _HALF:
            return None
        if dims == ("M", "N") and (found := self.halves.joined(codes)) is not None:
            return found
        if dims == ("M", "N") and self.problem.fixed and (found := self._ranges(codes)) is not None:
            return found
        half = _HALF[dims[-1]]
        even, odd = (self._find(codes[..., start::2], (*dims[:-1], half)) for start in (0, 1))
        if even is None or odd is None or not {"M", half} <= even.dims | odd.dims:
            return None
        if "const" in (even.op, odd.op):
            return None
        return make("interleave", even, odd, dims=frozenset({"M", dims[-1]}))

    def _seen(self, codes: torch.Tensor, expr: Expr, dims: tuple[str, ...]) -> Expr | None:
        """What elements of one expression are."""
        if expr.dims <= set(dims) and torch.equal(codes, self.codes.grid(expr, dims)):
            return expr
        for whole, places in self.parts.whole(expr):
            if dims == ("M", "N") and torch.equal(codes, places):
                return whole
            if dims == ("M", "N/2") and torch.equal(codes, places[:, ::2]):
                return make("even", whole, dims=frozenset(dims))
        columns = dims[-1] if dims else ""
        if columns in expr.dims and (width := group_width(expr)):
            first = self.codes.grid(expr, dims)[..., ::width]
            if torch.equal(codes, first.repeat_interleave(width, -1)):
                return expr
        double = _DOUBLE.get(columns)
        if double in expr.dims:
            whole = self.codes.grid(expr, (*dims[:-1], double))
            for side, half in (("even", whole[..., 0::2]), ("odd", whole[..., 1::2])):
                if torch.equal(codes, half):
                    return make(side, expr, dims=expr.dims - {double} | {columns})
        return None

    def _ranges(self, codes: torch.Tensor) -> Expr | None:
        """What differs by ranges of columns of one size."""
        numbers = codes[0] - self.codes.places(codes[0])
        starts = [0, *(1 + (numbers.diff() != 0).nonzero().flatten()).tolist(), len(numbers)]
        if len(starts) > 8:
            return None
        found: list[tuple[float, Expr]] = []
        for start, stop in itertools.pairwise(starts):
            expr = self.codes.first(codes[0, start:])
            if not expr.dims <= {"M", "N"}:
                return None
            if not codes[:, start:stop].equal(self.codes.grid(expr, ("M", "N"))[:, start:stop]):
                return None
            found.append((stop, expr))
        return by_columns(found)
