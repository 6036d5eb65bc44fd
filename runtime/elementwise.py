"""The elementwise kernel: a program's graph on a product, or any tile.

Unfused calls have a finished product, gradients another tile in its place. Only the lowering
imports this.

- A thread owns eight adjacent columns, which rows of every tensor hold in 16-byte units, and takes
  row after row of its CTA. So a sum over rows needs no other thread, and one over columns a warp's
  shuffles and a word of shared memory for each warp.
- What lies past the edge reads the first row or column, gives its identity to reductions, and is
  not stored.
- The kernel starts while the product still runs, and waits for its end before it reads anything.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any, NamedTuple

import cutlass
from cutlass import Float32, Int32, Int64, Numeric, cute
from cutlass.cutlass_dsl import select_
from quack.cute_dsl_utils import torch2cute_dtype_map
from quack.epilogue.math import Pair

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.fast_math import Lanes
from coda_agent.primitives.graph import Shape
from coda_agent.primitives.group_fold import beside, exchanged, parts, replayed, shuffled, which_of
from coda_agent.primitives.groups import MOVED, ROTATED, GroupTile, spans
from coda_agent.primitives.lower import apply
from coda_agent.primitives.placed_tiles import placed
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import (
    ColIndex,
    ColVector,
    HeadTable,
    RowGather,
    RowVector,
    Scalar,
    Tile,
)
from coda_agent.primitives.table_load import any_strides, element
from coda_agent.primitives.tables import Table
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.elementwise_fold import fold_rows, folded, total

if TYPE_CHECKING:
    Loaded = Lanes | list[Lanes]
    """An operand's value in a row, or one for each column."""

_arch: Any = cute.arch

