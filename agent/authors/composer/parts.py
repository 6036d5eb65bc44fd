"""Parts of rows or columns, as a tile may read them."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

import torch

from coda_agent.agent.authors.composer.codes import Codes, Elements
from coda_agent.agent.authors.composer.expression import Expr, leaf
from coda_agent.primitives.tables import TABLES, Table


class Parts:
    """Such tensors of one trace; `lead` are its extents of rows."""

    def __init__(self, codes: Codes, lead: Sequence[int]) -> None:
        self.codes, self.lead = codes, [*lead]
        # What the tile reads of a tensor, and which of the tensor's elements each of its own is.
        self._readings: dict[Expr, list[tuple[Expr, torch.Tensor]]] = {}

    def table(self, name: str, position: int, shape: tuple[int, ...]) -> Elements:
        """A matrix; its leaf's `value` is the kind's place among `TABLES`."""
        key, dims = (f"{position:04d}",), frozenset({"M", "N"})
        return self.read_as(
            [
                (Expr("operand", (), dims, name, float(i), key), at)
                for i, kind in enumerate(TABLES)
                if (at := self._places(kind, *shape)) is not None
            ],
            shape,
        )

    def read_as(
        self, readings: list[tuple[Expr, torch.Tensor]], shape: tuple[int, ...]
    ) -> Elements:
        """A tensor of which the tile reads one of these."""
        raw = leaf("table", str(len(self._readings)), 0, frozenset({"M", "N"}))
        self._readings[raw] = readings
        return Elements((torch.arange(math.prod(shape)) + self.codes.base(raw)).reshape(shape))

    def whole(self, raw: Expr) -> list[tuple[Expr, torch.Tensor]]:
        """What the tile may read of a tensor, with the codes then."""
        return [(expr, at + self.codes.base(raw)) for expr, at in self._readings.get(raw, ())]

    def places_of(self, expr: Expr) -> list[torch.Tensor]:
        """Which elements of a tensor the tile reads as `expr`."""
        return [at for some in self._readings.values() for whole, at in some if whole == expr]

    def ways(self, shape: tuple[int, ...]) -> Iterator[torch.Tensor]:
        """Ways to read a tensor: which element each of the tile's is."""
        for i in range(len(shape) + 1):
            rows = [s for s in shape[:i] if s != 1]
            sample = rows == self.lead[:1] != self.lead
            if rows and not sample and rows not in (self.lead, self.lead[-1:]):
                continue
            for kind in TABLES:
                at = self._places(kind, math.prod(rows), math.prod(shape[i:]))
                if kind.sample == sample and at is not None:
                    yield at

    def _places(self, kind: type[Table], r: int, c: int) -> torch.Tensor | None:
        """Which element of an (R, C) table each of the tile's reads."""
        m, n = self.codes.extents["M"], self.codes.extents["N"]
        if m % r or n % (c * (kind.step or 1)):
            return None
        rows, columns = kind.entry(torch.arange(m), torch.arange(n), (m, n), (r, c))
        return rows[:, None] * c + columns
