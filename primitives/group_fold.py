"""Statistics of groups of columns in a kernel; only the lowering imports this.

- quack visits the accumulator once before it stores, for statistics (its prepass). Here that visit
  keeps the values, which stay in registers, and at its end replays the graph up to each statistic.
- A group's columns of one row lie in one thread or in the lanes of a quad. Each thread folds its
  own, and the quad exchanges.
- The visit that stores reads the statistics as if they were a tile's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping
from typing import Any

from cutlass import Float32, cute
from quack.epilogue.math import Pair
from quack.epilogue.ops import EpiContext

from coda_agent.primitives.fast_math import binary
from coda_agent.primitives.graph import Graph
from coda_agent.primitives.group_store import Places
from coda_agent.primitives.groups import ROTATED, spans, statistics
from coda_agent.primitives.placed_tiles import fed, name_of

_arch: Any = cute.arch


def which_of(op: str) -> str:
    """The statistic of an operation: "sum", "max", "min" or `ROTATED`."""
    return op.split()[0].removeprefix("group_")


_FOLDS = {"sum": operator.add, "max": binary("maximumf"), "min": binary("minimumf")}
"""How two parts of a statistic become one; NaN stays NaN."""


def exchanged(which: str, value: Any, lanes: int) -> Any:
    """A statistic of what `lanes` adjacent lanes hold, in each of them."""
    if lanes == 1:
        return value
    return _arch.warp_reduction(value, _FOLDS[which], threads_in_group=lanes)


def parts(which: str, values: list[Any]) -> Any:
    """A statistic of some elements or pairs of a thread."""
    lanes = [Float32(x) for v in values for x in (v if isinstance(v, tuple) else (v,))]
    return functools.reduce(_FOLDS[which], lanes)


def rotated(values: Mapping[tuple[Any, int], Any], width: int, apply: Any) -> list[Any]:
    """What `rotate_half` gives of a thread's values by row and column: it holds both halves, which
    are whole multiples of the eight columns of a quad apart."""
    found = []
    for row, column in values:
        late = column % width >= width // 2
        other = values[row, column + (-width if late else width) // 2]
        found.append(other if late else apply("neg", other))
    return found


def replayed(
    graph: Graph,
    elements: list[tuple[Any, Mapping[str, Any]]],
    apply: Callable[..., Any],
    statistic: Callable[[int, list[Any]], list[Any]],
    known: Mapping[int, list[Any]],
) -> list[list[Any]]:
    """Every node of `graph` at every element, which is an accumulator and operands; `apply` gives
    operations their meaning, and `statistic` that of a node, element by element, of its argument's
    values. Some nodes' values are `known`."""
    found: list[list[Any]] = []
    groups = spans(graph)
    for i, node in enumerate(graph.nodes):
        if i in groups or i in known:
            found.append(known[i] if i in known else statistic(i, found[node.args[0]]))
            continue
        match node.op:
            case "acc":
                column = [acc for acc, _ in elements]
            case "operand":
                column = [operands[node.name] for _, operands in elements]
            case "const":
                column = [node.value] * len(elements)
            case op:
                inner = [found[a] for a in node.args]
                column = [apply(op, *(v[e] for v in inner)) for e in range(len(elements))]
        found.append(column)
    return found


def _lanes(values: Any, i: int, kind: str, width: int) -> Any:
    """What a fragment holds of an element, or of a pair; of a row's number one."""
    if kind == "scalar":
        return values
    return values[i] if width == 1 or kind == "col" else Pair(values[i], values[i + 1])


def with_groups(base: Any, replay: Any) -> dict[str, Any]:
    """Methods of a kernel class that give `replay`, the program's, its groups' statistics."""
    graph, names = replay.program.graph, replay.names
    order, below = [*spans(graph)], statistics(graph)
    paired = 2 if replay.program.paired else 1
    kinds = dict(base._epi_mod_operands)
    needed = {n.name for n in below.nodes if n.op == "operand"}

    def to_arguments(self: Any, *args: Any, **options: Any) -> Any:
        made = base.epi_to_underlying_arguments(self, *args, **options)
        self.epi_needs_acc_prepass = True
        return made

    def begin(
        self: Any, params: Any, smem: Any, epi_tile: Any, t2r: Any, r2s: Any, tile: Any,
        varlen: Any, barrier: Any, tidx: Any, *rest: Any,
    ) -> Any:  # fmt: skip
        given = epi_tile, t2r, r2s, tile, varlen, barrier, tidx
        self.group_places = Places(EpiContext(self, *given))
        return base.epi_begin(self, params, smem, *given, *rest)

    def visit(self: Any, params: Any, tensors: Any, acc: Any, coord: Any, index: int) -> None:
        if index == 0:
            self.group_parts = []
        ops = {op.name: op for op in self._epi_ops}
        loaded = {
            o: ops[names[o]].begin_loop(self, tensors[names[o]], coord) for o in sorted(needed)
        }
        for i in range(0, cute.size(acc), paired):
            # What a vector's load gives is overwritten by that of the next subtile.
            operands = {o: _lanes(state, i, kinds[names[o]], paired) for o, state in loaded.items()}
            self.group_parts.append(((coord, i), (_lanes(acc, i, "acc", paired), operands)))

    def end(self: Any, params: Any, tensors: Any) -> None:
        places = [self.group_places.of(coord, i) for (coord, i), _ in self.group_parts]
        elements = [element for _, element in self.group_parts]
        of = spans(below)

        def statistic(node: int, values: list[Any]) -> list[Any]:
            which = which_of(below.nodes[node].op)
            if which == ROTATED:
                return rotated(dict(zip(places, values, strict=True)), of[node], replay.apply)
            keys = [(row, column // of[node]) for row, column in places]
            members: dict[Any, list[Any]] = {}
            for key, value in zip(keys, values, strict=True):
                members.setdefault(key, []).append(value)
            totals = {
                key: exchanged(which, parts(which, inner), self.group_places.lanes)
                for key, inner in members.items()
            }
            return [totals[key] for key in keys]

        found = replayed(below, elements, replay.apply, statistic, {})
        # Pruning keeps the order of nodes.
        self.group_found = {
            node: {at: v for (at, _), v in zip(self.group_parts, found[inner], strict=True)}
            for node, inner in zip(order, of, strict=True)
        }

    def store(self: Any, params: Any, tensors: Any, acc: Any, *rest: Any) -> Any:
        coord = self.group_coord
        tiles = {}
        for node in order:
            tile = cute.make_rmem_tensor(acc.layout.shape, Float32)
            for i in range(cute.size(acc)):
                value = self.group_found[node][coord, i - i % paired]
                tile[i] = value[i % paired] if isinstance(value, tuple) else value
            tiles[name_of(node)] = tile
        fed(self, tiles)
        return base.epi_visit_subtile(self, params, {**tensors, **tiles}, acc, *rest)

    def begin_loop(self: Any, params: Any, tensors: Any, coord: Any) -> Any:
        self.group_coord = coord
        return base.epi_begin_loop(self, params, tensors, coord)

    return {
        "epi_to_underlying_arguments": to_arguments,
        "epi_begin": begin,
        "epi_begin_loop": begin_loop,
        "epi_prepass_subtile": visit,
        "epi_prepass_end": end,
        "epi_visit_subtile": store,
    }
