"""Reading 2: lower a program to a CuTeDSL kernel by quack's epilogues.

- The graph is replayed at trace time, once for each accumulator element, or for each adjacent pair
  in a paired program.
- The GEMM's own store D carries the `AddTile` or `WideTile` output, else the first `Tile`; further
  ones are extra TMA stores. The `WideTile` operand, or the first `Tile`, rides in as C, unless D
  accumulates: then nothing may.
- Every vector operand is pinned to its axis: quack infers axes from shapes, which is ambiguous when
  M = N.
- Kernel-side names are positional, so renaming a program's tensors reuses the compiled kernel.
"""

from __future__ import annotations

import inspect
import math
import sys
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.fast_math import Lanes
from coda_agent.primitives.graph import Graph, Shape
from coda_agent.primitives.groups import spans
from coda_agent.primitives.imports import import_quack
from coda_agent.primitives.kinds import Operand
from coda_agent.primitives.objects import fingerprint
from coda_agent.primitives.operation import MOVES, Edge
from coda_agent.primitives.program import Program
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import RowGather, Tile, WideTile

if TYPE_CHECKING:
    from coda_agent.primitives.stores import Mod

    Stored = Lanes | tuple[Lanes, Lanes]
    """What an output takes; of a fused multiply-add the factors, of a pair both lanes."""


def _bind(program: Program, block: int) -> Mod:
    import_quack()
    from coda_agent.primitives.stores import Mod

    replay = Replay(program, block)
    names, indices = replay.names, replay.indices
    ops = {
        names[o]: kind.load(names[o])
        for o, kind in program.operands.items()
        if names[o] != "c" and o not in indices
    }
    # quack visits sinks in this order: stores of pairs, reductions, gathers.
    gathered = [o for o, kind in program.outputs.items() if kind is RowGather]
    tiles = [o for o in program.outputs if o not in (*program.reductions, *gathered)]
    found = {
        names[o]: program.outputs[o].store(replay, o)
        for o in (*tiles, *program.reductions, *gathered)
        if names[o] != "D"
    }
    sinks = {name: op for name, op in found.items() if getattr(op, "fn_port", "") == "sink"}

    def fn(acc, **values):
        return replay(acc, values)

    parameters = ["acc", *(names[o] for o in program.operands if o not in indices)]
    fn.__signature__ = inspect.Signature(  # pyright: ignore[reportFunctionMemberAccess]
        [inspect.Parameter(p, inspect.Parameter.POSITIONAL_OR_KEYWORD) for p in parameters]
    )
    mode = "acc_pair" if program.paired else "packed_cd_b16x2" if program.wide else None
    return Mod(
        replay,
        fn,
        outputs=tuple(op for name, op in found.items() if name not in sinks),
        ops=ops,
        outs=sinks,
        mode=mode,
        extra_ops=tuple(indices.values()),
    )


# Bound modules by (digest, reduction block): each carries quack's plan cache, so a second call pays
# no planning.
_BOUND: dict[tuple[str, int], Mod] = {}


def lower(program: Program, tile_n: int) -> Mod:
    """Find quack's module for `program`, with reduction blocks of `tile_n` columns."""
    # Only a mean bakes the block into the kernel: all else shares one module, and its compiled
    # objects, over tiles. Kernel-side names are positional, so programs of one digest share it too.
    block = tile_n if any(k.mean for k in program.reductions.values()) else 0
    key = program.digest, block
    if key not in _BOUND:
        _BOUND[key] = _bind(program, block)
    return _BOUND[key]


def kernel_names(program: Program) -> dict[str, str]:
    """Name tensors in the kernel: c and D, then positions.

    Interned, because quack's object cache hashes a pickle, and pickle writes two equal strings
    differently when they are not one object: else a second process, or tile, misses the cache.
    """
    names = {}
    carried = WideTile if program.wide else Tile
    load = None
    if program.accumulated is None:
        load = next((o for o, kind in program.operands.items() if kind is carried), None)
    for i, o in enumerate(program.operands):
        names[o] = "c" if o == load else sys.intern(f"in_{i}")
    store = next((o for o, kind in program.outputs.items() if kind is carried), None)
    store = program.accumulated or store
    for i, o in enumerate(program.outputs):
        names[o] = "D" if o == store else sys.intern(f"out_{i}")
    return names


def forget() -> None:
    """Drop every bound module and compiled kernel this process holds.

    quack's plan cache and its in-memory object cache know nothing of the architecture, so a process
    that compiles for several starts each compilation afresh; objects on disk stay.
    """
    from quack.gemm_runtime import host

    _BOUND.clear()
    host._compile_gemm_epi.cache_clear()  # pyright: ignore[reportFunctionMemberAccess]


