"""Wide tiles through shared memory without bank conflicts; for the lowering.

- In the accumulator's layout four lanes hold 32 bytes of a sub-tile's row, 32 or 16 words wide, and
  a thread's 8-byte accesses go from one such group of its row to the next. Of the four rows that
  half a warp accesses at once, TMA's swizzle sends two and two to the same banks. So every other
  row (every other two, of 16 words) takes its groups in another order, in other registers.
- Swizzled addresses are a layout whose strides have a sign that depends on the row: half as many
  address registers, so less is spilled.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from cutlass import Int32, Numeric, cute
from cutlass.cutlass_dsl import select_
from quack.copy_utils import swizzle_ptr

if TYPE_CHECKING:
    from cutlass.utils import LayoutEnum

    Place = int | Int32


def order(thread: Place, words: int) -> tuple[Place, dict[int, Place]]:
    """Order a thread's way through its row of `words` 32-bit words.

    First 1 where the halves of the row change places, else 0; then for each stride between its
    groups, in words, 1 where it is negative, else 0. `thread` is a number or an Int32.
    """
    low, middle, high = ((thread >> bit) & 1 for bit in (2, 3, 4))
    if words == 32:
        return low, {8: middle, 16: low ^ high}
    return middle, {8: middle ^ high}


def wide_access(kernel: Any) -> Any:
    """Give quack's SM90 class in packed mode that access to its tiles."""

    class WideAccess(kernel):
        def __init__(self, *args: object, **kwargs: object) -> None:
            super().__init__(*args, **kwargs)
            if self.num_regs_mma == 232:  # quack's choice for tiles below 208 columns
                self.num_regs_load, self.num_regs_mma = 24, 240

        def epilog_smem_load_and_partition(
            self, tiled_mma: cute.TiledMma, layout: LayoutEnum, dtype: type[Numeric], *args: Any
        ) -> tuple:
            *copy, part = super().epilog_smem_load_and_partition(tiled_mma, layout, dtype, *args)
            return *copy, _ordered(self, part, args[-1]) if _fits(self, dtype, layout) else part

        def epilog_smem_store_and_partition(
            self, tiled_mma: cute.TiledMma, layout: LayoutEnum, dtype: type[Numeric], *args: Any
        ) -> tuple:
            *copy, part = super().epilog_smem_store_and_partition(tiled_mma, layout, dtype, *args)
            return *copy, _ordered(self, part, args[-1]) if _fits(self, dtype, layout) else part

        def epi_visit_subtile(
            self, params: object, loaded: dict[str, Any], d: cute.Tensor, c: cute.Tensor
        ) -> tuple:
            fragments = [(c, self.c_dtype, self.c_layout)]
            for op in self._epi_ops:
                if op.is_tile_load():
                    names = op._dtype_gemm_attr(), op._layout_gemm_attr()
                    fragments.append((loaded[op.name], *(getattr(self, name) for name in names)))
            for fragment, *kind in fragments:
                if _fits(self, *kind):
                    _change_places(self, fragment)
            stored = super().epi_visit_subtile(params, loaded, d, c)
            if _fits(self, self.d_dtype, self.d_layout):
                _change_places(self, d)
            return stored

    return WideAccess


def _fits(kernel: Any, dtype: type[Numeric], layout: LayoutEnum) -> bool:
    # Beside another warp group in the sub-tile's columns a thread has too few groups.
    whole = kernel.epi_tile[1] in (16, 32) and kernel.atom_layout_mnk[1] == 1
    return whole and dtype.width == 32 and layout.is_n_major_c()


def _ordered(kernel: Any, part: Any, thread: Int32) -> cute.Tensor:
    """Lay a thread's part of a swizzled sub-tile out by plain addresses."""
    half = kernel.epi_tile[1] // 2
    moved, negative = order(thread, kernel.epi_tile[1])

    def strides(of: Any) -> Any:
        if isinstance(of, tuple):
            return tuple(strides(stride) for stride in of)
        return cute.assume(of - 2 * of * negative[of], of) if of in negative else of

    layout = cute.make_layout(part.layout.shape, stride=strides(part.layout.stride))
    start = swizzle_ptr(part.iterator + cute.assume(half * moved, half))
    return cute.make_tensor(start, layout)


def _change_places(kernel: Any, fragment: cute.Tensor) -> None:
    moved, _ = order(cute.arch.thread_idx()[0], kernel.epi_tile[1])
    words = cute.recast_tensor(fragment, Int32)
    half = cute.size(words) // 2
    for i in range(half):
        x, y = words[i], words[half + i]
        words[i] = Int32(select_(moved != 0, y, x))
        words[half + i] = Int32(select_(moved != 0, x, y))
