"""Sums without what lies past the edge; only the lowering imports this."""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import cute
from quack.epilogue.ops import ColVecReduce, RowVecReduce


class _Masked:
    """Sets elements past the edge to 0 before they are folded.

    Past the edge the accumulator and TMA-loaded tiles read 0, but vectors read whatever shared
    memory held, so a value that is not 0 there (a bias, σ(0) = ½) would leak into the last block.
    quack 0.6.5 masks maxima only.
    """

    def _mask_oob_active(self) -> bool:
        return True

    @cute.jit
    def _mask_oob(self: Any, frag, coords, limit, tile_shape_mn):
        axis = self._reduce_dim()
        stride = (1, 0) if axis == 0 else (0, 1)
        places = cute.composition(cute.make_layout(tile_shape_mn, stride=stride), coords.layout)
        inside = limit - coords[0][axis]
        for i in cutlass.range(  # pyright: ignore[reportPrivateImportUsage]
            cute.size(frag), unroll_full=True
        ):
            place = cute.crd2idx(i, places)
            frag[i] = frag[i] if place < inside else 0.0


class MaskedRowSum(_Masked, ColVecReduce):
    """quack's sum over the columns of each row, without columns past N."""


class MaskedColSum(_Masked, RowVecReduce):
    """quack's sum over the rows of each column, without rows past M."""
