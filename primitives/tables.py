"""Tables of part of the rows or columns, which elements read.

The kernel finds the element by its place, so nothing is expanded: a gate of each sample, a position
embedding, a number for each head. `entry` says where; all three readings go by it.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Shape
from coda_agent.primitives.kinds import FLOATS, Operand
from coda_agent.primitives.operation import Edge, Term

if TYPE_CHECKING:
    from quack.epilogue.ops import EpiOp

__all__ = ["PositionHeads", "PositionPairs", "PositionTable", "SampleHeads", "SampleTable"]


class Table(Operand):
    """An (R, C) operand of any strides, repeated over the output.

    Attributes:
        sample: Whether a row of it serves M / R adjacent rows; else row m reads row m % R.
        step: How many adjacent columns read one; 0 where that is N / C.
        subtile: Columns of the largest part of a tile that an SM90 kernel stores at once; those of
            other parts divide it.
    """

    dims = ("R", "C")
    varies = Shape.TILE
    dtypes = FLOATS
    element_bytes = 0  # its rows and columns are not known here, and few beside M·N
    edges = Edge(False, True), Edge(False, True)
    transposes = False
    by_tma = False
    sample: ClassVar[bool]
    step: ClassVar[int]
    subtile: ClassVar[int] = 32

    @classmethod
    def form(cls, columns: int, strides: Sequence[int], address: int) -> int:
        """Choose which of three kernels reads a table.

        1 is for one of a single column, `subtile` where the columns come in whole subtiles and can
        be loaded in twos, else 0.
        """
        aligned = strides[1] == 1 and strides[0] % 2 == 0 and address % 16 == 0
        whole = columns % cls.subtile == 0 and cls.step > 0 and aligned
        return cls.subtile if whole else 1 if columns == 1 else 0

    @classmethod
    def entry(
        cls, row: Any, column: Any, size: Iterable[Any], table: Iterable[Any]
    ) -> tuple[Any, Any]:
        """Find which element of a table the output reads at a place."""
        (m, n), (r, c) = size, table
        found = column if cls.step == 1 else column // (cls.step or n // c)
        return row // (m // r) if cls.sample else row % r, found % c

    @classmethod
    def extents(cls, m: int, n: int) -> tuple[int, ...]:
        """Of one possible table."""
        return 1, n // (cls.step or 16)

    @classmethod
    def fault(cls, value: Any, lead: tuple[int, ...], n: int) -> str:
        got = tuple(value.shape) if hasattr(value, "shape") else value
        (r, c), m = got if isinstance(got, tuple) and len(got) == 2 else (0, 0), math.prod(lead)
        if r and c and not m % r and not n % (c * (cls.step or 1)):
            return ""
        columns = f"{n}" if cls.step < 2 else f"{n} / {cls.step}"
        return f"has shape {got}, expected (R, C) with R a divisor of {m} and C of {columns}"

    @classmethod
    def lifted(cls, value: Term, acc: torch.Tensor) -> torch.Tensor:
        table, (m, n) = super().lifted(value, acc), acc.shape
        rows, columns = (torch.arange(x, device=acc.device) for x in (m, n))
        i, j = cls.entry(rows, columns, (m, n), table.shape)
        return table[i[:, None], j]

    @classmethod
    def load(cls, name: str) -> EpiOp:
        from coda_agent.primitives.table_load import TableLoad

        return TableLoad(name, cls)


class SampleTable(Table):
    """A (B, W) table: M / B adjacent rows read one row of it, and column n reads n % W.

    Read element by element through the cache. W divides N: N itself, a head's width, or 1. Use it
    for what each sample of a batch has: shift, scale and gate of a modulated block, a drop path.

        @epilogue(O=Tile)
        def gated(acc, x: Tile, gate: SampleTable):
            return {"O": x + gate * acc}
    """

    sample, step = True, 1


class SampleHeads(Table):
    """A (B, H) table: M / B adjacent rows and N / H adjacent columns read one element.

    Use it for what each head of each sample has.

        @epilogue(O=Tile)
        def scaled(acc, scale: SampleHeads):
            return {"O": acc * scale}
    """

    sample, step = True, 0


class PositionTable(Table):
    """An (S, W) table repeated over rows and columns: row m reads m % S, column n reads n % W.

    Read element by element through the cache; S divides M and W divides N. Use it for position
    embeddings (W = N), for the weights of a norm of each head (S = 1, W a head's width), and with
    `rotate_half` for cosines and sines. A `HeadTable` goes through TMA, which asks more of S and W.

        @epilogue(O=Tile)
        def embedded(acc, position: PositionTable):
            return {"O": acc + position}
    """

    sample, step = False, 1


class PositionHeads(Table):
    """An (S, H) table: row m reads m % S, and N / H adjacent columns read one element.

    Use it with S = 1 for a number of each head, such as ALiBi's slopes.

        @epilogue(O=Tile)
        def scaled(acc, scale: PositionHeads):
            return {"O": acc * scale}
    """

    sample, step = False, 0


class PositionPairs(Table):
    """An (S, W) table: row m reads m % S, column n reads n // 2 % W, so both of a pair read one.

    Use it for the cosines and sines of adjacent pairs, and for a tensor (M, N/2) beside `pairs`.

        @epilogue(O=Tile)
        def rope(acc, c: PositionPairs, s: PositionPairs):
            x, y = pairs(acc)
            cosine, _ = pairs(c)
            sine, _ = pairs(s)
            u, v = rotate(x, y, cosine, sine)
            return {"O": interleave(u, v)}
    """

    sample, step = False, 2


TABLES: tuple[type[Table], ...] = (
    PositionTable, SampleTable, PositionPairs, PositionHeads, SampleHeads
)  # fmt: skip
"""The kinds of tables, those first that are meant where several read the same."""
