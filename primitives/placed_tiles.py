"""Values of an element's place in a kernel; for the lowering alone.

The visit that stores reads them as if they were a tile's.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from cutlass import Float32, Int32, Numeric, Uint32, cute
from cutlass.cutlass_dsl import select_
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


def tiles_of(
    replay: Lowering, acc: cute.Tensor, first: tuple[Int32, Int32], at: Any,
    scalars: Mapping[str, Register],
) -> dict[str, cute.Tensor]:  # fmt: skip
    """Give places' values at the elements of a subtile, which is like `acc`.

    They lie `at` rows and columns of a tile, whose `first` ones are given.
    """
    graph, tiles = replay.program.graph, {}
    for node in replay.program.placed:
        tile = cute.make_rmem_tensor(acc.layout.shape, Float32)
        for i in range(0, cute.size(acc), 2):
            row = first[0] + at[i][0]
            columns = [first[1] + at[i + e][1] for e in (0, 1)]
            tile[i], tile[i + 1] = placed(graph, node, row, columns, scalars)
        tiles[name_of(node)] = tile
    return tiles


def name_of(node: int) -> str:
    """Name a node that the storing visit reads as a tile."""
    return f"node_{node}"
