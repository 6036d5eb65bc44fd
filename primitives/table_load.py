"""Loads of tables of part of rows or columns; for the lowering.

- Each thread reads the elements that its part of a subtile needs, past the edge those of the last
  row and column. They come out of the cache, since many rows or columns share one.
- A subtile's loads stand by themselves: their addresses follow from a row that the compiler cannot
  trace back. Else it keeps every element's address for later subtiles, 64 bits each, and spills.
- Where columns come in subtiles of the table's, a row has one address and all else is constant.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import cutlass
from cutlass import Float32, Int32, Int64, Numeric, Uint32, cute
from cutlass._mlir.dialects import llvm
from cutlass._mlir_helpers.arith import ArithValue
from quack.cute_dsl_utils import torch2cute_dtype_map
from quack.epilogue.ops import EpiContext

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.group_store import Coord, Fragments, Given, State

if TYPE_CHECKING:
    from coda_agent.primitives.tables import Table

    Place = int | Int32 | Uint32
    Size = tuple[Place, Place]


class TableLoad(Given):
    """A value for each element, found by `kind.entry` in a strided matrix."""

    fn_port = "tile"

    def __init__(self, name: str, kind: Any) -> None:
        super().__init__(name)
        self.kind = kind

    def config_key(self) -> tuple[str]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.kind.__name__,)

    def host_arg_key(self, value: torch.Tensor) -> tuple[type[Numeric], int]:
        form = self.kind.form(value.shape[1], value.stride(), value.data_ptr())
        return torch2cute_dtype_map[value.dtype], form

    def host_fake_arg(self, key: tuple[type[Numeric], int], fctx: object) -> Any:
        dtype, form = key
        if form == 0:
            return any_strides(dtype)
        whole = form > 1
        # `begin_loop` finds the form in what is static here.
        return cute.runtime.make_fake_tensor(
            dtype,
            (cute.sym_int(), cute.sym_int() if whole else 1),
            stride=(cute.sym_int64(divisibility=2 if whole else 1), 1),
            assumed_align=dtype.width // (4 if whole else 8),
        )

    def begin(
        self, gemm: object, param: cute.Tensor, smem_tensor: object, ctx: EpiContext
    ) -> State:
        places = Fragments(ctx)
        first = ctx.tile_coord_mnkl[0] * ctx.tile_M, ctx.tile_coord_mnkl[1] * ctx.tile_N
        size = ctx.varlen_manager.len_m(ctx.batch_idx), ctx.varlen_manager.len_n()
        return param, places, first, size

    def begin_loop(self, gemm: object, state: State, epi_coord: Coord) -> cute.Tensor:
        table, places, first, size = state
        at = places.coordinates[None, None, None, *epi_coord]
        found = cute.make_rmem_tensor(at.layout.shape, Float32)
        start = first[1] + at[0][1]
        base, used = _opaque(Int32(first[0] + at[0][0])), {}
        for x in {*places.offsets[0]}:
            row, _ = _inside(base + x, 0, size)
            used[x] = Int64(_entry(self.kind, table, row, 0, size)[0])
        if cute.is_static(table.shape[1]):
            numbers = {x: table[i, 0].to(Float32) for x, i in used.items()}
            for i, x in enumerate(places.offsets[0]):
                found[i] = numbers[x]
        elif cute.is_static(table.stride[1]) and self.kind.subtile % places.columns == 0:
            # No place is partly past the edge. An element of the table is for two columns, or for
            # one, and then two are loaded.
            _, column = _entry(self.kind, table, 0, start, size)
            start = Int64(column if self.kind.step == 2 else Int32(_unsigned(column) // 2))
            for i, (x, y) in enumerate(zip(*places.offsets, strict=True)):
                if y % 2 == 0:
                    pair = self._pair(table, used[x], start + y // 2)
                    found[i], found[i + 1] = pair
        else:
            start = _opaque(start)
            for i, (x, y) in enumerate(zip(*places.offsets, strict=True)):
                _, column = _inside(0, start + y, size)
                _, column = _entry(self.kind, table, 0, column, size)
                found[i] = table[used[x], column].to(Float32)
        return found

    def _pair(self, table: Any, row: Int64, pair: Int64) -> tuple[Numeric, Numeric]:
        if self.kind.step == 2:
            return (table[row, pair].to(Float32),) * 2
        both = cute.local_tile(table, (1, 2), (row, pair))
        loaded = cute.make_rmem_tensor_like(both)
        cute.autovec_copy(both, loaded)
        return loaded[0].to(Float32), loaded[1].to(Float32)


def _opaque(x: Int32) -> Int32:
    """Hide an Int32 from what the compiler knows."""
    return Int32(
        llvm.inline_asm(
            Int32.mlir_type, [x.ir_value()], "mov.b32 $0, $1;", "=r,r",
            has_side_effects=True, is_align_stack=False,
        )
    )  # fmt: skip


def element(kind: type[Table], table: Any, row: Place, column: Place, size: Size) -> Float32:
    """Read a table at a place, which may lie past the edge."""
    row, column = _inside(row, column, size)
    return table[_entry(kind, table, row, column, size)].to(Float32)


def _inside(row: Place, column: Place, size: Size) -> list[Int32]:
    """Clamp a place to the last row and column."""
    least: Any = cutlass.min  # pyright: ignore[reportPrivateImportUsage]
    return [least(Int32(x), Int32(n) - 1) for x, n in zip((row, column), size, strict=True)]


def _entry(kind: type[Table], table: Any, row: Place, column: Place, size: Size) -> tuple:
    extents = ([_unsigned(x) for x in some] for some in (size, table.shape))
    i, j = kind.entry(_unsigned(row), _unsigned(column), *extents)
    return Int32(i), Int32(j)


def _unsigned(x: Place) -> Uint32:
    """Make a number unsigned: signed divisions take twice the instructions.

    A shape's extents are values of a class of their own, whose divisions are signed even as
    `Uint32`.
    """
    return Uint32(ArithValue(Int32(x).ir_value(), False))


def any_strides(dtype: type[Numeric]) -> cute.Tensor:
    """Make a matrix to compile for, of any strides, at any address."""
    return cute.runtime.make_fake_tensor(
        dtype,
        (cute.sym_int(), cute.sym_int()),
        stride=(cute.sym_int64(), cute.sym_int64()),
        assumed_align=dtype.width // 8,
    )
