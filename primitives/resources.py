"""What a program declares: operands that it reads, outputs that it writes."""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Shape
from coda_agent.primitives.groups import GROUP_TILES
from coda_agent.primitives.kinds import (
    FLOATS,
    GEMM_DTYPES,
    HALVES,
    Lowering,
    Operand,
    Output,
)
from coda_agent.primitives.operation import Edge, Term
from coda_agent.primitives.reductions import (
    REDUCTIONS,
    ColMax,
    ColSum,
    RowLogSumExp,
    RowMax,
    RowMean,
    RowMin,
    RowSum,
)
from coda_agent.primitives.tables import (
    TABLES,
    PositionHeads,
    PositionPairs,
    PositionTable,
    SampleHeads,
    SampleTable,
)

if TYPE_CHECKING:
    from quack.epilogue.ops import EpiOp

__all__ = [
    "AddTile",
    "ColIndex",
    "ColMax",
    "ColSum",
    "ColVector",
    "HalfTile",
    "HeadTable",
    "PositionHeads",
    "PositionPairs",
    "PositionTable",
    "RowGather",
    "RowLogSumExp",
    "RowMax",
    "RowMean",
    "RowMin",
    "RowSum",
    "RowVector",
    "SampleHeads",
    "SampleTable",
    "Scalar",
    "Tile",
    "WideTile",
]

_FINITE, _GARBAGE = Edge(False, True), Edge(False, False)


class Tile(Operand, Output):
    """A full (M, N) operand or output, 16-bit or float32 whatever A and B are.

    As an operand it is read once through TMA (M·N·size bytes); as an output, which may be e4m3 too,
    it is rounded once, at the store. An operand arrives as fp32. Use it for residuals and for every
    full-width result.

        @epilogue(O=Tile)
        def residual(acc, C: Tile):
            return {"O": acc + C}
    """

    dims = ("M", "N")
    varies = Shape.TILE
    dtypes = FLOATS
    loader = "TileLoad"
    values = (Shape.TILE,)
    stored = (*FLOATS, "float8_e4m3fn")
    instruction = "UTMASTG"

    @classmethod
    def store(cls, lowering: Lowering, o: str) -> EpiOp | str:
        from coda_agent.primitives.stores import PairStore

        name = lowering.names[o]
        return PairStore(name) if lowering.program.paired else name


class HalfTile(Output):
    """An output of half width, (M, N/2): one value for each adjacent column pair, 16-bit or e4m3.

    Costs M·N bytes at 16 bit. Use it for gates; the value comes from `pairs`.

        @epilogue(O=HalfTile)
        def gated(acc):
            gate, up = pairs(acc)
            return {"O": silu(gate) * up}
    """

    dims = ("M", "N/2")
    values = (Shape.HALF,)
    stored = (*HALVES, "float8_e4m3fn")
    instruction = "UTMASTG"

    @classmethod
    def store(cls, lowering: Lowering, o: str) -> EpiOp | str:
        from coda_agent.primitives.stores import HalfStore

        return HalfStore(lowering.names[o])


