"""Gradients of a program at run time: its adjoint, evaluated by PyTorch.

- What is computed is the chain rule over the graph (`adjoint.py`), in float32, rounded once.
- Of the forward pass it reads what is stored. A stored tile stands for the value that was rounded
  into it, and what is under a row's scale is that value over the scale.
- Where the accumulator would still be needed, the forward pass of a call with gradients stores one
  tile more (`keeping`): at 4096³ on an H200 a product takes 0.19 ms, and a 16-bit tile 0.008 ms.
  What needs the accumulator even so, a scale's gradient, has the product computed again.
- On a Hopper GPU it is one launch (`gradient_pass.py`). Elsewhere PyTorch evaluates it, on another
  GPU by kernels of torch.compile's, made once for each choice of gradients.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from types import FunctionType, MethodType

from coda_agent.primitives.adjoint import adjoints, dependents, recorded
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.derivatives import plus
from coda_agent.primitives.elementary import equal
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Operand, Shape, Value
from coda_agent.primitives.groups import GroupTile
from coda_agent.primitives.interpret import evaluate
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.operation import PLACED
from coda_agent.primitives.ops import exp
from coda_agent.primitives.placed import column_index
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import (
    ColIndex,
    ColVector,
    HeadTable,
    RowGather,
    RowLogSumExp,
    RowVector,
    Scalar,
    Tile,
)
from coda_agent.primitives.tables import Table

PRODUCT = "acc"
"""The name of the accumulator's gradient, which no operand has."""


KEPT = "kept"
"""The output that `keeping` adds."""


def extremum(kind: type) -> bool:
    """Tell whether an output is one: its gradient goes to one place."""
    return issubclass(kind, Reduction) and kind.combine in ("max", "min")


