"""Cases beyond the check shapes, for programs that read places.

A program can be right at the shapes that are checked and wrong further out. So it is evaluated
around each of its constants, and as far out as the bench shapes reach: in tall and in wide outputs.
Where the reference is the same function at every place, the program's places are moved, too. That
reaches any row and column at once.
"""

from __future__ import annotations

import dataclasses
import itertools
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from coda_agent.agent.judge.structures import base_shape
from coda_agent.primitives.graph import Graph, Node, Shape
from coda_agent.primitives.program import Program
from coda_agent.specs import Spec, draw_inputs, run_reference

_OPS = "row_index", "column_index"
_ELEMENTS = 2**22  # of a tall or wide output
_ROLLED = 256  # columns, a multiple of every group and pair
_STEP = 128  # places are moved by a multiple of it, for the same reason
_FARTHEST = 2**23  # float32 still tells neighbours apart
_MOST = 12  # constants that are looked at


class Case(NamedTuple):
    """A shape and a program at moved places, with words for it."""

    label: str
    sizes: Mapping[str, int]
    program: Program


def place_cases(spec: Spec, program: Program, binding: Mapping[str, str]) -> Iterator[Case]:
    """List a program's cases; none where it asks for no place."""
    graph = program.graph
    if not any(node.op in _OPS for node in graph.nodes):
        return
    numbers = constants(graph)
    yield from _long_shapes(spec, program, numbers)
    if len(spec.dims) == 3 and uniform(spec, binding):
        far = [0, *(_up(c + 1, _STEP) for c in numbers), *(_down(c, _STEP) for c in numbers)]
        far += [_up(s[d], _STEP) for s in spec.bench_shapes for d in spec.gemm_dims[:2]]
        places = sorted({x for x in (*far, _FARTHEST) if x <= _FARTHEST})
        for row, column in itertools.product(places, places):
            if row or column:
                label = f"from row {row} and column {column} on"
                yield Case(label, _uniform_shape(spec), moved(program, row, column))


def constants(graph: Graph) -> list[int]:
    """List the whole numbers of a graph that may bound a place."""
    values = (abs(node.value) for node in graph.nodes if node.op == "const")
    numbers = (x for value in values if value for x in (value, 1 / value))
    return sorted({round(x) for x in numbers if 2 <= x < _FARTHEST})[-_MOST:]


def moved(program: Program, row: int, column: int) -> Program:
    """Move a program's places, as if its output began there."""
    offsets = {"row_index": row, "column_index": column}
    nodes: list[Node] = []
    place: list[int] = []
    for node in program.graph.nodes:
        nodes.append(dataclasses.replace(node, args=tuple(place[a] for a in node.args)))
        if offset := offsets.get(node.op):
            nodes.append(Node("const", (), Shape.SCALAR, value=float(offset)))
            nodes.append(Node("add", (len(nodes) - 2, len(nodes) - 1), node.shape))
        place.append(len(nodes) - 1)
    outputs = {o: place[i] for o, i in program.graph.outputs.items()}
    return dataclasses.replace(program, graph=Graph(nodes, outputs))


def uniform(spec: Spec, binding: Mapping[str, str]) -> bool:
    """Whether the reference is the same function in every place."""
    sizes, types = _uniform_shape(spec), spec.default_types()
    inputs = draw_inputs(spec, sizes, types, seed=1, binding=binding)
    truth = run_reference(spec, inputs, binding=binding, exact=True)
    m, n, _ = spec.gemm_dims
    for dim, shift in ((m, sizes[m] // 2), (n, _ROLLED)):
        part = Fraction(shift, sizes[dim])
        rolled = _rolled(spec, binding, inputs, dim, part)
        again = run_reference(spec, rolled, binding=binding, exact=True)
        for o, due in _rolled(spec, binding, truth, dim, part).items():
            same = (again[o] - due).abs() <= 1e-9 * due.abs() + 1e-290
            if not bool((same | ~due.isfinite()).all()):
                return False
    return True


def _rolled(
    spec: Spec, binding: Mapping[str, str], values: Mapping[str, Any], dim: str, part: Fraction
) -> dict[str, Any]:
    """Roll axes that are over a dim by the same part."""
    rolled = dict(values)
    for name, value in values.items():
        shape = {**spec.inputs, **spec.outputs}[name].shape
        extents = shape.cases[binding.get(shape.parameter, "")]
        for axis, entry in enumerate(extents if getattr(value, "ndim", 0) else ()):
            if dim in re.findall(r"[A-Za-z_]\w*", str(entry)):
                rolled[name] = rolled[name].roll(int(part * value.shape[axis]), axis)
    return rolled


def _uniform_shape(spec: Spec) -> dict[str, int]:
    """Give the base shape enough columns to roll."""
    n = spec.gemm_dims[1]
    base = dict(base_shape(spec))
    if spec.dims[n].only is None:
        base[n] = _up(2 * _ROLLED, spec.dims[n].multiple_of)
    return base


def _long_shapes(spec: Spec, program: Program, numbers: list[int]) -> Iterator[Case]:
    """List tall and wide shapes, else bench shapes with a short K."""
    m, n, k = spec.gemm_dims
    base = base_shape(spec)
    if len(spec.dims) != 3:
        for sizes in spec.bench_shapes[:1]:
            yield Case("at a bench shape", {**sizes, k: base[k]}, program)
        return
    for dim, other in ((m, n), (n, m)):
        if spec.dims[dim].only is not None:
            continue
        several = (s[other] for s in spec.check_shapes if s[other] > 1)
        few = min(several, default=base[other])
        reach = max([s[dim] for s in spec.bench_shapes] + [c + _STEP for c in numbers])
        size = _up(min(reach, _ELEMENTS // few), spec.dims[dim].multiple_of)
        yield Case(f"{dim} = {size}", {**base, dim: size, other: few}, program)


def _up(x: int, step: int) -> int:
    return -(-x // step) * step


def _down(x: int, step: int) -> int:
    return x // step * step
