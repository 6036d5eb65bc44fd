"""What a program declares: the operands it reads and the outputs it writes.

These classes are markers. Operand kinds are values to a type checker, so that programs check;
nothing makes instances.
"""

from __future__ import annotations

from typing import ClassVar

from coda_agent.primitives.graph import Shape, Value


class Tile(Value):
    """A full (M, N) operand or output, in the spec's element type.

    As an operand it is read once through TMA (M·N·size bytes); as an output it is rounded once, at
    the store. An operand arrives as fp32. Use it for residuals and for every full-width result.

        @epilogue(O=Tile)
        def residual(acc, C: Tile):
            return {"O": acc + C}
    """


class HalfTile:
    """An output of half width, (M, N/2): one value for each adjacent column pair, 16-bit.

    Costs M·N bytes at 16 bit. Use it for gates; the value comes from `pairs`.

        @epilogue(O=HalfTile)
        def gated(acc):
            gate, up = pairs(acc)
            return {"O": silu(gate) * up}
    """


class ColVector(Value):
    """An operand of length M, one number a row, any float dtype; arrives as fp32.

    Costs 4·M bytes for each column of tiles. Use it for per-row scales such as RMSNorm's 1/rms.

        @epilogue(O=Tile)
        def scaled(acc, r: ColVector):
            return {"O": acc * r}
    """


class RowVector(Value):
    """An operand of length N, one number a column, any float dtype; arrives as fp32.

    Costs 4·N bytes for each row of tiles. Use it for biases and norm weights.

        @epilogue(O=Tile)
        def biased(acc, b: RowVector):
            return {"O": acc + b}
    """


class Scalar(Value):
    """A Python number given at call time; changing it recompiles nothing.

    Use it for alpha and beta.

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
    """An output of one element of each row, (M,) float32: what `gather` took, before any rounding.

    Rows whose index lies outside [0, N), and elements of -∞, give 0. Costs 4·M bytes.

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


OPERAND_SHAPES: dict[type, Shape] = {
    Tile: Shape.TILE,
    ColVector: Shape.COL,
    RowVector: Shape.ROW,
    Scalar: Shape.SCALAR,
    ColIndex: Shape.INDEX,
}
REDUCTIONS = (RowSum, RowMean, RowMax, RowLogSumExp, ColSum, ColMax)
OUTPUT_KINDS: tuple[type, ...] = (Tile, HalfTile, RowGather, *REDUCTIONS)