@dataclass(frozen=True, eq=False)
class Gradient:
    """Gradients of some inputs, out of those of some outputs.

    Attributes:
        wanted: Names of operands, `PRODUCT` of the accumulator, and its output's name of what an
            `AddTile` is added to.
        given: Outputs whose gradients come in.
        graph: What is computed; a node for each of `wanted` whose gradient is not 0.
        product: Whether it needs the accumulator.
        reads: Operands and outputs of the forward pass that it needs.
    """

    program: Program
    wanted: tuple[str, ...]
    given: tuple[str, ...]
    graph: Graph
    product: bool
    reads: tuple[str, ...]

    @classmethod
    def of(
        cls, program: Program, wanted: Sequence[str], given: Sequence[str], stored: Sequence[str]
    ) -> Gradient:
        """Derive a program's gradient, which may read the outputs `stored`."""
        forward, graph = program.graph, Graph()
        acc = graph.add(Node("acc", (), Shape.TILE))
        leaf = {
            o: graph.add(Node("operand", (), Shape.COL if s is Shape.INDEX else s, o))
            for o, s in ((o, kind.varies) for o, kind in program.operands.items())
        }
        known = {
            forward.outputs[o]: graph.add(Node("operand", (), Shape.TILE, o))
            for o in reversed(stored)
            if program.outputs[o] is Tile
        }
        values = forward.replay(acc, leaf, recorded, known)
        known |= _under(forward, values, known)
        values = forward.replay(acc, leaf, recorded, known)
        seeds: dict[int, Operand] = {}
        came: dict[str, Value] = {}
        for o in given:
            node, came[o] = _seed(graph, program, o, values)
            seeds[node] = plus(seeds.get(node, 0.0), came[o])
        at = {n.name: i for i, n in enumerate(forward.nodes) if n.op == "operand"}
        at[PRODUCT] = next(i for i, n in enumerate(forward.nodes) if n.op == "acc")
        found = adjoints(forward, values, seeds, [at[x] for x in wanted if x in at])
        for x in wanted:
            value = found.get(at[x], 0.0) if x in at else came.get(x, 0.0)
            if isinstance(value, Value):
                graph.outputs[x] = value.index
        graph = graph.prune()
        ours = next((i for i, n in enumerate(graph.nodes) if n.op == "acc"), None)
        product = any(ours in n.args and n.op not in PLACED for n in graph.nodes)
        named = {n.name for n in graph.nodes if n.op == "operand"}
        # A table tells its own size.
        named |= {o for o, kind in program.operands.items() if o in wanted and _own_size(kind)}
        reads = tuple(x for x in (*program.operands, *program.outputs) if x in named)
        return cls(program, tuple(wanted), tuple(given), graph, product, reads)

    def __call__(
        self,
        size: tuple[int, int],
        tensors: Mapping[str, torch.Tensor],
        types: Sequence[torch.dtype],
        product: torch.Tensor | None = None,
        block_size: int | None = None,
    ) -> list[torch.Tensor]:
        """Compute the gradients `wanted`, with one dimension of rows.

        Args:
            tensors: Those that it reads, by name, and gradients by the name of `gradient_of`; with
                any leading dimensions.
            product: The accumulator in float32 or float64, if it is needed; the type of all that
                is computed.
            block_size: That of reductions that are raw partials.
        """
        if product is None:  # of which places ask the size
            like = next(iter(tensors.values()))
            product = like.new_zeros((), dtype=torch.float32).expand(size)
        lifted = {}
        for o in self.reads:
            value, operands = tensors[o], self.program.operands
            if o in operands:
                value = operands[o].flat(value, size[0])
                lifted[o] = operands[o].lifted(value, product)
                if operands[o] is ColIndex:
                    lifted[o] = lifted[o].to(product.dtype)[:, None]
            else:
                lifted[o] = self._spread(o, value, product, block_size)
        for o in self.given:
            lifted[gradient_of(o)] = self._spread(o, tensors[gradient_of(o)], product, block_size)
        values = evaluate(self.graph, product, lifted)
        results = []
        for x, shape, dtype in zip(self.wanted, self.shapes(size, tensors), types, strict=True):
            if x in self.graph.outputs:
                found = _folded(self._kind(x), values[self.graph.outputs[x]], shape)
                # A result is no input, nor another result.
                results.append(found.to(dtype, copy=True, memory_format=torch.contiguous_format))
            else:
                results.append(product.new_zeros(shape, dtype=dtype))
        return results

    def shapes(
        self, size: tuple[int, int], tensors: Mapping[str, torch.Tensor]
    ) -> list[tuple[int, ...]]:
        """Give the shapes of a call's results, which may be symbols."""
        return [
            tuple(tensors[x].shape) if _own_size(self._kind(x)) else self._kind(x).extents(*size)
            for x in self.wanted
        ]

    def _kind(self, x: str) -> type[Resource]:
        return self.program.operands.get(x, Tile)

    @cached_property
    def fused(self) -> Callable[..., list[torch.Tensor]]:
        """The same by few kernels, which torch.compile makes."""
        # Of one code object it keeps eight results, so each gradient has its own.
        call = type(self).__call__
        own = FunctionType(call.__code__.replace(), call.__globals__, argdefs=call.__defaults__)
        return torch.compile(MethodType(own, self))

    def _spread(
        self, o: str, value: torch.Tensor, product: torch.Tensor, block_size: int | None
    ) -> torch.Tensor:
        """Spread an output, or its gradient, over the tile that it folds."""
        kind, (m, n) = self.program.outputs[o], product.shape
        value = value.to(product.dtype)
        if issubclass(kind, GroupTile):
            value = kind.flat(value, m)[..., None]
            return torch.nn.functional.pad(value, (0, kind.width - 1)).flatten(1)
        if kind is not RowGather and not issubclass(kind, Reduction):
            return kind.flat(value, m)
        over_rows = issubclass(kind, Reduction) and kind.over_rows
        kept, folded = (n, m) if over_rows else (m, n)
        block = folded if kind is RowGather else block_size or folded
        graph = self.program.graph
        if graph.nodes[graph.outputs[o]].shape.half_width:
            folded, block = folded // 2, block // 2
        if issubclass(kind, Reduction) and kind.mean:
            value = value / block
        value = value.reshape(kept, -1, 1).expand(-1, -1, block).flatten(1)[:, :folded]
        return value.mT if over_rows else value


