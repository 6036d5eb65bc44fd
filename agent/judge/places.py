"""Cases beyond the check shapes, for programs and references that read places.

A program can be right at the shapes that are checked and wrong further out: it reads places, or it
does not and the reference has a slice there. So it is evaluated around each whole number of both,
and as far out as the bench shapes reach: in tall and in wide outputs. Where the reference is the
same function at every place, what the program makes of places alone is evaluated at all of them,
and its places are moved to one of each kind. That meets a single tile. Where it is the same along
the diagonal, as a window of attention is, places are moved along that.
"""

from __future__ import annotations

import ast
import itertools
import operator
import re
from collections.abc import Iterator, Mapping
from fractions import Fraction
from typing import Any, NamedTuple

from coda_agent.agent.judge.replaying import SHIFT, followed
from coda_agent.agent.judge.structures import base_shape
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.graph import Graph
from coda_agent.primitives.operation import OPS
from coda_agent.primitives.program import Program
from coda_agent.specs import Spec, draw_inputs, run_reference
from coda_agent.specs.defaults import up
from coda_agent.specs.format import Draw

_OPS = "row_index", "column_index"
_ELEMENTS = 2**22  # of a tall or wide output
_FEW = 8  # rows or columns of the longest ones: B is as long
_ROLLED = 256  # columns, a multiple of every group and pair
_STEP = 128  # places are moved by a multiple of it, for the same reason
_FARTHEST = 2**23  # float32 still tells neighbours apart
_MOST = 12  # constants that are looked at
_NEAR = 2**20  # rows and columns that are all looked at; beyond, those around constants
_KINDS, _PLACES = 512, 24  # kinds of rows, and of columns; of places that data meet


_ARITHMETIC = {
    ast.Add: operator.add, ast.Sub: operator.sub, ast.Mult: operator.mul,
    ast.FloorDiv: operator.floordiv,
}  # fmt: skip


class Case(NamedTuple):
    """A shape and a program at moved places, with words for it."""

    label: str
    sizes: Mapping[str, int]
    program: Program


def place_cases(spec: Spec, program: Program, binding: Mapping[str, str]) -> Iterator[Case]:
    """List a program's cases; none where neither it nor the reference asks for a place."""
    graph, own = program.graph, far_numbers(spec)
    asks = _asks(graph)
    if not asks and not own:
        return
    numbers = sorted({*constants(graph), *own})
    corners = set[tuple[int, int]]()
    if asks and len(spec.dims) == 3:
        if uniform(spec, binding):
            corners = {(_down(r, _STEP), _down(c, _ROLLED)) for r, c in witnesses(graph)}
        elif {"row", "column"} in _kinds(graph) and uniform(spec, binding, diagonally=True):
            corners = {(_down(x, _ROLLED),) * 2 for x in numbers}
    for row, column in sorted(corners - {(0, 0)}):
        label = f"from row {row} and column {column} on"
        yield Case(label, _uniform_shape(spec), moved(program, row, column))
    yield from _long_shapes(spec, program, numbers)  # of what is wrong there much is diagnosed


def _asks(graph: Graph) -> bool:
    return any(node.op in _OPS for node in graph.nodes)


def needless_draw(spec: Spec, program: Program, binding: Mapping[str, str]) -> bool:
    """Whether a program draws numbers by place, and the reference goes by none.

    What one number in ten million decides, no draw would show.
    """
    drawn = any(node.op == "philox_uniform" for node in program.graph.nodes)
    return drawn and len(spec.dims) == 3 and uniform(spec, binding)


def witnesses(graph: Graph) -> list[tuple[int, int]]:
    """Find a place for each kind of values that a graph makes of places alone."""
    kinds = _kinds(graph)
    numbers = constants(graph)
    far = {x for c in (*numbers, _FARTHEST) for x in range(c - 2, c + 3) if 0 <= x <= _FARTHEST}
    axis = torch.tensor([*range(_NEAR), *sorted(far - {*range(_NEAR)})], dtype=torch.float64)
    rows = axis[_firsts(_met(graph, kinds, "row", _values(graph, kinds, axis, axis[:1])), _KINDS)]
    columns = axis[
        _firsts(_met(graph, kinds, "column", _values(graph, kinds, axis[:1], axis)), _KINDS)
    ]
    found = _met(graph, kinds, "", _values(graph, kinds, rows, columns))
    grid = [x.expand(len(rows), len(columns)).flatten() for x in found]
    places = torch.cartesian_prod(rows, columns).long()
    return [(r, c) for r, c in places[_firsts(grid, _PLACES)].tolist()]


