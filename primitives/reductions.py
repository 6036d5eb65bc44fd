"""Reductions over tiles: their kinds, a kernel's partials, and their finalisers."""

from __future__ import annotations

import math
from typing import TYPE_CHECKING, ClassVar

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Shape
from coda_agent.primitives.kinds import Lowering, Output

if TYPE_CHECKING:
    from quack.epilogue.ops import EpiOp

    from coda_agent.primitives.tiles import TileConfig


class Reduction(Output):
    """A reduction of rows or columns: partials a tile, a finaliser.

    Partials are folded in fp32 before any rounding. Final values of all of a program's reductions
    are one small launch more.

    Attributes:
        combine: "add", "max", "min" or "logsumexp".
        mean: Whether a sum is weighted by one over the block.
        over_rows: Whether it folds the rows of each column, with partials (N, ⌈M / block⌉) and
            final values (N,); otherwise the columns of each row, (M, ⌈N / block⌉) and (M,).
    """

    dims = ("M",)
    values = (Shape.TILE, Shape.HALF)
    stored = ("float32",)
    element_bytes = 4
    combine: ClassVar[str] = "add"
    mean: ClassVar[bool] = False
    over_rows: ClassVar[bool] = False

    @classmethod
    def identity(cls) -> float:
        """Give what it gives of nothing."""
        return {"add": 0.0, "min": math.inf}.get(cls.combine, -math.inf)

    @classmethod
    def block(cls, config: TileConfig) -> int:
        """Count the rows or columns that a partial folds at full width."""
        return config.tile_m if cls.over_rows else config.tile_n

    @classmethod
    def buffer(cls, m: int, n: int, config: TileConfig) -> tuple[int, ...]:
        """Give (M, ⌈N / block⌉), or over rows (⌈M / block⌉, N)."""
        if cls.over_rows:
            return -(-m // config.tile_m), n
        return m, -(-n // config.tile_n)

    @classmethod
    def combined(cls, x: torch.Tensor) -> torch.Tensor:
        """Combine the elements of the last dimension."""
        ways = {"add": x.sum, "max": x.amax, "min": x.amin, "logsumexp": x.logsumexp}
        return ways[cls.combine](-1)

    @classmethod
    def partials(cls, value: torch.Tensor, block: int) -> torch.Tensor:
        """Reduce `value` (M, N) over blocks of columns, or of rows.

        Returns:
            (M, ⌈N / block⌉), or (N, ⌈M / block⌉) for a reduction over rows. The partial of a mean
            is the block's sum over `block`, in a ragged last block too.
        """
        value = value.mT if cls.over_rows else value
        kept, folded = value.shape
        blocks, identity = -(-folded // block), cls.identity()
        padded = torch.nn.functional.pad(value, (0, blocks * block - folded), value=identity)
        tiles = padded.reshape(kept, blocks, block)
        if cls.over_rows and cls.combine in ("max", "min"):  # as the GPU, which passes NaN over
            tiles = torch.where(tiles.isnan(), identity, tiles)
        found = cls.combined(tiles)
        return found / block if cls.mean else found

    @classmethod
    def finalise(cls, raw: torch.Tensor, folded: int, block: int) -> torch.Tensor:
        """Fold partials of `folded` elements in blocks, over the last dimension."""
        way = cls.way(folded, block)
        if (raw.is_cuda or raw.is_meta) and raw.dtype.itemsize == 4:
            from coda_agent.primitives.fold import fold

            return fold(raw, *way)
        return cls.combined(raw) * way[1]

    @classmethod
    def way(cls, folded: int, block: int) -> tuple[str, float, float]:
        """Say how `fold.py` finalises partials of `folded` elements."""
        return cls.combine, block / folded if cls.mean else 1.0, 0.0

    @classmethod
    def store(cls, lowering: Lowering, o: str) -> EpiOp | str:
        from quack.epilogue.ops import ColVecReduce, OnlineLSEReduce, RowVecReduce

        name = lowering.names[o]
        if o in lowering.masked:
            from coda_agent.primitives.stores import MaskedColSum, MaskedRowSum

            return (MaskedColSum if cls.over_rows else MaskedRowSum)(name)
        if cls.combine == "logsumexp":
            return OnlineLSEReduce(name)
        if cls.combine in ("max", "min") and not cls.over_rows:
            from coda_agent.primitives.stores import MaxReduce, MinReduce

            return (MaxReduce if cls.combine == "max" else MinReduce)(name)
        op = RowVecReduce if cls.over_rows else ColVecReduce
        return op(name, combine=cls.combine, scaled=o in lowering.scaled)


class _OverRows(Reduction):
    dims = ("N",)
    values = (Shape.TILE,)
    over_rows = True


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

    NaN stays NaN.

        @epilogue(D=Tile, m=RowMax)
        def amax(acc):
            return {"D": acc, "m": absolute(acc)}
    """

    combine = "max"


class RowMin(Reduction):
    """Minimum of each row, for the zero points of asymmetric quantisation.

    NaN stays NaN.

        @epilogue(D=Tile, low=RowMin, high=RowMax)
        def extent(acc):
            return {"D": acc, "low": acc, "high": acc}
    """

    combine = "min"


class RowLogSumExp(Reduction):
    """log Σ exp of each row, kept stable by a running maximum (paper, section 3.1).

    A raw partial is the log-sum-exp of its block. Two MUFU.EX2 an element at most. Use it for
    cross-entropy: the loss of a row is this minus the target's logit.

        @epilogue(Z=Tile, lse=RowLogSumExp)
        def logits(acc):
            return {"Z": acc, "lse": acc}
    """

    combine = "logsumexp"


class ColSum(_OverRows):
    """Sum of each column, over the rows: gradients of norm weights and biases.

    The block is the tile's height; M, not N, is what it divides.

        @epilogue(D=Tile, g=ColSum)
        def weight_gradient(acc, x: Tile):
            return {"D": acc, "g": acc * x}
    """


class ColMax(_OverRows):
    """Maximum of each column, over the rows, for per-channel quantisation scales.

    NaN elements are passed over, as the GPU's max instruction does.

        @epilogue(D=Tile, m=ColMax)
        def channel_amax(acc):
            return {"D": acc, "m": absolute(acc)}
    """

    combine = "max"


REDUCTIONS = (RowSum, RowMean, RowMax, RowMin, RowLogSumExp, ColSum, ColMax)
