"""Statistics of groups of columns, and places, in a kernel; for the lowering alone.

- quack visits the accumulator once before it stores, for statistics (its prepass). Here that visit
  keeps the values, which stay in registers, and at its end folds each statistic.
- A group's columns of one row lie in one thread or in the lanes of a quad. Each thread folds its
  own, and the quad exchanges.
- The visit that stores reads the statistics, and values of places, as if they were a tile's.
"""

from __future__ import annotations

import functools
import operator
from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from cutlass import Float32, Int32, Numeric, cute
from cutlass.cutlass_dsl import select_
from quack.epilogue.math import Pair
from quack.epilogue.ops import EpiContext

from coda_agent.primitives.fast_math import Lanes, Register, binary
from coda_agent.primitives.graph import Graph, Node
from coda_agent.primitives.group_store import Coord, Fragments, Places
from coda_agent.primitives.groups import MOVED, ROTATED, spans
from coda_agent.primitives.kinds import Lowering
from coda_agent.primitives.placed_tiles import name_of, tiles_of

if TYPE_CHECKING:
    from coda_agent.primitives.program import Program

_arch: Any = cute.arch
Key = tuple[tuple[int, int], int]
"""A thread's row, by its subtile and in it, and a column or a group of columns."""
Held = dict[tuple[object, ...], Any]
"""What is loaded of a subtile, and columns that are moved."""


def which_of(op: str) -> str:
    """Name an operation's statistic: "sum", "max", "min", or what moves columns."""
    return op.split()[0].removeprefix("group_")


_FOLDS = {"sum": operator.add, "max": binary("maximumf"), "min": binary("minimumf")}
"""How two parts of a statistic become one; NaN stays NaN."""


def exchanged(which: str, value: Register, lanes: int) -> Register:
    """Combine what `lanes` adjacent lanes hold, in each of them."""
    if lanes == 1:
        return value
    return _arch.warp_reduction(value, _FOLDS[which], threads_in_group=lanes)


def beside(value: Lanes, apply: Callable[..., Lanes], *, rotated: bool) -> Pair:
    """Exchange the columns of a pair, which may have a number in common."""
    first, second = value if isinstance(value, tuple) else (value, value)
    return Pair(apply("neg", second) if rotated else second, first)


def shuffled(value: Lanes, lanes: int, late: Numeric | None = None) -> Lanes:
    """Take what the thread `lanes` away holds, negated where `late` is 0."""

    def moved(x: object) -> Float32:
        other = _arch.shuffle_sync_bfly(Float32(x), offset=lanes)
        return other if late is None else Float32(select_(late != 0, other, -other))

    return Pair(*map(moved, value)) if isinstance(value, tuple) else moved(value)


def parts(which: str, values: Sequence[Lanes]) -> Float32:
    """Combine some elements or pairs of a thread."""
    lanes = [Float32(x) for v in values for x in (v if isinstance(v, tuple) else (v,))]
    return functools.reduce(_FOLDS[which], lanes)


def replayed(
    graph: Graph,
    elements: list[tuple[Lanes, Mapping[str, Lanes]]],
    apply: Callable[..., Lanes],
    statistic: Callable[[int, Sequence[Lanes]], list[Lanes]],
    known: Mapping[int, list[Lanes]],
) -> list[Sequence[Any]]:
    """Compute every node of `graph` at every element.

    An element is an accumulator and operands. `apply` gives operations their meaning, and
    `statistic` that of a node, element by element, of its argument's values. Some nodes' values are
    `known`.
    """
    found: list[Sequence[Lanes]] = []
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


def _lanes(values: Any, i: int, kind: str, width: int) -> Lanes:
    """Take an element, a pair, or a row's number from a fragment."""
    if kind == "scalar":
        return values
    return values[i] if width == 1 or kind == "col" else Pair(values[i], values[i + 1])


