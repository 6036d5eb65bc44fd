"""A row sum that ignores columns past N. Imports cutlass: only the lowering imports this module."""

from __future__ import annotations

import cutlass
from cutlass import cute
from quack.epilogue.ops import ColVecReduce


class MaskedRowSum(ColVecReduce):
    """quack's row sum with columns past N set to 0 first.

    Past the edge the accumulator and TMA-loaded tiles read 0, but vectors read whatever shared
    memory held, so a value that is not 0 there (a bias, σ(0) = ½) would leak into the last block.
    quack 0.6.5 masks maxima only.
    """

    def _mask_oob_active(self):
        return True

    @cute.jit
    def _mask_oob(self, frag, coords, limit, tile_shape_mn):
        columns = cute.composition(cute.make_layout(tile_shape_mn, stride=(0, 1)), coords.layout)
        inside = limit - coords[0][1]
        for i in cutlass.range(  # pyright: ignore[reportPrivateImportUsage]
            cute.size(frag), unroll_full=True
        ):
            column = cute.crd2idx(i, columns)
            frag[i] = frag[i] if column < inside else 0.0
