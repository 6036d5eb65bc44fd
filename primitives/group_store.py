"""Where groups of columns lie in a thread's registers, and their store.

Only the lowering imports this.
"""

from __future__ import annotations

from typing import Any

from cutlass import Float32, Numeric, cute
from quack.compile_utils import make_fake_tensor
from quack.epilogue.ops import EpiContext, EpiOp, _lane_warp_info_n

Coord = tuple[int, int]
"""A subtile's place in its tile."""
State = tuple[Any, ...]
"""What an operation of quack's keeps for its later ones."""


class Fragments:
    """Where a thread's elements of the tile lie.

    Attributes:
        coordinates: Of its elements, by element and subtile.
        offsets: Rows and columns of its elements of a subtile, as far as they are the same for all
            threads and subtiles.
        columns: Of a subtile.
    """

    def __init__(self, ctx: EpiContext) -> None:
        shape = (ctx.tile_M, ctx.tile_N)
        self.coordinates: Any = ctx.partition_for_epilogue_fn(cute.make_identity_tensor(shape))
        layout = self.coordinates[None, None, None, 0, 0].layout
        along = (cute.make_layout(shape, stride=stride) for stride in ((1, 0), (0, 1)))
        axes = [cute.composition(axis, layout) for axis in along]
        self.offsets = [
            [int(cute.crd2idx(i, axis)) for i in range(cute.size(layout))] for axis in axes
        ]
        subtiles: Any = cute.zipped_divide(cute.make_layout(shape), ctx.epi_tile).shape
        self.columns = cute.size(subtiles[0][1])


class Places(Fragments):
    """Where groups of columns lie in them.

    An element's column is that of its offset plus less than 8, the thread's place in its quad.
    """

    def __init__(self, ctx: EpiContext) -> None:
        super().__init__(ctx)
        copy = ctx.tiled_copy_t2r or ctx.tiled_copy_r2s
        self.lanes, warps, *_ = _lane_warp_info_n(copy, ctx.tiled_copy_t2r is None, ctx.tidx)
        apart = {column % 8 for column in self.offsets[1]} - {0, 1}
        if warps > 1 or (self.lanes > 1 and (self.lanes != 4 or apart)):
            raise NotImplementedError("its warps share rows, and with them groups of columns")

    def of(self, coord: Coord, i: int) -> tuple[tuple[int, int], int]:
        """Give the thread's row, and the tile's column, of a subtile's element."""
        rows, columns = self.offsets
        return (coord[0], rows[i]), coord[1] * self.columns + columns[i]


class Given(EpiOp):
    """An operation whose argument enters the kernel as it is."""

    def param_fields(self) -> list[tuple[str, type, None]]:
        return [(self.name, object, None)]

    def to_params(self, gemm: object, args: object) -> dict[str, object]:
        return {self.name: getattr(args, self.name)}


class GroupStore(Given):
    """A store of each group's first column, out of its register."""

    fn_port = "sink"

    def __init__(self, name: str, width: int) -> None:
        super().__init__(name)
        self.width = width

    def config_key(self) -> tuple[int]:  # pyright: ignore[reportIncompatibleMethodOverride]
        return (self.width,)

    def host_fake_arg(self, key: tuple[type[Numeric], int], fctx: Any) -> Any:
        dtype, rank = key
        shape = (fctx.m, cute.sym_int())
        shape = shape if rank == 2 else (fctx.l, *shape)
        return make_fake_tensor(dtype, shape, leading_dim=rank - 1, divisibility=1)

    def host_validate(self, value: object, **context: object) -> None:
        """Check nothing: `allocate` made the tensor."""

    def begin(self, gemm: object, param: Any, smem_tensor: object, ctx: EpiContext) -> State:
        out = param if cute.rank(param) == 2 else param[ctx.batch_idx, None, None]
        first = ctx.tile_coord_mnkl[0] * ctx.tile_M, ctx.tile_coord_mnkl[1] * ctx.tile_N
        return out, Places(ctx), first

    def begin_loop(self, gemm: object, state: State, epi_coord: Coord) -> State:
        return *state, epi_coord

    def fn_sink_flush(
        self, gemm: object, state: State, frag: cute.Tensor, scale: object = None
    ) -> None:
        out, places, first, coord = state
        at = places.coordinates[None, None, None, coord[0], coord[1]]
        for i in range(cute.size(frag)):
            if places.of(coord, i)[1] % self.width == 0:
                row, column = at[i][0], at[i][1]
                group = (first[1] + column) // self.width
                value = Float32(frag[i]).to(out.element_type)
                self._write(out, first[0] + row, group, column % self.width, value)

    @cute.jit
    def _write(self, out, row, group, beside, value):
        if (beside == 0) & (row < out.shape[0]) & (group < out.shape[1]):
            out[row, group] = value
