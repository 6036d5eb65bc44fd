"""What a program declares: the operands it reads and the outputs it writes.

These classes are markers. Operand kinds are values to a type checker, so that programs check;
nothing makes instances.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import ClassVar

from coda_agent.primitives.graph import Shape, Value

__all__ = [
    "AddTile",
    "ColIndex",
    "ColMax",
    "ColSum",
    "ColVector",
    "HalfTile",
    "HeadTable",
    "RowGather",
    "RowLogSumExp",
    "RowMax",
    "RowMean",
    "RowSum",
    "RowVector",
    "Scalar",
    "Tile",
    "WideTile",
]


class Tile(Value):
    """A full (M, N) operand or output, 16-bit or float32 whatever A and B are.

    As an operand it is read once through TMA (M·N·size bytes); as an output, which may be e4m3 too,
    it is rounded once, at the store. An operand arrives as fp32. Use it for residuals and for every
    full-width result.

        @epilogue(O=Tile)
        def residual(acc, C: Tile):
            return {"O": acc + C}
    """


class HalfTile:
    """An output of half width, (M, N/2): one value for each adjacent column pair, 16-bit or e4m3.

    Costs M·N bytes at 16 bit. Use it for gates; the value comes from `pairs`.

        @epilogue(O=HalfTile)
        def gated(acc):
            gate, up = pairs(acc)
            return {"O": silu(gate) * up}
    """


class HeadTable(Value):
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


class WideTile(Value):
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


class AddTile:
    """A full (M, N) output added to what its buffer holds: the value is what is added.

    Stored by TMA's reduce-add, which neither loads the old value nor spends registers on it; the
    value is rounded to the output's type first and the sum again, so 16-bit types round twice. One
    a program. Use it to accumulate gradients in place.

        @epilogue(dX=AddTile)
        def accumulate(acc, r: ColVector):
            return {"dX": acc * r}
    """


class ColVector(Value):
    """An operand of length M, one number a row, 16-bit or float32; arrives as fp32.

    Costs 4·M bytes for each column of tiles. Use it for per-row scales such as RMSNorm's 1/rms.

        @epilogue(O=Tile)
        def scaled(acc, r: ColVector):
            return {"O": acc * r}
    """


class RowVector(Value):
    """An operand of length N, one number a column, 16-bit or float32; arrives as fp32.

    Costs 4·N bytes for each row of tiles. Use it for biases and norm weights.

        @epilogue(O=Tile)
        def biased(acc, b: RowVector):
            return {"O": acc + b}
    """


class Scalar(Value):
    """A number given at call time, or a one-element float32 CUDA tensor, read by the kernel.

    Changing it recompiles nothing. Use it for alpha and beta, and for the scales of FP8 operands.

        @epilogue(O=Tile)
        def axpby(acc, C: Tile, alpha: Scalar, beta: Scalar):
            return {"O": alpha * acc + beta * C}
    """


class ColIndex(Value):
    """An operand of length M, int32 or int64: a column for each row, for `gather` alone.

    Costs 4·M or 8·M bytes for each column of tiles. Use it for the targets of a cross-entropy.

        @epilogue(Z=Tile, target=RowGather)
        def logits(acc, y: ColIndex):
            return {"Z": acc, "target": gather(acc, y)}
    """


class RowGather:
    """An output of one element of each row, (M,), float32 or 16-bit: what `gather` took in fp32.

    Rows whose index lies outside [0, N) give 0. Costs 4·M bytes.

        @epilogue(Z=Tile, target=RowGather)
        def logits(acc, y: ColIndex):
            return {"Z": acc, "target": gather(acc, y)}
    """


class Reduction:
    """A reduction of a tile's rows or columns: float32 partials a tile, then a finaliser.

    Partials are folded in fp32 before any rounding. Final values are one small launch more.

    Attributes:
        combine: "add", "max" or "logsumexp".
        mean: Whether a sum is weighted by one over the block.
        over_rows: Whether it folds the rows of each column, with partials (N, ⌈M / block⌉) and
            final values (N,); otherwise the columns of each row, (M, ⌈N / block⌉) and (M,).
    """

    combine: ClassVar[str] = "add"
    mean: ClassVar[bool] = False
    over_rows: ClassVar[bool] = False


class RowSum(Reduction):
    """Sum of each row.

    Returning a product folds it as fused multiply-adds.

        @epilogue(D=Tile, s=RowSum)
        def squares(acc):
            return {"D": acc, "s": acc * acc}
    """


class RowMean(Reduction):
    """Mean of each row (paper, section 3.2).

    A raw partial is the block's sum over the block width, in a ragged last block too.

        @epilogue(D=Tile, s=RowMean)
        def statistics(acc):
            return {"D": acc, "s": acc * acc}
    """

    mean = True


class RowMax(Reduction):
    """Maximum of each row, for quantisation scales and softmax statistics.

    NaN elements are passed over, as the GPU's max instruction does.

        @epilogue(D=Tile, m=RowMax)
        def amax(acc):
            return {"D": acc, "m": absolute(acc)}
    """

    combine = "max"


class RowLogSumExp(Reduction):
    """log Σ exp of each row, kept stable by a running maximum (paper, section 3.1).

    A raw partial is the log-sum-exp of its block. Two MUFU.EX2 an element at most. Use it for
    cross-entropy: the loss of a row is this minus the target's logit.

        @epilogue(Z=Tile, lse=RowLogSumExp)
        def logits(acc):
            return {"Z": acc, "lse": acc}
    """

    combine = "logsumexp"


class ColSum(Reduction):
    """Sum of each column, over the rows: gradients of norm weights and biases.

    The block is the tile's height; M, not N, is what it divides.

        @epilogue(D=Tile, g=ColSum)
        def weight_gradient(acc, x: Tile):
            return {"D": acc, "g": acc * x}
    """

    over_rows = True


class ColMax(Reduction):
    """Maximum of each column, over the rows, for per-channel quantisation scales.

    NaN elements are passed over, as the GPU's max instruction does.

        @epilogue(D=Tile, m=ColMax)
        def channel_amax(acc):
            return {"D": acc, "m": absolute(acc)}
    """

    combine = "max"
    over_rows = True


GEMM_DTYPES = ("bfloat16", "float16", "float8_e4m3fn")
"""Element types of A and B, which are equal."""

OPERAND_SHAPES: dict[type, Shape] = {
    Tile: Shape.TILE,
    HeadTable: Shape.TILE,
    WideTile: Shape.WIDE,
    ColVector: Shape.COL,
    RowVector: Shape.ROW,
    Scalar: Shape.SCALAR,
    ColIndex: Shape.INDEX,
}
REDUCTIONS = (RowSum, RowMean, RowMax, RowLogSumExp, ColSum, ColMax)
OUTPUT_KINDS: tuple[type, ...] = (Tile, HalfTile, WideTile, AddTile, RowGather, *REDUCTIONS)


_DIMS: dict[type, tuple[str, ...]] = {
    Scalar: (),
    RowVector: ("N",),
    Tile: ("M", "N"),
    AddTile: ("M", "N"),
    HalfTile: ("M", "N/2"),
    WideTile: ("M", "2*N"),
}


_HALVES = ("bfloat16", "float16")
_FLOATS = (*_HALVES, "float32")
OPERAND_DTYPES: dict[type, tuple[str, ...]] = {
    **dict.fromkeys((Tile, HeadTable, ColVector, RowVector), _FLOATS),
    WideTile: _HALVES,
    ColIndex: ("int32", "int64"),
}
"""Element types of operands; a scalar is a number, whatever a spec calls it."""
OUTPUT_DTYPES: dict[type, tuple[str, ...]] = {
    Tile: (*_FLOATS, "float8_e4m3fn"),
    HalfTile: (*_HALVES, "float8_e4m3fn"),
    WideTile: _HALVES,
    AddTile: _FLOATS,
    RowGather: _FLOATS,
    **dict.fromkeys(REDUCTIONS, ("float32",)),
}


def steps(element: int, outputs: Iterable[int], *, half: bool) -> tuple[int, int]:
    """What N and K must be multiples of, since TMA moves rows in units of 16 bytes.

    Args:
        element: Bytes of an element of A and B.
        outputs: Bytes of an element of each output.
        half: Whether an output has half width.
    """
    return (32 if half else 16) // min(*outputs, 2), 16 // element


def dims(kind: type) -> tuple[str, ...]:
    """The shape of a resource in terms of M and N, a reduction's final value."""
    over_rows = issubclass(kind, Reduction) and kind.over_rows
    return _DIMS.get(kind, ("N",) if over_rows else ("M",))
