"""A table repeated over heads and sequences, by TMA; for the lowering.

quack's `RotaryCosSinTMALoad` wraps the table over the columns of one tile, which must be a multiple
or a divisor of the head. Here each subtile of the epilogue wraps by itself, over columns and rows,
so every tile will do whose subtiles divide the head and the sequence: on SM90 they are 64 or 128
rows of 32 columns.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from cutlass import Int32, cute
from quack import copy_utils
from quack.epilogue.rotary import RotaryCosSinTMALoad

if TYPE_CHECKING:
    from cutlass.pipeline import PipelineAsync, PipelineState


class HeadTableLoad(RotaryCosSinTMALoad):
    """A tile load of table elements (m % S, n % head_dim)."""

    def load_g2s_copy_fn(
        self,
        gemm: Any,
        params: object,
        smem_tensor: cute.Tensor,
        tile_coord_mnkl: tuple[Int32, ...],
        varlen_manager: Any,
        epi_pipeline: PipelineAsync,
    ) -> Callable[..., None]:
        table = varlen_manager.offset_batch_epi(getattr(params, self.name), tile_coord_mnkl[3])
        epi_tile = getattr(params, self._epi_tile_key())
        rows, columns = (cute.size(extent) for extent in epi_tile)
        tile_m, tile_n = gemm.cta_tile_shape_mnk[:2]
        if table.shape[1] % columns or tile_m % rows or tile_n % columns:
            raise ValueError(
                f"a table of {table.shape[1]} columns, expected a multiple of {columns}"
            )
        boxes = cute.zipped_divide(table, epi_tile)
        copy, _, _ = copy_utils.tma_get_copy_fn(
            getattr(params, self._tma_atom_key()),
            cta_coord=0,
            cta_layout=cute.make_layout(1),
            src_tensor=boxes,
            dst_tensor=smem_tensor,
        )
        produce = copy_utils.tma_producer_copy_fn(copy, epi_pipeline)
        first = tile_coord_mnkl[0] * (tile_m // rows), tile_coord_mnkl[1] * (tile_n // columns)
        down, across = cute.ceil_div(table.shape[0], rows), table.shape[1] // columns
        # SM100's load warp counts subtiles; the others name them.
        subtiles: Any = cute.zipped_divide(cute.make_layout((tile_m, tile_n)), epi_tile)
        order = cute.make_ordered_layout(
            subtiles.shape[1], order=(0, 1) if gemm.epi_m_major else (1, 0)
        )

        def wrapped(src_idx: Any, producer_state: PipelineState, **kwargs: object) -> None:
            at = src_idx if isinstance(src_idx, tuple) else order.get_hier_coord(src_idx)
            box = (first[0] + at[0]) % down, (first[1] + at[1]) % across
            produce(box, producer_state, **kwargs)

        return wrapped
