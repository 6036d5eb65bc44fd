"""Gradients of a program by one launch on a Hopper GPU: the graph of `gradient.py` as a program of
its own, which the elementwise kernel of unfused forms replays.

- Each tensor is read once. The gradient at the accumulator and those of tiles are written in their
  own types, and those of vectors are sums over rows or columns, whose partials one launch folds.
- In the place of the product stands the first tile that is read, where the product is not.
"""

from __future__ import annotations

import hashlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import lru_cache
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.gradient import Gradient, gradient_of
from coda_agent.primitives.graph import Graph, Node, Shape
from coda_agent.primitives.groups import GroupTile
from coda_agent.primitives.kinds import HALVES, Operand, Resource
from coda_agent.primitives.launch import allocate
from coda_agent.primitives.lower import lowering_digest
from coda_agent.primitives.objects import cached
from coda_agent.primitives.plan import Finish, tma_ready
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

if TYPE_CHECKING:
    import torch

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
        gradient: What is computed.
        program: The same as a program.
        first: What stands for the product; None where the product does.
    """

    gradient: Gradient
    program: Program
    first: str | None
    _known: dict[Any, Callable[..., None]] = field(default_factory=dict)

    @classmethod
    def of(cls, gradient: Gradient) -> GradientPass | None:
        """That of `gradient`; None where the kernel does not carry it: of tables, of groups, and
        where no tile is read."""
        forward, graph = gradient.program, gradient.graph
        named = {n.name for n in graph.nodes if n.op == "operand"}
        read = {o: _read(forward, o) for o in gradient.reads}
        read |= {gradient_of(o): _came(forward.outputs[o]) for o in gradient.given}
        stored = {x: _STORED.get(forward.operands.get(x, Tile)) for x in graph.outputs}
        operands = {o: kind for o, kind in read.items() if kind and o in named}
        outputs = {x: kind for x, kind in stored.items() if kind}
        if not outputs or len(operands) < len(named) or len(outputs) < len(stored):
            return None
        first = None
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
        """As a call of the gradient, of final reductions, on a Hopper GPU.

        Raises:
            CompileError: the DSL refuses the program.
        """
        (m, n), program, wanted = size, self.program, self.gradient.wanted
        like = next(iter(tensors.values()))
        values = [self._ready(o, kind, tensors[o], m, n) for o, kind in program.operands.items()]
        if self.first is not None:
            product = tma_ready(Tile.flat(tensors[self.first], m))
        assert product is not None
        dtypes = dict(zip(wanted, types, strict=True))
        config = _configuration(program, n)
        outputs = allocate(program, m, n, dtypes, config, like.device)
        given = (product, *values, *outputs.values())
        self._kernel(config, tuple([t.dtype for t in given]))(given)
        results = [*outputs.values()]
        Finish(program, m, n, config)(results)
        found = dict(zip(outputs, results, strict=True))
        return [
            self._shaped(x, found[x]).to(dtype)
            if x in found
            else like.new_zeros(shape, dtype=dtype)
            for x, shape, dtype in zip(
                wanted, self.gradient.shapes(size, tensors), types, strict=True
            )
        ]

    def _ready(
        self, o: str, kind: type[Resource], value: torch.Tensor, m: int, n: int
    ) -> torch.Tensor:
        """A tensor as the kernel reads it; of a mean's gradient each element's share."""
        if kind is Scalar:
            return value.reshape(1).float()
        value = kind.flat(value, m)
        program = self.gradient.program
        for x, mean in program.reductions.items():
            if mean.mean and gradient_of(x) == o:
                half = program.graph.nodes[program.graph.outputs[x]].shape is Shape.HALF
                return value / (n // 2 if half else n)
        return tma_ready(value) if kind.by_tma else value

    def _shaped(self, x: str, found: torch.Tensor) -> torch.Tensor:
        return found.sum() if self.gradient.program.operands.get(x) is Scalar else found

    def _kernel(
        self, config: TileConfig, types: tuple[torch.dtype, ...]
    ) -> Callable[[tuple[torch.Tensor, ...]], None]:
        known = self._known.get((config, types))
        if known is None:
            made = cached(lambda: _compiled(self.program, config, types))
            # Just compiled, the function is a wrapper that parses keywords; from the cache bare.
            known = getattr(made, "_tvm_ffi_function", None) or made
            self._known[config, types] = known
        return known


def _read(program: Program, o: str) -> type[Operand] | None:
    """What an operand or an output of the forward pass is to the kernel."""
    if kind := program.operands.get(o):
        return ColVector if kind.varies is Shape.INDEX else kind
    return _came(program.outputs[o])


def _came(kind: type) -> type[Operand] | None:
    """What an output's gradient is to the kernel."""
    if issubclass(kind, GroupTile):
        return None
    if issubclass(kind, Reduction):
        return RowVector if kind.over_rows else ColVector
    return {AddTile: Tile, HalfTile: HalfOperand, Tile: Tile, WideTile: WideTile}.get(
        kind, ColVector
    )


def _in_place(graph: Graph, first: str | None) -> Graph:
    """The graph where operand `first` is the accumulator."""
    found, at = Graph(), list[int]()
    for node in graph.nodes:
        if first is not None and node.op == "operand" and node.name == first:
            node = Node("acc", (), Shape.TILE)
        at.append(found.add(replace(node, args=tuple(at[a] for a in node.args))).index)
    found.outputs = {x: at[i] for x, i in graph.outputs.items()}
    return found


def _configuration(program: Program, n: int) -> TileConfig:
    over_rows = any(kind.over_rows for kind in program.reductions.values())
    columns = min(_COLUMNS, -(-n // 256) * 256)
    return TileConfig(_SUMMED_ROWS if over_rows else _ROWS, columns, fused=False)


def _compiled(program: Program, config: TileConfig, types: Sequence[torch.dtype]) -> Any:
    from cutlass.cutlass_dsl import CuTeDSL
    from quack.cache.jit import jit_cache

    arch = str(CuTeDSL._get_dsl().envar.arch)
    shown = ",".join(map(str, types))
    digests = f"{program.digest} {lowering_digest()} {_own_digest()}"

    def gradient_pass(_: str) -> Any:
        from coda_agent.primitives.gradient_kernel import compile_gradient

        return compile_gradient(program, config, types)

    return jit_cache(gradient_pass)(f"{digests} {config.label} {shown} {arch}")


@lru_cache(maxsize=1)
def _own_digest() -> str:
    return hashlib.sha256(Path(__file__).with_name("gradient_kernel.py").read_bytes()).hexdigest()
