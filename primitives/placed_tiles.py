"""Values of an element's place in a kernel; for the lowering alone.

The visit that stores reads them as if they were a tile's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutlass import Float32, Int32, Numeric, Uint32, cute
from cutlass.cutlass_dsl import select_
from quack.epilogue.ops import EpiContext
from quack.rounding import mul_wide_u32

from coda_agent.primitives.fast_math import Register
from coda_agent.primitives.graph import Graph
from coda_agent.primitives.kinds import Lowering
from coda_agent.primitives.placed import words


def _product(a: Uint32, b: int) -> tuple[Uint32, Uint32]:
    high, low = mul_wide_u32(a, Uint32(b))
    return high, low


def placed(
    graph: Graph, node: int, row: Int32, columns: list[Int32], scalars: Mapping[str, Register]
) -> list[Float32]:
    """Give a node's values at adjacent columns, the first one even."""
    n = graph.nodes[node]
    if n.op == "row_index":
        return [Float32(row)] * len(columns)
    if n.op == "column_index":
        return [Float32(column) for column in columns]
    seed, offset = (_number(graph, a, scalars) for a in n.args[1:])
    found = []
    for column in columns[::2]:
        counter = Uint32(row), Uint32(column) // Uint32(4), Uint32(offset), Uint32(0)
        drawn = words(counter, (seed, 0), _product, Uint32)
        late = (Uint32(column) & Uint32(2)) != Uint32(0)
        for first, second in (drawn[:3:2], drawn[1::2]):
            word = Uint32(select_(late, second, first))
            found.append(Float32(word >> Uint32(8)) * Float32(2.0**-24))
    return found[: len(columns)]


def _number(graph: Graph, node: int, scalars: Mapping[str, Register]) -> int | Numeric:
    n = graph.nodes[node]
    return int(n.value) if n.op == "const" else Float32(scalars[n.name]).to(Uint32)


def with_places(base: Any, replay: Lowering, nodes: list[int]) -> dict[str, Any]:
    """Make methods of a kernel class that give `replay` these nodes' values."""
    graph, names = replay.program.graph, replay.names
    kinds = dict(base._epi_mod_operands)

    def begin(
        self: Any, params: object, smem: object, epi_tile: object, t2r: object, r2s: object,
        tile: tuple[Int32, ...], varlen: object, barrier: object, tidx: object, *rest: object,
    ) -> Any:  # fmt: skip
        given = epi_tile, t2r, r2s, tile, varlen, barrier, tidx
        ctx = EpiContext(self, *given)
        identity = cute.make_identity_tensor((ctx.tile_M, ctx.tile_N))
        self.placed_at = ctx.partition_for_epilogue_fn(identity)
        self.placed_first = tile[0] * ctx.tile_M, tile[1] * ctx.tile_N
        return base.epi_begin(self, params, smem, *given, *rest)

    def begin_loop(self: Any, params: object, tensors: dict, coord: tuple[int, int]) -> Any:
        self.placed_coord = coord
        return base.epi_begin_loop(self, params, tensors, coord)

    def visit(self: Any, params: object, tensors: dict, acc: cute.Tensor, *rest: object) -> Any:
        at = self.placed_at[None, None, None, self.placed_coord[0], self.placed_coord[1]]
        of = {names[o]: o for o in names}
        scalars = {of[name]: tensors[name] for name, kind in kinds.items() if kind == "scalar"}
        tiles = {}
        for node in nodes:
            tile = cute.make_rmem_tensor(acc.layout.shape, Float32)
            for i in range(0, cute.size(acc), 2):
                row = self.placed_first[0] + at[i][0]
                columns = [self.placed_first[1] + at[i + e][1] for e in (0, 1)]
                tile[i], tile[i + 1] = placed(graph, node, row, columns, scalars)
            tiles[name_of(node)] = tile
        fed(self, tiles)
        return base.epi_visit_subtile(self, params, {**tensors, **tiles}, acc, *rest)

    return {"epi_begin": begin, "epi_begin_loop": begin_loop, "epi_visit_subtile": visit}


def name_of(node: int) -> str:
    """Name a node that the storing visit reads as a tile."""
    return f"node_{node}"


def fed(kernel: Any, tiles: Mapping[str, cute.Tensor]) -> None:
    """Have the visit of `kernel` read `tiles` too."""
    others = (x for x in kernel._epi_mod_operands if x[0] not in tiles)
    kernel._epi_mod_operands = (*others, *((name, "tile") for name in tiles))
