"""Gradients of a program by one launch on a Hopper GPU.

The graph of `gradient.py` is a program of its own, which the elementwise kernel of unfused forms
replays.

- Each tensor is read once. The gradient at the accumulator and those of tiles are written in their
  own types, and those of vectors are sums over rows or columns, whose partials one launch folds.
- In the place of the product stands the first tile that is read, where the product is not.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property, partial

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.gradient import PRODUCT, Gradient, gradient_of
from coda_agent.primitives.graph import Graph, Node, Shape
from coda_agent.primitives.groups import GroupTile
from coda_agent.primitives.kinds import HALVES, Operand, Resource
from coda_agent.primitives.memory import tma_ready
from coda_agent.primitives.objects import cached
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import (
    AddTile,
    ColSum,
    ColVector,
    HalfTile,
    RowSum,
    RowVector,
    Scalar,
    Tile,
    WideTile,
)
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime import unfused
from coda_agent.runtime.call_cache import CallPlan, Calls
from coda_agent.runtime.launch import allocate
from coda_agent.runtime.plan import Finish

# Rows of a CTA. Partials of sums over rows are one a CTA, which are written and read again: with 32
# they are a sixteenth of a 16-bit tile.
_ROWS, _SUMMED_ROWS = 8, 32
_COLUMNS = 1024


class HalfOperand(Operand):
    """An (M, N/2) operand, which a program that somebody writes has not."""

    dims = ("M", "N/2")
    varies = Shape.HALF
    dtypes = HALVES


_STORED = {Tile: Tile, WideTile: WideTile, ColVector: RowSum, RowVector: ColSum, Scalar: RowSum}
"""What a kernel writes as the gradient of an operand."""


@dataclass(frozen=True, eq=False)
class GradientPass:
    """The kernel of a `Gradient`.

    Attributes:
        first: What stands in the place of the product; `PRODUCT` where that does.
    """

    gradient: Gradient
    program: Program
    first: str

    @cached_property
    def calls(self) -> Calls[CallPlan]:
        """The calls resolved so far, by `first` and the program's operands."""
        return Calls(0, 0, (), 1 + len(self.program.operands))

    @classmethod
    def of(cls, gradient: Gradient) -> GradientPass | None:
        """Make that of `gradient`; None of tables, groups, and without a tile."""
        forward, graph = gradient.program, gradient.graph
        named = {n.name for n in graph.nodes if n.op == "operand"}
        read = {o: _kind(forward, o) for o in gradient.reads}
        read |= {gradient_of(o): _came(forward.outputs[o]) for o in gradient.given}
        stored = {x: _STORED.get(forward.operands.get(x, Tile)) for x in gradient.wanted}
        operands = {o: kind for o, kind in read.items() if kind and o in named}
        outputs = {x: kind for x, kind in stored.items() if kind and x in graph.outputs}
        if not outputs or len(operands) < len(named) or None in stored.values():
            return None
        first: str | None = PRODUCT
        if not gradient.product:
            first = next((o for o, kind in operands.items() if kind is Tile), None)
            if first is None:
                return None
            del operands[first]
        name, graph = f"{forward.name} gradient", _in_place(graph, first)
        return cls(gradient, Program(name, "", operands, outputs, graph), first)

    def __call__(
        self,
        size: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        types: Sequence[torch.dtype],
        product: torch.Tensor | None = None,
    ) -> list[torch.Tensor]:
        """Compute final reductions' gradients, on a Hopper GPU."""
        named = tensors if product is None else {**tensors, PRODUCT: product}
        given = [named[o] for o in (self.first, *self.program.operands)]
        option = (size, *types)
        plan = self.calls.find(given, option) or self.calls.recall(given, option)
        if plan is None:
            plan = self._resolved(size, given, types)
            self.calls.keep(given, option, plan)
        return plan(given)

    def _resolved(
        self, size: tuple[int, int], given: Sequence[torch.Tensor], types: Sequence[torch.dtype]
    ) -> CallPlan:
        program, gradient = self.program, self.gradient
        kinds = [(self.first, Tile), *program.operands.items()]
        makes = [partial(self._read, o, kind, size) for o, kind in kinds]
        read = [make(t) for make, t in zip(makes, given, strict=True)]
        config = _configuration(program, size[1])
        dtypes = dict(zip(gradient.wanted, types, strict=True))
        buffers = [*allocate(program, *size, dtypes, config, "meta").values()]
        kernel = self._kernel(config, tuple([t.dtype for t in (*read, *buffers)]))
        places = {x: i for i, x in enumerate(program.outputs)}
        total = [gradient.program.operands.get(x) is Scalar for x in gradient.wanted]
        results = zip(map(places.get, gradient.wanted), total, types, strict=True)
        due = [*zip(results, gradient.shapes(size, {}), strict=True)]
        folds, device = Finish(program, *size, config), given[0].device

        def finish(found: list[torch.Tensor]) -> None:
            """Fold partials, and give each gradient: 0 where it has no place."""
            folds(found)
            found[:] = [
                torch.zeros(shape, dtype=dtype, device=device)
                if place is None
                else (found[place].sum() if whole else found[place]).to(dtype)
                for (place, whole, dtype), shape in due
            ]

        ready = [
            (i, make)
            for i, (make, t, x) in enumerate(zip(makes, given, read, strict=True))
            if (t.data_ptr(), t.shape, t.stride()) != (x.data_ptr(), x.shape, x.stride())
        ]
        made = [(tuple(t.shape), t.stride(), t.dtype) for t in buffers]
        return CallPlan(lambda x, y: kernel((*x, *y)), device, made, ready, finish)

    def _read(
        self, o: str, kind: type[Resource], size: tuple[int, int], value: torch.Tensor
    ) -> torch.Tensor:
        """Make a tensor readable; of a mean's gradient each element's share."""
        if kind is Scalar:
            return value.reshape(1).float()
        value = kind.flat(value, size[0])
        program = self.gradient.program
        for x, mean in program.reductions.items():
            if mean.mean and gradient_of(x) == o:
                half = program.graph.nodes[program.graph.outputs[x]].shape is Shape.HALF
                return value / (size[1] // 2 if half else size[1])
        return tma_ready(value) if kind.by_tma else value

    def _kernel(
        self, config: TileConfig, types: tuple[torch.dtype, ...]
    ) -> Callable[[tuple[torch.Tensor, ...]], None]:
        return cached(lambda: unfused.prepare(self.program, types, config))


def _kind(program: Program, o: str) -> type[Operand] | None:
    """Find what a tensor of the forward pass is to the kernel."""
    if kind := program.operands.get(o):
        return ColVector if kind.varies is Shape.INDEX else kind
    return _came(program.outputs[o])


def _came(kind: type) -> type[Operand] | None:
    """Find what an output's gradient is to the kernel."""
    if issubclass(kind, GroupTile):
        return None
    if issubclass(kind, Reduction):
        return RowVector if kind.over_rows else ColVector
    return {AddTile: Tile, HalfTile: HalfOperand, Tile: Tile, WideTile: WideTile}.get(
        kind, ColVector
    )


def _in_place(graph: Graph, first: str) -> Graph:
    """Make `first` the graph's accumulator."""
    found, at = Graph(), list[int]()
    for node in graph.nodes:
        if node.op == "operand" and node.name == first:
            node = Node("acc", (), Shape.TILE)
        at.append(found.add(replace(node, args=tuple(at[a] for a in node.args))).index)
    found.outputs = {x: at[i] for x, i in graph.outputs.items()}
    return found


def _configuration(program: Program, n: int) -> TileConfig:
    over_rows = any(kind.over_rows for kind in program.reductions.values())
    columns = min(_COLUMNS, -(-n // 256) * 256)
    return TileConfig(_SUMMED_ROWS if over_rows else _ROWS, columns, fused=False)
