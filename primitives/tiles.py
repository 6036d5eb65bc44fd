"""Tile configurations: how a kernel is cut into CTA tiles, clusters and warp-group schedules."""

from __future__ import annotations

from dataclasses import asdict, dataclass
from typing import Any


@dataclass(frozen=True, order=True)
class TileConfig:
    """One way to run a kernel.

    Attributes:
        tile_m: Rows a CTA tile; also the block of reductions over rows.
        tile_n: Columns a CTA tile; also the block of reductions over columns.
        cluster_m: CTAs a cluster along M (they share B tiles by TMA multicast).
        cluster_n: CTAs a cluster along N (they share A tiles).
        pingpong: Two warp groups on alternate tiles, the epilogue of one under the mainloop of the
            other; else they cooperate on one tile.
        swizzle: Largest rasterisation group of output tiles, for L2 reuse.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    swizzle: int = 8

    @property
    def label(self) -> str:
        """Short name, e.g. `128x192 pp 2x1`."""
        schedule = "pp" if self.pingpong else "coop"
        label = f"{self.tile_m}x{self.tile_n} {schedule} {self.cluster_m}x{self.cluster_n}"
        return label if self.swizzle == 8 else f"{label} s{self.swizzle}"

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Best tiles measured for kernels of this family on an H200, and one (192x192 coop) that quack 0.6.5
# compiles for paired programs but computes wrongly: it stays on offer so that the numerics gate has
# something real to refuse.
SM90_CONFIGS: tuple[TileConfig, ...] = (
    TileConfig(128, 128, 1, 1, True),
    TileConfig(128, 128, 1, 2, True),
    TileConfig(128, 128, 2, 1, True),
    TileConfig(128, 160, 2, 1, True),
    TileConfig(128, 192, 1, 1, True),
    TileConfig(128, 192, 2, 1, True),
    TileConfig(128, 192, 1, 2, True),
    TileConfig(192, 128, 1, 2, True),
    TileConfig(128, 256, 2, 1),
    TileConfig(128, 256, 1, 2),
    TileConfig(256, 128, 1, 2),
    TileConfig(256, 128, 2, 1),
    TileConfig(256, 160, 1, 2),
    TileConfig(192, 192, 2, 1),
)

# One configuration an architecture for the compile gate; SM90's is also what an untuned call runs.
DEFAULT_CONFIGS: dict[str, TileConfig] = {
    "sm_90a": TileConfig(128, 128, 2, 1, True),
    "sm_100a": TileConfig(128, 128, 1, 1),
    "sm_120a": TileConfig(128, 128, 1, 1, True),
}


def offered(paired: bool) -> tuple[TileConfig, ...]:
    """The SM90 configurations a program may be tuned over; paired programs need tile_n divisible by
    32 for their half-width stores."""
    return tuple(c for c in SM90_CONFIGS if not paired or c.tile_n % 32 == 0)