def _kinds(graph: Graph) -> list[set[str] | None]:
    """Find what each node goes by: rows, columns, both, nothing; None is data."""
    kinds: list[set[str] | None] = []
    for node in graph.nodes:
        given = [kinds[a] for a in node.args]
        if node.op in _OPS:
            kinds.append({node.op.removesuffix("_index")})
        elif node.op == "const":
            kinds.append(set())
        elif node.op in OPS and None not in given:
            kinds.append(set().union(*(x for x in given if x)))
        else:
            kinds.append(None)
    return kinds


def _values(graph: Graph, kinds: list[set[str] | None], rows: Any, columns: Any) -> dict[int, Any]:
    """Evaluate what goes by places alone; rows are down, and columns along."""
    values: dict[int, Any] = {}
    for i, node in enumerate(graph.nodes):
        if node.op in _OPS:
            values[i] = rows[:, None] if node.op == "row_index" else columns[None]
        elif node.op == "const":
            values[i] = torch.tensor([[node.value]], dtype=torch.float64)
        elif kinds[i] is not None:
            values[i] = OPS[node.op].torch(*(values[a] for a in node.args))
    return values


def _met(
    graph: Graph, kinds: list[set[str] | None], axis: str, values: dict[int, Any]
) -> list[Any]:
    """List values of one axis that others meet; by default those of places that data meet."""
    met = {a for i, node in enumerate(graph.nodes) for a in node.args if kinds[i] is None}
    if axis:
        mixed = {i for i, kind in enumerate(kinds) if kind and kind != {axis}}
        met |= {a for i in mixed for a in graph.nodes[i].args}
    met |= {*graph.outputs.values()}
    alone = [i for i in sorted(met) if (kinds[i] == {axis} if axis else kinds[i])]
    return [values[i].flatten() if axis else values[i] for i in alone]


