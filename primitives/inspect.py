"""Reading 3: what a program costs and allows, from the graph alone."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

from coda_agent.primitives.graph import Graph, Shape
from coda_agent.primitives.operation import Degree
from coda_agent.primitives.program import Program
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.tiles import TileConfig


@dataclass(frozen=True)
class Inspection:
    """The facts of a program at one size.

    Attributes:
        bytes_moved: Least bytes through device memory: each input read once, each output written
            once.
        tile_local: Whether final values need nothing beyond their own tile, that is no reduction.
        split_k_safe: Whether every output is linear in the accumulator, so that partial sums over K
            may be stored and added.
    """

    gemm_flops: int
    epilogue_flops: int
    bytes_moved: int
    bytes_written: int
    gemm_bytes: int
    launches: int
    tile_local: bool
    split_k_safe: bool


@dataclass(frozen=True)
class Ceiling:
    """What a GPU can do at most.

    Attributes:
        flops_s: Dense products, operations a second, in the type of the GEMM's operands.
        bytes_s: Read from and written to device memory.
        l2_bytes: What a kernel wrote and may still be in the cache when it ends.
    """

    flops_s: float
    bytes_s: float
    l2_bytes: int = 0


def datasheet(gemm_bytes: int) -> Ceiling:
    """Give an H200's ceiling: 990 TFLOP/s in 16 bits; 4.8 TB/s."""
    return Ceiling(990e12 * 2 / gemm_bytes, 4.8e12)


class Roofline(NamedTuple):
    """Least microseconds by arithmetic and by memory."""

    compute_us: float
    memory_us: float

    @property
    def floor_us(self) -> float:
        return max(self)


def roofline(facts: Inspection, ceiling: Ceiling) -> Roofline:
    """Find the time below which a program cannot come at its size."""
    moved = facts.bytes_moved - min(facts.bytes_written, ceiling.l2_bytes)
    return Roofline(1e6 * facts.gemm_flops / ceiling.flops_s, 1e6 * moved / ceiling.bytes_s)


def degrees(graph: Graph) -> list[Degree]:
    """Find the degree of every node in the accumulator."""
    return graph.replay(
        Degree.LINEAR,
        dict.fromkeys((n.name for n in graph.nodes), Degree.CONSTANT),
        lambda op, *args: operation(op).degree(*args),
        number=lambda _: Degree.CONSTANT,
    )


def launches(
    program: Program,
    config: TileConfig | None = None,
    shape: tuple[int, int] = (0, 0),
    *,
    raw: bool = False,
) -> int:
    """Count the kernels, fills and copies that one call runs.

    The first call of a stream that splits K runs one more, and so does a CUDA graph of such a call:
    it clears the flags at which the parts meet.

    Args:
        config: Where it is unfused, cuBLAS's product comes first, counted as one launch; where
            cuBLAS sums parts of K in a kernel of its own, there is one more.
        shape: (M, N), on which it depends what an unfused form leaves to fold.
        raw: Whether reductions stay partials; else one launch folds all.
    """
    if config is None or config.fused:
        return 1 + (not raw and len(program.reductions) > 0)
    m, n = shape
    kinds = program.reductions.values()
    return 2 + any(kind.block(config) < (m if kind.over_rows else n) for kind in kinds)


def inspect_program(
    program: Program,
    shape: tuple[int, int, int],
    *,
    element_bytes: int = 2,
    gemm_bytes: int = 2,
    widths: Mapping[str, int] | None = None,
    block: int = 128,
) -> Inspection:
    """Fold over the program's graph at one shape (M, N, K).

    `widths` are the bytes an element of outputs that differ from `element_bytes`.
    """
    m, n, k = shape
    elements = {
        Shape.SCALAR: 1,
        Shape.COL: m,
        Shape.ROW: n,
        Shape.HALF_ROW: n // 2,
        Shape.TILE: m * n,
        Shape.HALF: m * n // 2,
    }
    nodes, roots = program.graph.nodes, program.graph.outputs
    flops = sum(f * elements[x.shape] for x in nodes if x.args and (f := operation(x.op).flops))
    flops += sum(elements[nodes[roots[o]].shape] for o in program.reductions)
    moved = (m * k + n * k) * gemm_bytes
    for kind in program.operands.values():
        width = 4 if kind.vector else element_bytes
        width = width if kind.element_bytes is None else kind.element_bytes
        moved += math.prod(kind.extents(m, n)) * width
    written, tile = 0, TileConfig(block, block)
    for o, kind in program.outputs.items():
        width = kind.element_bytes or (widths or {}).get(o, element_bytes)
        size_bytes = math.prod(kind.buffer(m, n, tile)) * width
        written += size_bytes
        moved += size_bytes * kind.accumulates  # what is added to is read as well
    degree = degrees(program.graph)
    linear = all(degree[i] is Degree.LINEAR for i in program.graph.outputs.values())
    sums = all(kind.combine == "add" for kind in program.reductions.values())
    return Inspection(
        gemm_flops=2 * m * n * k,
        epilogue_flops=flops,
        bytes_moved=moved + written,
        bytes_written=written,
        gemm_bytes=gemm_bytes,
        launches=launches(program),
        tile_local=not program.reductions,
        split_k_safe=linear and sums,
    )


def describe(graph: Graph) -> str:
    """Write the graph as text, one node a line."""
    lines = []
    for i, n in enumerate(graph.nodes):
        inner = n.name or (f"{n.value:g}" if n.op == "const" else "")
        args = ", ".join(f"%{a}" for a in n.args)
        lines.append(f"%{i} = {n.op}({args or inner})  # {n.shape.value}")
    lines += [f"{name} <- %{i}" for name, i in graph.outputs.items()]
    return "\n".join(lines)