class HeadTable(Operand):
    """An (S, W) table repeated over the (M, N) output: its element (m % S, n % W); arrives as fp32.

    W is a multiple of 32 that divides N; S is at least M, or a multiple of 128. Read through TMA:
    S·W elements from memory, M·N from the L2 cache. Use it for the cosines and sines of rotary
    embedding, W being the head dimension and S the sequence length; a `RowVector` of ones and zeros
    blends out columns that are not rotated. `rotary` needs no table.

        @epilogue(O=Tile)
        def rope(acc, cs: HeadTable):
            x, y = pairs(acc)
            cosine, sine = pairs(cs)
            u, v = rotate(x, y, cosine, sine)
            return {"O": interleave(u, v)}
    """

    dims = ("S", "W")
    varies = Shape.TILE
    dtypes = FLOATS
    element_bytes = 0  # its rows and columns are not known here, and few beside M·N
    edges = _GARBAGE, _GARBAGE
    transposes = False

    @classmethod
    def extents(cls, m: int, n: int) -> tuple[int, ...]:
        """Of one possible table."""
        return m, 128

    @classmethod
    def fault(cls, value: Any, lead: tuple[int, ...], n: int) -> str:
        got = tuple(value.shape) if hasattr(value, "shape") else value
        (s, w), m = got if isinstance(got, tuple) and len(got) == 2 else (0, 0), math.prod(lead)
        if s and w and not n % w and not w % 32 and (s >= m or not s % 128):
            return ""
        return (
            f"has shape {got}, expected (S, W) with W a multiple of 32 that divides {n}, and S at "
            f"least {m} or a multiple of 128"
        )

    @classmethod
    def lifted(cls, value: Term, acc: torch.Tensor) -> torch.Tensor:
        table = super().lifted(value, acc)
        (m, n), (s, w) = acc.shape, table.shape
        return table.repeat(-(-m // s), n // w)[:m]

    @classmethod
    def load(cls, name: str) -> EpiOp:
        from coda_agent.primitives.head_table import HeadTableLoad

        return HeadTableLoad(name)


class WideTile(Operand, Output):
    """A double-width (M, 2N) operand or output, 16-bit: two numbers for each element of the GEMM.

    `pairs` takes the operand apart into two (M, N) values, `interleave` makes the output. A program
    has one of each, of one dtype, or none; it cannot pair the accumulator's own columns as well.
    Read and written through TMA as 32-bit words (4·M·N bytes each). Use it for the backward pass of
    a gate (paper, section 4): the saved [g₀, u₀, g₁, u₁, …] in, their gradients out.

        @epilogue(dZ=WideTile)
        def product_backward(acc, Z: WideTile):
            gate, up = pairs(Z)
            return {"dZ": interleave(acc * up, acc * gate)}
    """

    dims = ("M", "2*N")
    varies = Shape.WIDE
    dtypes = HALVES
    edges = _FINITE, _FINITE
    values = (Shape.WIDE,)
    stored = HALVES
    instruction = "UTMASTG"


class AddTile(Output):
    """A full (M, N) output added to what its buffer holds: the value is what is added.

    Stored by TMA's reduce-add, which neither loads the old value nor spends registers on it; the
    value is rounded to the output's type first and the sum again, so 16-bit types round twice. One
    a program. Use it to accumulate gradients in place.

        @epilogue(dX=AddTile)
        def accumulate(acc, r: ColVector):
            return {"dX": acc * r}
    """

    dims = ("M", "N")
    values = (Shape.TILE,)
    stored = FLOATS
    accumulates = True
    instruction = "UTMAREDG"


class ColVector(Operand):
    """An operand of length M, one number a row, 16-bit or float32; arrives as fp32.

    Costs 4·M bytes for each column of tiles. Use it for per-row scales such as RMSNorm's 1/rms.

        @epilogue(O=Tile)
        def scaled(acc, r: ColVector):
            return {"O": acc * r}
    """

    dims = ("M",)
    varies = Shape.COL
    dtypes = FLOATS
    vector = True
    edges = _FINITE, _GARBAGE
    loader = "ColVecLoad"

    @classmethod
    def lifted(cls, value: Term, acc: torch.Tensor) -> torch.Tensor:
        return super().lifted(value, acc)[:, None]


class RowVector(Operand):
    """An operand of length N, one number a column, 16-bit or float32; arrives as fp32.

    Costs 4·N bytes for each row of tiles. Use it for biases and norm weights.

        @epilogue(O=Tile)
        def biased(acc, b: RowVector):
            return {"O": acc + b}
    """

    dims = ("N",)
    varies = Shape.ROW
    dtypes = FLOATS
    vector = True
    edges = _GARBAGE, _FINITE
    loader = "RowVecLoad"


class Scalar(Operand):
    """A number given at call time, or a one-element float32 CUDA tensor, read by the kernel.

    Changing it recompiles nothing. Use it for alpha and beta, and for the scales of FP8 operands.

        @epilogue(O=Tile)
        def axpby(acc, C: Tile, alpha: Scalar, beta: Scalar):
            return {"O": alpha * acc + beta * C}
    """

    dims = ()
    varies = Shape.SCALAR
    dtypes = ()
    element_bytes = 0
    edges = _FINITE, _FINITE
    loader = "Scalar"

    @classmethod
    def fault(cls, value: Any, lead: tuple[int, ...], n: int) -> str:
        if isinstance(value, (int, float)):
            return ""
        got = f"{tuple(value.shape)} {value.dtype}"
        good = value.numel() == 1 and str(value.dtype) == "torch.float32"
        return "" if good else f"is {got}, expected a number or one float32"

    @classmethod
    def lifted(cls, value: Term, acc: torch.Tensor) -> torch.Tensor:
        return super().lifted(value, acc).reshape(())


class ColIndex(Operand):
    """An operand of length M, int32 or int64: a column for each row, for `gather` alone.

    Costs 4·M or 8·M bytes for each column of tiles. Use it for the targets of a cross-entropy.

        @epilogue(Z=Tile, target=RowGather)
        def logits(acc, y: ColIndex):
            return {"Z": acc, "target": gather(acc, y)}
    """

    dims = ("M",)
    varies = Shape.INDEX
    dtypes = ("int32", "int64")
    element_bytes = 8
    edges = _GARBAGE, _GARBAGE
    loader = "ColVecLoad"

    @classmethod
    def fault(cls, value: Any, lead: tuple[int, ...], n: int) -> str:
        if found := super().fault(value, lead, n):
            return found
        good = str(value.dtype).removeprefix("torch.") in cls.dtypes
        return "" if good else f"is {value.dtype}, expected {' or '.join(cls.dtypes)} indices"

    @classmethod
    def lifted(cls, value: Any, acc: torch.Tensor) -> torch.Tensor:
        return value.long()


class OddRows(Operand):
    """The odd rows of B, (N/2, K), where B itself has the even ones alone.

    No program reads it: it says where the product's operands lie, as two weights that a program
    pairs lie in a model. Authors do not write it; `spread` adds it.
    """

    dims = ("N/2", "K")
    varies = Shape.INDEX  # quack hands it to no function
    dtypes = GEMM_DTYPES
    transposes = False

    @classmethod
    def extents(cls, m: int, n: int) -> tuple[int, ...]:
        return n // 2, 0  # K is counted with B's

    @classmethod
    def fault(cls, value: Any, lead: tuple[int, ...], n: int) -> str:
        return "" if value.shape[0] * 2 == n else f"has {value.shape[0]} rows, expected {n // 2}"

    @classmethod
    def lifted(cls, value: Any, acc: torch.Tensor) -> torch.Tensor:
        return value

    @classmethod
    def load(cls, name: str) -> EpiOp:
        from coda_agent.primitives.stores import Address

        return Address(name)


class RowGather(Output):
    """An output of one element of each row, (M,), float32 or 16-bit: what `gather` took in fp32.

    Rows whose index lies outside [0, N) give 0. Costs 4·M bytes.

        @epilogue(Z=Tile, target=RowGather)
        def logits(acc, y: ColIndex):
            return {"Z": acc, "target": gather(acc, y)}
    """

    dims = ("M",)
    values = (Shape.GATHERED,)
    stored = FLOATS
    element_bytes = 4

    @classmethod
    def store(cls, lowering: Lowering, o: str) -> EpiOp | str:
        from coda_agent.primitives.stores import RowSelect

        return RowSelect(lowering.names[o], lowering.indices[lowering.index_of(o)])


OPERAND_KINDS: dict[str, type[Operand]] = {
    kind.__name__: kind
    for kind in (Tile, HeadTable, *TABLES, WideTile, ColVector, RowVector, Scalar, ColIndex)
}
OUTPUT_KINDS: dict[str, type[Output]] = {
    kind.__name__: kind
    for kind in (Tile, HalfTile, WideTile, AddTile, RowGather, *GROUP_TILES, *REDUCTIONS)
}
"""What a program may declare, by name."""


def steps(element: int, outputs: Iterable[int], *, half: bool, group: int = 0) -> tuple[int, int]:
    """Find what N and K must be multiples of, for TMA.

    Args:
        element: Bytes of an element of A and B.
        outputs: Bytes of an element of each output.
    """
    return max((32 if half else 16) // min(*outputs, 2), group), 16 // element
