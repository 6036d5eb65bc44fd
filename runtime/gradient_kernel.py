"""The kernel of `gradient_pass.py`, which alone imports this: that of unfused forms, with any tile
in the place of the product, and operands of half width."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from cutlass import cute
from quack.cute_dsl_utils import torch2cute_dtype_map

from coda_agent.primitives.graph import Shape
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import Tile
from coda_agent.primitives.table_load import any_strides
from coda_agent.primitives.tables import Table
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.elementwise import COLUMNS, Elementwise, _loaded


class GradientKernel(Elementwise):
    """The kernel of one program in one configuration."""

    def _load(
        self, row: Any, product: Any, tensors: Any, stores: Any
    ) -> tuple[Any, dict[str, Any], dict[str, Any]]:
        acc, values, held = super()._load(row, product, tensors, stores)
        for o, kind in self.program.operands.items():
            if kind.varies is Shape.HALF:
                values[o] = _loaded(tensors[o], row.read, row.place.column, COLUMNS // 2)
        return acc, values, held

    def _replayed(
        self, acc: list[Any], values: Mapping[str, Any], row: Any
    ) -> dict[str, list[Any]]:
        # A value that a row has in common is one for both columns of a pair.
        found = super()._replayed(acc, values, row)
        for o, node in self.root.items():
            if self.program.paired and not node.shape.half_width and len(found[o]) < COLUMNS:
                found[o] = [x for x in found[o] for _ in "ab"]
        return found


def compile_gradient(program: Program, config: TileConfig, types: Sequence[torch.dtype]) -> Any:
    """The kernel for tensors of these types, of what stands for the product, then operands and
    outputs; sizes and strides are those of a call, and a scalar has one element."""

    def fake(dtype: torch.dtype, rank: int, *, rows: bool) -> Any:
        """A tensor whose last stride is 1; with `rows`, addressed in units of 16 bytes."""
        element = torch2cute_dtype_map[dtype]
        unit = 128 // element.width if rows else 1
        strides = [cute.sym_int64(divisibility=unit) for _ in range(rank - 1)]
        return cute.runtime.make_fake_tensor(
            element,
            tuple(cute.sym_int() for _ in range(rank)),
            stride=(*strides, 1),
            assumed_align=unit * element.width // 8,
        )

    tensors = []
    kinds = [Tile, *program.operands.values(), *program.outputs.values()]
    reduced = [None] * (1 + len(program.operands)) + [*map(program.reductions.get, program.outputs)]
    for dtype, kind, reduction in zip(types, kinds, reduced, strict=True):
        if issubclass(kind, Table):
            tensors.append(any_strides(torch2cute_dtype_map[dtype]))
        elif reduction:
            tensors.append(fake(dtype, 2, rows=reduction.over_rows))
        else:
            tensors.append(fake(dtype, len(kind.dims) or 1, rows=kind.dims not in ((), ("M",))))
    kernel = GradientKernel(program, config)
    stream = cute.runtime.make_fake_stream(use_tvm_ffi_env_stream=True)
    return cute.compile(kernel, tuple(tensors), stream, options="--enable-tvm-ffi")
