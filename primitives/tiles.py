"""Tile configurations: how a kernel is cut into CTA tiles and clusters."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.resources import Tile

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program

# SMs of a Hopper GPU: with fewer output tiles of 128 x 128 it starves.
_SMS = 132
_MANY = 60  # tiles for each of them


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
        swizzle: Largest rasterisation group of output tiles, for L2 reuse; no other code.
        split_k: CTAs that share one output tile, each a part of K; the last one runs the epilogue.
        swap_ab: Compute the transposed product: tile_m then cuts N, and tile_n cuts M.
        persistent: One CTA an SM takes tile after tile; else one CTA a tile.
        dynamic: A persistent CTA takes the next tile that nobody has, by a counter in memory; else
            its share, however late it begins.
        fused: One kernel; else cuBLAS's product and then a kernel of `tile_m` rows and `tile_n`
            columns a CTA (`unfused.py`), to which nothing else here applies.
    """

    tile_m: int
    tile_n: int
    cluster_m: int = 1
    cluster_n: int = 1
    pingpong: bool = False
    swizzle: int = 8
    split_k: int = 1
    swap_ab: bool = False
    persistent: bool = True
    dynamic: bool = False
    fused: bool = True

    def parts(self, k: int) -> int:
        """Count the CTAs that share an output tile, at this K."""
        # A part without a K tile of its own never returns (seen on an H200).
        return self.split_k if k >= 256 * self.split_k else 1

    def scheduled(self, m: int, n: int, *, alone: bool) -> TileConfig:
        """Have CTAs take tiles as they come free, where that pays.

        Where another kernel held 16 of an H200's SMs, a product took 0.71 to 0.79 of the time so.
        Alone, 51 launches took 0.98 of it on an idle H200 and 1.00 on a warm one from 60 tiles an
        SM on; 1.02 and 1.01 below 12, and in a CUDA graph 1.02 below 60.

        Args:
            alone: Whether no other kernels run beside this one, such as communications.
        """
        if self.swap_ab:
            m, n = n, m
        tiles = -(-m // self.tile_m) * -(-n // self.tile_n)
        many = tiles > (_MANY if alone else 1) * _SMS  # of fewer each CTA has one
        dynamic = many and self.fused and self.persistent and self.split_k == 1
        return replace(self, dynamic=dynamic)

    @property
    def label(self) -> str:
        """Short name, such as `128x192 pp 2x1` or `1x256 unfused`."""
        if not self.fused:
            return f"{self.tile_m}x{self.tile_n} unfused"
        parts = [
            f"{self.tile_m}x{self.tile_n}",
            "pp" if self.pingpong else "coop",
            f"{self.cluster_m}x{self.cluster_n}",
            f"s{self.swizzle}" * (self.swizzle != 8),
            f"k{self.split_k}" * (self.split_k > 1),
            "swap" * self.swap_ab,
            "once" * (not self.persistent),
            "dynamic" * self.dynamic,
        ]
        return " ".join(p for p in parts if p)

    def to_dict(self) -> dict[str, Any]:
        return asdict(self)


# Best tiles measured for kernels of this family on an H200; narrow ones, so that reduction blocks
# of 64 exist; and one (192x192 coop) that quack 0.6.5 compiles for paired programs but computes
# wrongly: it stays on offer so that the numerics gate has something real to refuse.
SM90_CONFIGS: tuple[TileConfig, ...] = (
    TileConfig(128, 128, 2, 1, True),
    TileConfig(128, 128, 1, 2, True),
    TileConfig(128, 128, 1, 1, True),
    TileConfig(128, 160, 2, 1, True),
    TileConfig(128, 176, 2, 1, True),
    TileConfig(128, 192, 2, 1, True),
    TileConfig(128, 192, 1, 2, True),
    TileConfig(128, 192, 1, 1, True),
    TileConfig(128, 208, 2, 1, True),
    TileConfig(192, 128, 1, 2, True),
    TileConfig(64, 256, 2, 1, True),
    TileConfig(128, 64, 2, 1, True),
    TileConfig(128, 256, 2, 1),
    TileConfig(128, 256, 1, 2),
    TileConfig(256, 128, 1, 2),
    TileConfig(256, 128, 2, 1),
    TileConfig(256, 160, 1, 2),
    TileConfig(192, 192, 2, 1),
)
SWIZZLES = (2, 4, 16)

# cuBLAS's product and a kernel that replays the graph on it: one warp and one row a CTA, so that a
# few rows keep all SMs busy, and several of both for more.
UNFUSED: tuple[TileConfig, ...] = (
    TileConfig(1, 256, fused=False),
    TileConfig(4, 512, fused=False),
)
# Blocks of whole rows of up to 8192 columns, whose reductions leave nothing to fold. On an H200
# blocks of whole columns, 16 x 256, took longer at few rows than 4 x 512 and the fold.
UNFUSED_ROWS = TileConfig(1, 8192, fused=False)
# Rows up to which they are tried. On an H200 the second launch took 2 us of 41 at 16 rows of 4096
# columns, and 24 us of 194 at 512 rows of 28672, whose float32 product is 59 MB.
FEW_ROWS = 1024

# One configuration an architecture for the compile gate; SM90's is also what an untuned call runs.
DEFAULT_CONFIGS: dict[str, TileConfig] = {
    "sm_90a": TileConfig(128, 128, 2, 1, True),
    "sm_100a": TileConfig(128, 128, 1, 1),
    "sm_120a": TileConfig(128, 128, 1, 1, True),
}

# Forms for few rows, by the most rows that each is for. The weights are then streamed once, so what
# counts is that all SMs stream, with little beside: narrow tiles, A shared by a cluster, or K in
# parts. On an H200 they took 16 x 6144 x 4096 of `gemm_rmsnorm_rope` from 40 to 22 us, and
# 128 x 4096 x 14336 of `gemm_residual_partial_rmsnorm` from 78 to 42 us, cuBLAS's 20 and 44 us.
STREAMING: tuple[tuple[int, TileConfig], ...] = (
    (64, TileConfig(64, 32)),
    (64, TileConfig(64, 64)),
    (64, TileConfig(64, 64, 1, 4)),
    (64, TileConfig(64, 64, split_k=2)),
    (64, TileConfig(64, 128)),
    (64, TileConfig(64, 224)),
    (256, TileConfig(64, 64, 2, 1)),
    (256, TileConfig(64, 96, 2, 1)),
    (256, TileConfig(64, 128, 2, 1)),
    (256, TileConfig(128, 64, 1, 2, split_k=2)),
    (256, TileConfig(128, 224, 1, 2)),
    (512, TileConfig(128, 96, 2, 1)),
    (512, TileConfig(128, 192, 2, 1)),
    (512, TileConfig(128, 224, 2, 1)),
)
# Transposed, the rows need not fill a tile: TMA takes long over absent ones.
_TRANSPOSED: tuple[tuple[int, TileConfig], ...] = (
    (16, TileConfig(128, 16, swap_ab=True)),
    (32, TileConfig(64, 32, swap_ab=True)),
)


def carries(program: Program, arch: str) -> bool:
    """Tell whether a kernel of the architecture can carry the program.

    On SM120 two warps share the columns of a row, which statistics of groups do not cross.
    """
    return not program.group or arch != "sm_120a"


def offered(
    program: Program, shapes: Iterable[tuple[int, int, int]] = ()
) -> tuple[TileConfig, ...]:
    """List the SM90 configurations a program may be tuned over.

    Args:
        program: The program. Paired ones need tile_n divisible by 32 for their half-width stores.
        shapes: (M, N, K) it will be tuned for. Forms for few rows are offered too where one of them
            has no more rows than a form is for, and all of them where an output is too small to
            fill the GPU. Transposed ones are for programs without pairs, tables and reductions.
            Unfused forms are there for up to 1024 rows.
    """
    plain = not program.paired and all(kind.transposes for kind in program.operands.values())
    plain &= all(kind is Tile for kind in program.outputs.values())
    plain &= not program.group and not program.placed
    shapes = tuple(shapes)
    fewest = min((m for m, _, _ in shapes), default=math.inf)
    if any(-(-m // 128) * -(-n // 128) < _SMS for m, n, _ in shapes):
        fewest = 0
    few = STREAMING + (_TRANSPOSED if plain else ())
    found = *SM90_CONFIGS, *(c for most, c in few if fewest <= most)
    step = max(program.group, 32 if program.paired else 1)
    fused = tuple(c for c in found if c.tile_n % step == 0)
    few = any(m <= FEW_ROWS for m, _, _ in shapes)
    return fused + (unfused_forms(program) if few and not program.spread else ())


def unfused_forms(program: Program) -> tuple[TileConfig, ...]:
    """List the unfused configurations of a program."""
    reduces = any(not kind.over_rows for kind in program.reductions.values())
    return (*UNFUSED, UNFUSED_ROWS) if reduces else UNFUSED
