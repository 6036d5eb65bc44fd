"""A second full-width store of a paired program; only the lowering imports this.

quack's paired mode hands a program two adjacent accumulator lanes and takes back half-width
outputs; full width it knows only for the GEMM's own store D. Reductions, though, collect both lanes
at full width. So the store here poses as a reduction to collect its values, and as a tile store to
write them.
"""

from __future__ import annotations

from typing import Any

from quack.epilogue.frontend import EpiMod
from quack.epilogue.ops import TileStore


class PairStore(TileStore):
    """A full-width TMA store fed with both lanes of each pair."""

    fn_port = "sink"

    def fn_sink_flush(self, gemm: Any, state: Any, frag: Any, scale: Any = None) -> None:
        """Keep the subtile's values, in registers, for the store that follows in the same trace."""
        gemm.pair_fragments[self.name] = frag


class PairedMod(EpiMod):
    """An EpiMod whose kernels also write their `PairStore`s."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        self._storing: dict[type, type] = {}
        super().__init__(*args, **kwargs)

    def _mint(self, *key: Any) -> type:  # pyright: ignore[reportIncompatibleMethodOverride]
        minted = super()._mint(*key)
        if minted not in self._storing:
            self._storing[minted] = _storing(minted)
        return self._storing[minted]


def _storing(minted: Any) -> type:
    """`minted` with its pair stores' fragments appended to what a subtile's visit returns.

    The driver pairs the returned fragments with the class's store operations in order: outputs come
    first, then reductions.
    """

    def epi_visit_subtile(self: Any, *args: Any) -> tuple[Any, ...]:
        self.pair_fragments = {}
        stored = minted.epi_visit_subtile(self, *args)
        return (*stored, *self.pair_fragments.values())

    return type(minted.__name__, (minted,), {"epi_visit_subtile": epi_visit_subtile})