class Replay:
    """The epilogue function quack traces: replays the graph on its values."""

    def __init__(self, program: Program, block: int) -> None:
        self.program = program
        self.names = kernel_names(program)
        self.block, self.apply = block, apply
        self.indices = {
            o: kind.load(self.names[o])
            for o, kind in program.operands.items()
            if kind.varies is Shape.INDEX
        }
        roots = program.graph.outputs
        zero = [
            zero_preserving(program.graph, program.operands, past_rows=r) for r in (False, True)
        ]
        self.masked = {
            o
            for o, k in program.reductions.items()
            if k.combine == "add" and not zero[k.over_rows][roots[o]]
        }
        # A sum of products, or of a value times the constant of a mean, folds as one fused
        # multiply-add; quack has that form in element mode only, and a mask needs the finished
        # value.
        self.scaled = {
            o
            for o, k in program.reductions.items()
            if k.combine == "add"
            and not program.paired
            and o not in self.masked
            and (k.mean or program.graph.nodes[roots[o]].op == "mul")
        }

    def __quack_semantic_key__(self) -> tuple[str, ...]:
        return self.program.digest, str(self.block), fingerprint("primitives")

    def __call__(self, acc: Lanes, values: Mapping[str, Any]) -> dict[str, Stored]:
        graph, outputs = self.program.graph, self.program.outputs
        operands = {o: values.get(self.names[o]) for o in self.program.operands}
        known = {}
        for i in (*spans(graph), *self.program.placed):
            value = values[f"node_{i}"]
            known[i] = value[0] if graph.nodes[i].shape is Shape.HALF else value
        replayed = graph.replay(acc, operands, apply, known)
        results = {}
        for o, kind in outputs.items():
            value = replayed[graph.outputs[o]]
            if issubclass(kind, Reduction):
                value = self._reduced(o, kind, value, replayed)
            results[self.names[o]] = value
        return results

    def _reduced(self, o: str, kind: type[Reduction], value: Lanes, replayed: list) -> Stored:
        node = self.program.graph.nodes[self.program.graph.outputs[o]]
        half = node.shape is Shape.HALF
        weight = 1.0 / (self.block // 2 if half else self.block) if kind.mean else 1.0
        if o in self.scaled:
            if node.op == "mul":
                x, y = (replayed[a] for a in node.args)
                return _lifted(x, value), _lifted(
                    apply("mul", y, weight) if kind.mean else y, value
                )
            return value, _lifted(weight, value)
        if kind.mean:
            value = apply("mul", value, weight)
        if half:
            # Both lanes of a pair reach the reduction: the second contributes its identity.
            return value, value if kind.combine in ("max", "min") else _lifted(
                kind.identity(), value
            )
        return value

    def index_of(self, o: str) -> str:
        """Find the operand that indexes gathered output `o`."""
        nodes = self.program.graph.nodes
        return nodes[nodes[self.program.graph.outputs[o]].args[1]].name


def _lifted(x: Lanes, like: Lanes) -> Lanes:
    """Make a number a value like `like`, a Float32 or packed lanes."""
    from cutlass import Float32
    from quack.epilogue.math import F2

    if isinstance(like, tuple) and not isinstance(x, tuple):
        lane = Float32(x) if isinstance(x, float) else x
        return F2(lane, lane)
    return Float32(x) if isinstance(x, float) else x


def apply(name: str, *args: Lanes) -> Any:
    """Apply an operation to Float32 scalars, `Pair`s, or packed f32x2 lanes."""
    from quack.epilogue.math import F2, Pair

    op = operation(name)
    if name in MOVES:
        return op.cute(*args)
    if any(isinstance(a, Pair) for a in args):
        lanes = [a if isinstance(a, Pair) else Pair(a, a) for a in args]
        return Pair(op.cute(*(p.a for p in lanes)), op.cute(*(p.b for p in lanes)))
    if any(isinstance(a, tuple) for a in args):
        if op.packed:
            return F2(*op.cute(*args))
        lanes = [a if isinstance(a, tuple) else (a, a) for a in args]
        return F2(op.cute(*(p[0] for p in lanes)), op.cute(*(p[1] for p in lanes)))
    return op.cute(*args)


def zero_preserving(
    graph: Graph, operands: Mapping[str, type[Operand]], *, past_rows: bool = False
) -> list[bool]:
    """Tell which nodes are 0 past the last column, or row."""
    edges = graph.replay(
        Edge(True, True),
        {o: kind.edges[past_rows] for o, kind in operands.items()},
        lambda op, *args: operation(op).edge(*args),
        number=lambda x: Edge(x == 0.0, math.isfinite(x)),
    )
    return [edge.zero for edge in edges]