COLUMNS = 8  # a thread; every row's length is a multiple
_WIDTHS = {Shape.TILE: COLUMNS, Shape.WIDE: 2 * COLUMNS, Shape.HALF: COLUMNS // 2}
_AT_ONCE = 4  # rows whose loads are in flight together


class Elementwise:
    """The kernel of one program and configuration, typed by its arguments."""

    def __init__(self, program: Program, config: TileConfig) -> None:
        self.program, self.rows, self.columns = program, config.tile_m, config.tile_n
        self.at_once = math.gcd(self.rows, _AT_ONCE)
        self.warps = self.columns // COLUMNS // 32
        self.nodes = program.graph.nodes
        self.root = {o: self.nodes[i] for o, i in program.graph.outputs.items()}
        kinds = program.reductions.items()
        self.across = {o: kind for o, kind in kinds if not kind.over_rows}
        self.down = {o: kind for o, kind in kinds if kind.over_rows}

    @cute.jit
    def __call__(self, tensors: tuple, stream):
        m, n = tensors[0].shape
        self.kernel(tensors).launch(
            grid=[cute.ceil_div(m, self.rows), cute.ceil_div(n, self.columns), 1],
            block=[self.columns // COLUMNS, 1, 1],
            stream=stream,
            use_pdl=True,
        )

    @cute.kernel
    def kernel(self, tensors: tuple):
        _arch.griddepcontrol_wait()
        count = len(self.program.operands) + 1
        place = _Place(self, tensors[0])
        operands = dict(zip(self.program.operands, tensors[1:count], strict=True))
        stores = dict(zip(self.program.outputs, tensors[count:], strict=True))
        named = _Named(tensors[0], operands, stores)
        # What is the same in every row.
        fixed = self._fixed(operands, place)
        partials = self._partials()
        sums = {o: _registers(COLUMNS, kind.identity()) for o, kind in self.down.items()}
        for step in cutlass.range(  # pyright: ignore[reportPrivateImportUsage]
            self.rows // self.at_once, unroll=1
        ):
            self._visit(place, step * self.at_once, named, fixed, sums, partials)
        # Launches what follows while the last rows are stored; it waits for this kernel's end.
        _arch.griddepcontrol_launch_dependents()
        for o in self.down:
            _store(stores[o], sums[o], place.down, place.vector, place.inside)
        if len(self.across) > 0:
            _arch.barrier()
            self._finish(place, stores, partials)

    def _fixed(self, tensors: Mapping[str, Any], place: _Place) -> dict[str, Loaded]:
        found = {}
        for o, kind in self.program.operands.items():
            if kind is RowVector:
                found[o] = _loaded(tensors[o], None, place.column, COLUMNS)
            elif kind is Scalar:
                found[o] = tensors[o] if isinstance(tensors[o], Float32) else tensors[o][0]
        return found

    def _partials(self) -> dict[str, tuple[cute.Tensor, ...]]:
        """Allocate a value a row and warp of each reduction over columns."""
        memory: Any = cutlass.utils.SmemAllocator()  # pyright: ignore[reportPrivateImportUsage]
        layout = cute.make_layout((self.rows, self.warps))
        return {
            o: tuple(
                memory.allocate_tensor(Float32, layout, byte_alignment=4)
                for _ in range(2 if kind.combine == "logsumexp" else 1)
            )
            for o, kind in self.across.items()
        }

    def _visit(
        self, place: _Place, first: int | Int32, named: _Named, fixed: Mapping[str, Loaded],
        sums: Mapping[str, cute.Tensor], partials: Mapping[str, tuple[cute.Tensor, ...]],
    ) -> None:  # fmt: skip
        """Load a few rows, then do the rest row by row."""
        rows, stores = [_Row(place, first + i) for i in range(self.at_once)], named.stores
        loaded = [self._load(row, named) for row in rows]
        for row, (acc, values, held) in zip(rows, loaded, strict=True):
            results = self._replayed(acc, {**fixed, **values}, row)
            for o, kind in self.program.outputs.items():
                if o in self.down:
                    fold_rows(self.down[o].combine, sums[o], results[o], row.inside)
                elif o in self.across:
                    found = folded(self.across[o].combine, results[o], place.inside)
                    _keep(partials[o], found, row.local, place)
                elif kind is RowGather:
                    index = values[self.nodes[self.root[o].args[1]].name]
                    self._gather(stores[o], results[o], index, row)
                elif issubclass(kind, GroupTile):
                    for j in range(0, COLUMNS, kind.width):  # a thread may hold two groups of 4
                        self._store_group(stores[o], results[o][j], kind.width, row, j)
                else:
                    made = _converted(results[o], stores[o].element_type)
                    if o in held:
                        made = _added(made, held[o])
                    _store(stores[o], made, row.index, place.vector, row.inside & place.inside)

    def _load(
        self, row: _Row, named: _Named
    ) -> tuple[list[Lanes], dict[str, Loaded], dict[str, list[Lanes]]]:
        (product, tensors, stores), column, values = named, row.place.column, {}
        for o, kind in self.program.operands.items():
            if kind is ColVector:
                values[o] = tensors[o][row.read].to(Float32)
            elif kind is ColIndex:
                values[o] = Int64(tensors[o][row.read])
            elif kind is HeadTable:
                s, w = tensors[o].shape
                values[o] = _loaded(tensors[o], row.read % s, column % (w // COLUMNS), COLUMNS)
            elif issubclass(kind, Table):
                size, columns = (row.place.m, row.place.n), range(COLUMNS)
                at = [row.place.start + j for j in columns]
                values[o] = [element(kind, tensors[o], row.read, j, size) for j in at]
            elif kind.varies in _WIDTHS:
                values[o] = _loaded(tensors[o], row.read, column, _WIDTHS[kind.varies])
        held = {
            o: _loaded(stores[o], row.read, column, COLUMNS)
            for o, kind in self.program.outputs.items()
            if kind.accumulates
        }
        return _loaded(product, row.read, column, COLUMNS), values, held

    def _replayed(
        self, acc: list[Lanes], values: Mapping[str, Any], row: _Row
    ) -> dict[str, list[Any]]:
        """Compute the outputs' values in this thread's columns of a row."""
        graph, count = self.program.graph, COLUMNS // (2 if self.program.paired else 1)
        elements = []
        for e in range(count):
            operands = {
                o: _lane(value, e, count) if isinstance(value, list) else value
                for o, value in values.items()
            }
            elements.append((_lane(acc, e, count), operands))
        known = dict[int, list[Lanes]]()
        for node in self.program.placed:
            columns = [row.place.start + j for j in range(COLUMNS)]
            drawn = placed(graph, node, row.index, columns, values)
            known[node] = [_lane(drawn, e, count) for e in range(count)]
        if spans(graph):
            nodes = replayed(graph, elements, apply, partial(self._statistic, row.place), known)
        else:
            each = [
                graph.replay(x, operands, apply, {node: v[e] for node, v in known.items()})
                for e, (x, operands) in enumerate(elements)
            ]
            nodes = [*zip(*each, strict=True)]
        found: dict[str, list[Any]] = {o: [] for o in self.program.outputs}
        for o, i in graph.outputs.items():
            for value in nodes[i]:
                found[o] += [*value] if isinstance(value, tuple) else [value]
            whole = len(found[o]) >= COLUMNS or graph.nodes[i].shape.half_width
            if self.program.paired and not whole:
                # A value that a row has in common is one for both columns of a pair.
                found[o] = [x for x in found[o] for _ in "ab"]
        return found

    def _statistic(self, place: Any, node: int, values: Sequence[Lanes]) -> list[Any]:
        """Compute a group's statistic, with the threads that hold its columns."""
        graph = self.program.graph
        which, span = which_of(graph.nodes[node].op), spans(graph)[node]
        if which in MOVED:
            return self._moved(place, span // 2, values, rotated=which == ROTATED)
        count = len(values) * min(span, COLUMNS) // COLUMNS  # values of a group in this thread
        groups = (values[i : i + count] for i in range(0, len(values), count))
        lanes = max(1, span // COLUMNS)
        found = (exchanged(which, parts(which, group), lanes) for group in groups)
        return [x for x in found for _ in range(count)]

    def _moved(
        self, place: _Place, distance: int, values: Sequence[Lanes], *, rotated: bool
    ) -> list[Lanes]:
        """Give the values of columns so far away, rotated or as they are."""
        if distance >= COLUMNS:
            lanes = distance // COLUMNS
            late = place.vector & lanes if rotated else None
            return [shuffled(value, lanes, late) for value in values]
        if distance < (own := COLUMNS // len(values)):  # beside it in its pair
            return [beside(value, apply, rotated=rotated) for value in values]
        away = distance // own
        found = [values[e ^ away] for e in range(len(values))]
        return [apply("neg", x) if rotated and not e & away else x for e, x in enumerate(found)]

    @cute.jit
    def _gather(self, out, values, index, row):
        n, start = Int64(row.place.n), Int64(row.place.start)
        found = Float32(0.0)
        for j, value in enumerate(values):
            found = Float32(select_(index == start + j, Float32(value), found))
        here = (index >= start) & (index < start + COLUMNS) & row.place.inside
        nowhere = ((index < 0) | (index >= n)) & (start == 0)
        if (here | nowhere) & row.inside:
            out[row.index] = found.to(out.element_type)

    @cute.jit
    def _store_group(self, out, value, width, row, column):
        start = row.place.start + column
        if row.inside & row.place.inside & (start % width == 0):
            out[row.index, start // width] = Float32(value).to(out.element_type)

    @cute.jit
    def _finish(self, place, stores, partials):
        row = place.down * self.rows + place.thread
        if (place.thread < self.rows) & (row < place.m):
            for o, kind in self.across.items():
                planes = [[p[place.thread, w] for w in range(self.warps)] for p in partials[o]]
                whole = total(kind.combine, planes)
                stores[o][row, place.across] = self._mean(o, whole, place) if kind.mean else whole

    def _mean(self, o: str, total: Numeric, place: _Place) -> Float32:
        """Average over the block, or a shorter row, which is final."""
        whole = Int32(select_(place.n < self.columns, place.n, Int32(self.columns)))
        half = self.root[o].shape is Shape.HALF
        return total / Float32(whole // 2 if half else whole)


class _Named(NamedTuple):
    """A launch's tensors: what stands for the product, operands, outputs."""

    product: Any
    operands: Mapping[str, Any]
    stores: Mapping[str, Any]


class _Place:
    """Where a thread works: it reads columns `column`, and stores to `vector`."""

    def __init__(self, kernel: Elementwise, product: Any) -> None:
        self.thread, _, _ = _arch.thread_idx()
        self.down, self.across, _ = _arch.block_idx()
        self.m, self.n = product.shape
        self.first = self.down * kernel.rows
        self.vector = self.across * (kernel.columns // COLUMNS) + self.thread
        self.start = self.vector * COLUMNS
        self.inside = self.start < self.n
        self.column = Int32(select_(self.inside, self.vector, Int32(0)))


class _Row:
    """A CTA's row: `local`, `index` in tensors, `read` within them."""

    def __init__(self, place: _Place, local: int | Int32) -> None:
        self.place, self.local = place, local
        self.index = place.first + local
        self.inside = self.index < place.m
        self.read = Int32(select_(self.inside, self.index, Int32(0)))


def _lane(values: Sequence[Lanes], e: int, count: int) -> Lanes:
    """Take element or pair `e` of `count` out of `values`."""
    width = len(values) // count
    return values[e] if width == 1 else Pair(values[2 * e], values[2 * e + 1])


def _registers(count: int, value: float) -> cute.Tensor:
    made = cute.make_rmem_tensor(cute.make_layout((1, count)), Float32)
    made.fill(value)
    return made


def _tile(tensor: cute.Tensor, row: Int32 | None, vector: Int32, width: int) -> cute.Tensor:
    if row is None:
        return cute.local_tile(tensor, (width,), (vector,))
    return cute.local_tile(tensor, (1, width), (row, vector))


def _loaded(tensor: cute.Tensor, row: Int32 | None, vector: Int32, width: int) -> list[Any]:
    source = _tile(tensor, row, vector, width)
    fragment = cute.make_rmem_tensor_like(source)
    cute.autovec_copy(source, fragment)
    wide = cute.make_rmem_tensor_like(fragment, Float32)
    wide.store(fragment.load().to(Float32))
    return [wide[j] for j in range(width)]


def _converted(values: Sequence[Lanes], element: type[Numeric]) -> cute.Tensor:
    """Make values a fragment of the type that a tensor stores."""
    wide = _registers(len(values), 0.0)
    for j, value in enumerate(values):
        wide[j] = Float32(value)
    made = cute.make_rmem_tensor_like(wide, element)
    made.store(wide.load().to(element))
    return made


def _added(made: cute.Tensor, held: list[Any]) -> cute.Tensor:
    """Add a rounded value to the buffer's, rounded as by TMA's reduce-add."""
    wide = cute.make_rmem_tensor_like(made, Float32)
    wide.store(made.load().to(Float32))
    return _converted([held[j] + wide[j] for j in range(len(held))], made.element_type)


@cute.jit
def _store(tensor, fragment, row, vector, inside):
    if inside:
        cute.autovec_copy(fragment, _tile(tensor, row, vector, cute.size(fragment)))


@cute.jit
def _keep(planes, values, row, place):
    if place.thread % 32 == 0:
        for plane, value in zip(planes, values, strict=True):
            plane[row, place.thread // 32] = value


def compile_elementwise(program: Program, config: TileConfig, types: Sequence[Any]) -> Any:
    """Compile the kernel for tensors of these torch dtypes.

    They are of what stands for the product, of operands, "number" for a scalar that is one, and of
    outputs; sizes and strides are those of a call.
    """

    def fake(dtype: torch.dtype, rank: int, *, rows: bool) -> cute.Tensor:
        """Make a tensor of unit last stride; `rows` align 16 bytes."""
        element = torch2cute_dtype_map[dtype]
        unit = 128 // element.width if rows else 1
        strides = [cute.sym_int64(divisibility=unit) for _ in range(rank - 1)]
        return cute.runtime.make_fake_tensor(
            element,
            tuple(cute.sym_int() for _ in range(rank)),
            stride=(*strides, 1),
            assumed_align=unit * element.width // 8,
        )

    tensors: list[cute.Tensor | Float32] = []
    kinds = [Tile, *program.operands.values(), *program.outputs.values()]
    for dtype, kind in zip(types, kinds, strict=True):
        if dtype == "number":
            tensors.append(Float32(0.0))
        elif issubclass(kind, Table):
            tensors.append(any_strides(torch2cute_dtype_map[dtype]))
        elif issubclass(kind, Reduction):
            tensors.append(fake(dtype, 2, rows=kind.over_rows))
        else:
            single = kind.dims in ((), ("M",)) or issubclass(kind, GroupTile)
            tensors.append(fake(dtype, len(kind.dims) or 1, rows=not single))
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    kernel = Elementwise(program, config)
    return cute.compile(kernel, tuple(tensors), stream, options="--enable-tvm-ffi")