def _firsts(values: list[Any], most: int) -> list[int]:
    """Find where each tuple of values stands first: so many, from both ends."""
    if not values:
        return [0]
    _, kind = torch.stack(values, -1).nan_to_num(-1.5).unique(dim=0, return_inverse=True)
    first = torch.full((int(kind.max()) + 1,), len(kind))
    first = sorted(first.scatter_reduce(0, kind, torch.arange(len(kind)), "amin").tolist())
    return first if len(first) <= most else [*first[: most // 2], *first[-most // 2 :]]


def constants(graph: Graph) -> list[int]:
    """List the whole numbers of a graph that may bound a place."""
    values = (abs(node.value) for node in graph.nodes if node.op == "const")
    numbers = (x for value in values if value for x in (value, 1 / value))
    return sorted({round(x) for x in numbers if 2 <= x < _FARTHEST})[-_MOST:]


def far_numbers(spec: Spec) -> list[int]:
    """List the whole numbers of a reference that may bound a place beyond all check shapes."""
    least = min(max(sizes[d] for sizes in spec.check_shapes) for d in spec.gemm_dims[:2])
    values = {abs(_whole(node)) for node in ast.walk(ast.parse(spec.reference_source))}
    return sorted(x for x in values if least <= x < _FARTHEST)[-_MOST:]


def _whole(node: ast.AST) -> int:
    """Compute a whole number that is written down; else 0."""
    if isinstance(node, ast.Constant) and type(node.value) is int:
        return node.value
    if isinstance(node, ast.BinOp) and (apply := _ARITHMETIC.get(type(node.op))):
        one, other = _whole(node.left), _whole(node.right)
        return apply(one, other) if one and other else 0
    return -_whole(node.operand) if isinstance(node, ast.UnaryOp) else 0


def moved(program: Program, row: int, column: int) -> Program:
    """Move a program's places, as if its output began there."""
    offsets, nodes = {"row_index": row, "column_index": column}, enumerate(program.graph.nodes)
    return followed(program, {i: ("add", x) for i, n in nodes if (x := offsets.get(n.op))}, SHIFT)


def uniform(spec: Spec, binding: Mapping[str, str], *, diagonally: bool = False) -> bool:
    """Whether the reference is the same function in every place, or along the diagonal.

    One that has a number beyond the shape may go by places there.
    """
    sizes, types = _uniform_shape(spec), spec.default_types()
    m, n, _ = spec.gemm_dims
    if any(x >= min(sizes[m], sizes[n]) for x in far_numbers(spec)):
        return False
    inputs = draw_inputs(spec, sizes, types, seed=1, binding=binding)
    truth = run_reference(spec, inputs, binding=binding, exact=True)
    ways = [{m: sizes[m] // 2}, {n: _ROLLED}]
    if diagonally:
        # What is left of few columns may be alike by chance, and there are none further out.
        fixed = spec.dims[m].only or spec.dims[n].only
        if fixed or sizes[m] <= _ROLLED or any(x.ndim != 2 for x in truth.values()):
            return False
        ways = [{m: _ROLLED, n: _ROLLED}]
    for shifts in ways:
        parts = {dim: Fraction(shift, sizes[dim]) for dim, shift in shifts.items()}
        rolled = _rolled(spec, binding, inputs, parts)
        again = run_reference(spec, rolled, binding=binding, exact=True)
        for o, due in _rolled(spec, binding, truth, parts).items():
            same = (again[o] - due).abs() <= 1e-9 * due.abs() + 1e-290
            same |= ~due.isfinite()
            if diagonally:  # what goes around meets others than it met
                row, column = (int(p * x) for p, x in zip(parts.values(), due.shape, strict=True))
                same = same[row:, column:]
            if not bool(same.all()):
                return False
    return True


def _rolled(
    spec: Spec, binding: Mapping[str, str], values: Mapping[str, Any], parts: Mapping[str, Fraction]
) -> dict[str, Any]:
    """Roll axes that are over a dim by its part; what names a column goes with them."""
    rolled, (_, n, _) = dict(values), spec.gemm_dims
    for (dim, part), (name, value) in itertools.product(parts.items(), values.items()):
        tensor = {**spec.inputs, **spec.outputs}[name]
        shape = tensor.shape
        extents = shape.cases[binding.get(shape.parameter, "")]
        if dim == n and getattr(tensor, "draw", None) == Draw("integers", (0, n)):
            columns = values[spec.gemm[1]].shape[0]
            rolled[name] = (rolled[name] + int(part * columns)) % columns
        for axis, entry in enumerate(extents if getattr(value, "ndim", 0) else ()):
            if dim in re.findall(r"[A-Za-z_]\w*", str(entry)):
                rolled[name] = rolled[name].roll(int(part * value.shape[axis]), axis)
    return rolled


def _uniform_shape(spec: Spec) -> dict[str, int]:
    """Give the base shape enough rows and columns to roll, and to hold a place."""
    base = dict(base_shape(spec))
    for dim, least in zip(spec.gemm_dims, (_STEP + _ROLLED, 2 * _ROLLED), strict=False):
        if spec.dims[dim].only is None:
            base[dim] = up(max(least, base[dim]), spec.dims[dim].multiple_of)
    return base


def _long_shapes(spec: Spec, program: Program, numbers: list[int]) -> Iterator[Case]:
    """List tall and wide shapes, else bench shapes with a short K."""
    m, n, k = spec.gemm_dims
    base = base_shape(spec)
    if len(spec.dims) != 3 and _asks(program.graph):
        for sizes in spec.bench_shapes[:1]:
            yield Case("at a bench shape", {**sizes, k: base[k]}, program)
        return
    for dim, other in ((m, n), (n, m)):
        if spec.dims[dim].only is not None:
            continue
        several = (s[other] for s in spec.check_shapes if s[other] > 1)
        few = min(several, default=base[other])
        reach = max([s[dim] for s in spec.bench_shapes] + [c + _STEP for c in numbers])
        if spec.dims[other].only is None and few * reach > _ELEMENTS:
            few = up(min(few, max(_FEW, _ELEMENTS // reach)), spec.dims[other].multiple_of)
        size = up(min(reach, _ELEMENTS // few), spec.dims[dim].multiple_of)
        yield Case(f"{dim} = {size}", {**base, dim: size, other: few}, program)


def _down(x: int, step: int) -> int:
    return x // step * step
