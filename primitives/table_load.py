"""Loads of tables of part of the rows or columns; only the lowering imports this.

Each thread reads the elements that its part of a subtile needs, past the edge those of the last row
and column. They come out of the cache, since many rows or columns share one.
"""

from __future__ import annotations

from typing import Any

import cutlass
from cutlass import Float32, Int32, Uint32, cute
from quack.epilogue.ops import EpiOp


class TableLoad(EpiOp):
    """A value for each element, which `kind.entry` finds in a matrix of any strides."""

    fn_port = "tile"

    def __init__(self, name: str, kind: Any) -> None:
        super().__init__(name)
        self.kind = kind

    def config_key(self) -> tuple[Any, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.kind.__name__,)

    def host_fake_arg(self, key: Any, fctx: Any) -> Any:
        return any_strides(key[0])

    def param_fields(self) -> list[tuple[Any, ...]]:
        return [(self.name, object, None)]

    def to_params(self, gemm: Any, args: Any) -> dict[str, Any]:
        return {self.name: getattr(args, self.name)}

    def begin(self, gemm: Any, param: Any, smem_tensor: Any, ctx: Any) -> Any:
        identity = cute.make_identity_tensor((ctx.tile_M, ctx.tile_N))
        first = ctx.tile_coord_mnkl[0] * ctx.tile_M, ctx.tile_coord_mnkl[1] * ctx.tile_N
        size = ctx.varlen_manager.len_m(ctx.batch_idx), ctx.varlen_manager.len_n()
        return param, ctx.partition_for_epilogue_fn(identity), first, size

    def begin_loop(self, gemm: Any, state: Any, epi_coord: Any) -> Any:
        table, places, first, size = state
        at = places[None, None, None, epi_coord[0], epi_coord[1]]
        found = cute.make_rmem_tensor(at.layout.shape, Float32)
        for i in range(cute.size(at)):
            row, column = (first[axis] + at[i][axis] for axis in (0, 1))
            found[i] = element(self.kind, table, row, column, size)
        return found


def element(kind: Any, table: Any, row: Any, column: Any, size: Any) -> Any:
    """What the output reads of a table at a place, which may lie past the edge."""
    # Unsigned, because a signed division takes twice the instructions.
    within = [
        Uint32(cutlass.min(Int32(x), Int32(n) - 1))  # pyright: ignore[reportPrivateImportUsage]
        for x, n in zip((row, column), size, strict=True)
    ]
    extents = ([Uint32(x) for x in some] for some in (size, table.shape))
    i, j = kind.entry(*within, *extents)
    return table[Int32(i), Int32(j)].to(Float32)


def any_strides(dtype: Any) -> Any:
    """A matrix as a kernel is compiled for: of any strides, at any address."""
    return cute.runtime.make_fake_tensor(
        dtype,
        (cute.sym_int(), cute.sym_int()),
        stride=(cute.sym_int64(), cute.sym_int64()),
        assumed_align=dtype.width // 8,
    )