def _below(graph: Graph, node: int) -> Graph:
    """Cut out what a statistic's argument follows from; other statistics become operands."""
    nodes = [*graph.nodes]
    for i in spans(graph):
        nodes[i] = Node("operand", (), nodes[i].shape, str(i))
    return Graph(nodes, {"argument": graph.nodes[node].args[0]}).prune()


class _Values:
    """Values at a thread's elements, computed where they are read.

    Each accumulator, or pair, stays in its register. A copy for each element leaves no registers:
    with them the rotation of a normalised head spilled 2.3 KB a thread, and took 1008 us of an H200
    where the product takes 343 (2026-11-22).
    """

    def __init__(
        self, program: Program, apply: Callable[..., Lanes],
        load: Callable[[str, Coord, int, Held], Lanes], places: Places,
    ) -> None:  # fmt: skip
        """`load` gives an operand's values in a subtile."""
        self.graph, self.apply, self.load, self.places = program.graph, apply, load, places
        self.groups = spans(self.graph)
        self.below = {node: _below(self.graph, node) for node in self.groups}
        self.subtiles: dict[Coord, dict[int, Any]] = {}
        self.totals: dict[int, dict[Key, Register]] = {}

    def fold(self) -> None:
        """Fold each statistic, in the graph's order."""
        for node in self.groups:
            if (which := which_of(self.graph.nodes[node].op)) in MOVED:
                continue
            found = dict[Key, Register]()
            for coord, elements in self.subtiles.items():
                held: Held = {}
                for i in elements:
                    key, value = self._key(node, coord, i), self._argument(node, coord, i, held)
                    found[key] = parts(which, [*([found[key]] if key in found else []), value])
            lanes = min(self.places.lanes, self.groups[node] // 2)  # each has two columns of eight
            self.totals[node] = {key: exchanged(which, x, lanes) for key, x in found.items()}

    def of(self, node: int, coord: Coord, i: int, held: Held) -> Lanes:
        """Give a statistic at an element; its loaded operands are `held`."""
        if node in self.totals:
            return self.totals[node][self._key(node, coord, i)]
        if (node, coord, i) not in held:
            held[node, coord, i] = self._moved(node, coord, i, held)
        return held[node, coord, i]

    def _moved(self, node: int, coord: Coord, i: int, held: Held) -> Lanes:
        """Give the value of the column half a group away, rotated or as it is."""
        row, column = self.places.of(coord, i)
        distance = self.groups[node] // 2
        rotated = which_of(self.graph.nodes[node].op) == ROTATED
        if self.places.lanes > 1 and 1 < distance < 8:  # a lane has two columns of eight
            lanes = distance // 2
            value = self._argument(node, coord, i, held)
            return shuffled(value, lanes, _arch.lane_idx() & lanes if rotated else None)
        if (row, column ^ distance) in self._at:
            value = self._argument(node, *self._at[row, column ^ distance], held)
            return self.apply("neg", value) if rotated and not column & distance else value
        return beside(self._argument(node, coord, i, held), self.apply, rotated=rotated)

    def tiles(self, coord: Coord, acc: cute.Tensor, paired: int) -> dict[str, cute.Tensor]:
        """Give statistics at a subtile's elements, pairs where `paired` is 2."""
        tiles, held = {}, Held()
        for node in self.groups:
            tile = cute.make_rmem_tensor(acc.layout.shape, Float32)
            for i in range(0, cute.size(acc), paired):
                value = self.of(node, coord, i, held)
                for lane in range(paired):
                    tile[i + lane] = value[lane] if isinstance(value, tuple) else value
            tiles[name_of(node)] = tile
        return tiles

    def _argument(self, node: int, coord: Coord, i: int, held: Held) -> Lanes:
        graph = self.below[node]
        names = (n.name for n in graph.nodes if n.op == "operand")
        operands = {
            o: self.of(int(o), coord, i, held) if o.isdigit() else self.load(o, coord, i, held)
            for o in names
        }
        found = graph.replay(self.subtiles[coord][i], operands, self.apply)
        return found[graph.outputs["argument"]]

    def _key(self, node: int, coord: Coord, i: int) -> Key:
        row, column = self.places.of(coord, i)
        return row, column // self.groups[node]

    @functools.cached_property
    def _at(self) -> dict[Key, tuple[Coord, int]]:
        elements = ((coord, i) for coord, held in self.subtiles.items() for i in held)
        return {self.places.of(*element): element for element in elements}


def with_values(base: Any, replay: Lowering) -> dict[str, Any]:
    """Make methods of a kernel class that give `replay` values of groups and places."""
    names, paired = replay.names, 2 if replay.program.paired else 1
    grouped = bool(spans(replay.program.graph))
    kinds = dict(base._epi_mod_operands)

    def to_arguments(self: Any, *args: object, **options: object) -> object:
        made = base.epi_to_underlying_arguments(self, *args, **options)
        self.epi_needs_acc_prepass = True
        return made

    def begin(
        self: Any, params: object, smem: object, epi_tile: object, t2r: object, r2s: object,
        tile: tuple[Int32, ...], varlen: object, barrier: object, tidx: object, *rest: object,
    ) -> dict[str, Any]:  # fmt: skip
        given = epi_tile, t2r, r2s, tile, varlen, barrier, tidx
        ctx = EpiContext(self, *given)
        self.fragments = fragments = (Places if grouped else Fragments)(ctx)
        self.first_place = tile[0] * ctx.tile_M, tile[1] * ctx.tile_N
        tensors = base.epi_begin(self, params, smem, *given, *rest)
        ops = {op.name: op for op in self._epi_ops}

        def load(o: str, coord: Coord, i: int, held: Held) -> Lanes:
            state, kind = tensors[names[o]], kinds[names[o]]
            if kind in ("row", "col"):
                # Out of shared memory, since a vector's own load is for the storing visit alone.
                inner = cute.group_modes(state[0], 3, cute.rank(state[0]))[None, None, None, coord]
                state = [inner[i + lane].to(Float32) for lane in range(paired)]
                return _lanes(state, 0, kind, paired)
            if (o, coord) not in held:
                held[o, coord] = ops[names[o]].begin_loop(self, state, coord)
            return _lanes(held[o, coord], i, kind, paired)

        if isinstance(fragments, Places):
            self.group_values = _Values(replay.program, replay.apply, load, fragments)
        return tensors

    def visit(
        self: Any, params: object, tensors: object, acc: cute.Tensor, coord: Coord, index: int
    ) -> None:
        self.group_values.subtiles[coord] = {
            i: _lanes(acc, i, "acc", paired) for i in range(0, cute.size(acc), paired)
        }

    def end(self: Any, params: object, tensors: object) -> None:
        self.group_values.fold()

    def store(self: Any, params: object, tensors: dict, acc: cute.Tensor, *rest: object) -> tuple:
        coord = self.subtile
        at = self.fragments.coordinates[None, None, None, coord[0], coord[1]]
        scalars = {o: tensors[name] for o, name in names.items() if kinds.get(name) == "scalar"}
        tiles = tiles_of(replay, acc, self.first_place, at, scalars)
        if grouped:
            tiles |= self.group_values.tiles(coord, acc, paired)
        others = (x for x in self._epi_mod_operands if x[0] not in tiles)
        self._epi_mod_operands = (*others, *((name, "tile") for name in tiles))
        return base.epi_visit_subtile(self, params, {**tensors, **tiles}, acc, *rest)

    def begin_loop(self: Any, params: object, tensors: object, coord: Coord) -> object:
        self.subtile = coord
        return base.epi_begin_loop(self, params, tensors, coord)

    methods = {"epi_begin": begin, "epi_begin_loop": begin_loop, "epi_visit_subtile": store}
    if grouped:
        methods |= {
            "epi_to_underlying_arguments": to_arguments,
            "epi_prepass_subtile": visit,
            "epi_prepass_end": end,
        }
    return methods