def keeping(program: Program, given: Sequence[str], stored: Sequence[str]) -> Program | None:
    """Store one tile more where gradients would need the accumulator.

    It is `KEPT`, the last value with which those of tensors do not.

    Args:
        given: Outputs that can have a gradient.
        stored: Tiles among the outputs that gradients may read.

    Returns:
        None where nothing is to be gained, or something has no derivative.
    """
    tensors = [o for o, kind in program.operands.items() if kind not in (Scalar, ColIndex)]

    def needed(program: Program, stored: Sequence[str]) -> bool:
        return Gradient.of(program, [PRODUCT, *tensors], given, stored).product

    try:
        if not needed(program, stored):
            return None
    except ProgramError:
        return None
    nodes, outputs = program.graph.nodes, program.graph.outputs
    vary = dependents(program.graph, [i for i, n in enumerate(nodes) if n.op == "acc"])
    for i in sorted(vary, reverse=True):
        if nodes[i].shape is Shape.TILE and i not in outputs.values():
            graph = Graph(nodes, {**outputs, KEPT: i})
            more = replace(program, outputs={**program.outputs, KEPT: Tile}, graph=graph)
            if not needed(more, [*stored, KEPT]):
                return more
    return None


def gradient_of(o: str) -> str:
    """Name an output's gradient, as nothing in a program is called."""
    return f"gradient of {o}"


def _under(
    forward: Graph, values: Sequence[Operand], known: Mapping[int, Value]
) -> dict[int, Value]:
    """Find values known by their product with a row's scale."""
    vary = dependents(forward, [i for i, n in enumerate(forward.nodes) if n.op == "acc"])
    found: dict[int, Value] = {}
    for i in sorted(known, reverse=True):
        at, value = i, known[i]
        while (node := forward.nodes[at]).op == "mul" and len({*node.args} & vary) == 1:
            at, other = sorted(node.args, key=lambda x: x not in vary)
            scale = values[other]
            if not isinstance(scale, Value) or scale.shape is not Shape.COL or at in known:
                break
            found[at] = value = value / scale
    return found


def _seed(graph: Graph, program: Program, o: str, values: Sequence[Operand]) -> tuple[int, Value]:
    """Find the node whose gradient an output's is, and that gradient."""
    node, kind = program.graph.outputs[o], program.outputs[o]
    if extremum(kind):
        raise ProgramError(
            f"output {o!r}, a {kind.__name__}, has no derivative: its gradient goes to the one "
            "place that has it",
            hint="detach it",
        )
    index = 0.0
    if kind is RowGather:
        node, target = program.graph.nodes[node].args
        index = values[target]
    x = values[node]
    shape = program.graph.nodes[node].shape
    came = graph.add(Node("operand", (), shape, gradient_of(o)))
    if kind is RowGather:
        return node, came * equal(column_index(x), index)  # pyright: ignore[reportArgumentType]
    if kind is RowLogSumExp:
        total = graph.add(Node("operand", (), shape, o))
        return node, came * exp(x - total)
    return node, came


def _own_size(kind: type) -> bool:
    return issubclass(kind, (HeadTable, Table))


def _folded(kind: type, gradient: torch.Tensor, shape: Sequence[int]) -> torch.Tensor:
    """Fold the gradients of all places that read an operand."""
    if _own_size(kind):
        m, n = gradient.shape
        rows, columns = (torch.arange(x, device=gradient.device) for x in (m, n))
        if issubclass(kind, Table):
            rows, columns = kind.entry(rows, columns, (m, n), tuple(shape))
        else:
            rows, columns = rows % shape[0], columns % shape[1]
        down = gradient.new_zeros(shape[0], n).index_add(0, rows, gradient)
        return gradient.new_zeros(*shape).index_add(1, columns, down)
    if kind is ColVector:
        return gradient.sum(1)
    if kind is RowVector:
        return gradient.sum(0)
    return gradient.sum() if kind is Scalar else gradient
