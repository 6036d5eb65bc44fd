"""Tensors of a trace as integers: which expression stands where.

Views, slices, stacks and scatters run on these integers as ATen defines them, so no spelling of
them needs a rule.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

import torch

from coda_agent.agent.authors.composer.expression import Expr, const
from coda_agent.primitives.errors import ProgramError

_SHIFT = 40


@dataclass(frozen=True)
class Frame:
    """The dims of a shape; `flipped` if the shape reverses them."""

    dims: tuple[str, ...]
    flipped: bool = False


@dataclass(frozen=True, eq=False)
class Elements:
    """A tensor of the trace, element by element."""

    codes: torch.Tensor


@dataclass(frozen=True)
class Unusable:
    """A value that no epilogue takes: an error where it is used."""

    reason: str
    hint: str


class Codes:
    """The expressions of one trace, at its `extents`."""

    def __init__(self, extents: Mapping[str, int]) -> None:
        self.extents = extents
        self._numbers: dict[Expr, int] = {}
        self._exprs: list[Expr] = []

    def base(self, expr: Expr) -> int:
        """The code of its first element."""
        if expr not in self._numbers:
            self._numbers[expr] = len(self._exprs)
            self._exprs.append(expr)
        return self._numbers[expr] << _SHIFT

    def first(self, codes: torch.Tensor) -> Expr:
        """The expression that the first element is of."""
        return self._exprs[int(codes[(0,) * codes.ndim]) >> _SHIFT]

    def places(self, codes: torch.Tensor) -> torch.Tensor:
        """Which element of its expression each is."""
        return codes & ((1 << _SHIFT) - 1)

    def sources(self, elements: Elements) -> list[Expr]:
        """The expressions that `elements` takes values from."""
        return [self._exprs[int(i)] for i in (elements.codes >> _SHIFT).unique()]

    def only(self, codes: torch.Tensor) -> Expr | None:
        """The one expression that all elements are of; else None."""
        if not codes.numel():
            return None
        numbers = codes >> _SHIFT
        return self.first(codes) if bool((numbers == numbers[(0,) * codes.ndim]).all()) else None

    def grid(self, expr: Expr, dims: tuple[str, ...]) -> torch.Tensor:
        """Codes of `expr` over `dims`, which include its own."""
        own = [self.extents[d] if d in expr.dims else 1 for d in dims]
        codes = torch.arange(math.prod(own)).reshape(own) + self.base(expr)
        return codes.expand([self.extents[d] for d in dims])

    def write(self, expr: Expr, shape: tuple[int, ...], frame: Frame) -> Elements:
        """`expr` broadcast over a tensor of `shape`."""
        full = self.grid(expr, frame.dims)
        return Elements((full.mT if frame.flipped else full).reshape(shape))

    def constants(self, values: torch.Tensor) -> Elements:
        """A tensor of known values; of many it would be an operand."""
        distinct, which = torch.unique(values.double(), return_inverse=True)
        if len(distinct) > 4:
            raise ProgramError(
                "computes with a table of constants",
                hint="give the table to the reference as an input",
            )
        codes = [self.base(const(float(v))) for v in distinct]
        return Elements(torch.tensor(codes, dtype=torch.int64)[which].reshape(values.shape))

    def taken(
        self, codes: torch.Tensor, expr: Expr, dims: tuple[str, str]
    ) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Which rows and columns of a matrix `expr` another one is."""
        width = self.extents[dims[1]]
        at = codes - self.base(expr)
        if not codes.numel() or at.min() < 0 or at.max() >= self.extents[dims[0]] * width:
            return None
        rows, columns = at[:, 0] // width, at[0] % width
        same = at == rows[:, None] * width + columns
        return (rows, columns) if bool(same.all()) else None
