"""Which axes each dim of a graph's tensors is made of.

An axis is rows, columns, what is summed, a head, or part of one of these. Views cut and join axes,
elementwise operations identify them, and nothing else tells them apart: no size does.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_leaves

from coda_agent.agent.authors.composer.calls import (
    COPIES,
    RESHAPES,
    argument,
    bounds,
    name_of,
    shape_of,
)
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.primitives.errors import ProgramError

PRODUCTS = ("mm", "bmm")
"""Names of what a kernel's product is in a traced graph."""

SIZED = ("full", "zeros", "ones", "empty", "empty_permuted", "rand", "randn")
REDUCTIONS = ("sum", "mean", "amax", "amin", "logsumexp", "var", "std", "prod")


class Axis:
    """A part of a dim.

    Attributes:
        size: Its extent in the graph.
        unit: Whether it counts parts of something, so that no other extent would do.
    """

    def __init__(self, size: int, unit: bool = False) -> None:
        self.size, self.unit = size, unit
        self._parts: tuple[Axis, ...] = ()

    def leaves(self) -> list[Axis]:
        """The axes it was cut into, outermost first, or itself."""
        if not self._parts:
            return [self]
        return [leaf for part in self._parts for leaf in part.leaves()]

    def become(self, *axes: Axis) -> None:
        """Be made of other axes from now on."""
        for axis in axes if self.unit else ():
            axis.fix()
        self._parts = axes

    def fix(self) -> None:
        """Keep its extent."""
        for axis in self.leaves():
            axis.unit = True


Dim = list[Axis]
"""Axes of a dim, outermost first; none of an extent of 1."""


def leaves(axes: Iterable[Axis]) -> list[Axis]:
    """The uncut axes of a dim, or of several."""
    return [leaf for axis in axes for leaf in axis.leaves()]


def unify(one: Iterable[Axis], other: Iterable[Axis]) -> list[Axis]:
    """Identify two dims of one extent.

    Raises:
        ProgramError: one is cut where the other cannot be.
    """
    x, y = leaves(one), leaves(other)
    while x and y:
        a, b = x[0], y[0]
        if a is b or a.size == b.size:
            if a is not b:
                b.become(a)
                a.unit |= b.unit
            x, y = leaves(x[1:]), leaves(y[1:])
            continue
        large, small = (a, b) if a.size > b.size else (b, a)
        cut(large, small.size)
        x, y = leaves(x), leaves(y)
    return leaves(one)


def cut(axis: Axis, outer: int) -> None:
    """Cut a whole axis into `outer` parts.

    Raises:
        ProgramError: the parts would not be alike.
    """
    if axis.size % outer:
        raise ProgramError(f"cuts {axis.size} elements into {outer} parts")
    axis.become(Axis(outer), Axis(axis.size // outer))


def divide(axes: Iterable[Axis], sizes: Sequence[int]) -> list[Dim]:
    """Divide a row of axes into dims of these extents.

    Raises:
        ProgramError: an extent joins part of one dim with part of another.
    """
    row, dims = leaves(axes), list[Dim]()
    for size in sizes:
        dim, need = Dim(), size
        while need > 1:
            if need % row[0].size and row[0].size % need:
                raise ProgramError("joins parts of different dims")
            if row[0].size > need:
                cut(row[0], need)
                row = leaves(row)
            need //= row[0].size
            dim.append(row.pop(0))
        dims.append(dim)
    return dims


class Axes:
    """The axes of a traced graph of ATen calls with static shapes.

    Attributes:
        dims: Of each node that is a tensor, the axes of each dim.
    """

    def __init__(self, graph: fx.Graph) -> None:
        self.dims: dict[fx.Node, list[Dim]] = {}
        for node in graph.nodes:
            if not isinstance(value := node.meta.get("val"), torch.Tensor):
                continue
            if value.numel() == 0:
                if node.all_input_nodes:
                    raise Refusal("has no elements", node=node)
                continue
            try:
                self.dims[node] = self._of(node)
            except ProgramError as error:
                raise Refusal(error.message, node=node) from None

    def of(self, node: fx.Node) -> list[Dim]:
        """The uncut axes of each dim of a node."""
        return [leaves(dim) for dim in self.dims[node]]

    def every(self) -> Iterator[Axis]:
        """The uncut axes of all nodes, dim by dim."""
        for node in self.dims:
            for dim in self.of(node):
                yield from dim

    def _of(self, node: fx.Node) -> list[Dim]:
        if node.op != "call_function":
            return fresh(shape_of(node))
        rule = _RULES.get(name_of(node), _broadcast)
        dims = rule(self, node)
        if [math.prod(a.size for a in dim) for dim in dims] != list(shape_of(node)):
            raise ProgramError("has a shape that does not follow from its arguments'")
        return dims

    def taken(self, value: object) -> list[Dim]:
        """The dims of an argument."""
        return self.dims[value] if isinstance(value, fx.Node) and value in self.dims else []


def fresh(shape: Iterable[int]) -> list[Dim]:
    """Axes of their own for each dim."""
    return [[Axis(size)] if size != 1 else [] for size in shape]


def _broadcast(axes: Axes, node: fx.Node) -> list[Dim]:
    shape, tensors = shape_of(node), [axes.taken(x) for x in tree_leaves((node.args, node.kwargs))]
    dims: list[Dim] = []
    for i, size in enumerate(shape):
        dim: Dim = []
        for tensor in tensors:
            at = i - len(shape) + len(tensor)
            other = tensor[at] if at >= 0 else []
            if other and size != 1:
                if math.prod(a.size for a in other) != size:
                    raise ProgramError("is no elementwise operation")
                dim = unify(dim, other) if dim else other
        dims.append(dim or ([Axis(size)] if size != 1 else []))
    return dims


def _view(axes: Axes, node: fx.Node) -> list[Dim]:
    return divide([a for dim in axes.taken(node.args[0]) for a in dim], shape_of(node))


def _same(axes: Axes, node: fx.Node) -> list[Dim]:
    return axes.taken(node.args[0])


def _permute(axes: Axes, node: fx.Node) -> list[Dim]:
    given = axes.taken(node.args[0])
    order = node.args[1] if len(node.args) > 1 else range(len(given))[::-1]
    return [given[i] for i in _listed(order)]


def _transpose(axes: Axes, node: fx.Node) -> list[Dim]:
    given = [*axes.taken(node.args[0])]
    i, j = _listed(node.args[1:3])
    given[i], given[j] = given[j], given[i]
    return given


def _listed(value: Any) -> list[int]:
    return [int(x) for x in value] if isinstance(value, Iterable) else [int(value)]


def _slice(axes: Axes, node: fx.Node) -> list[Dim]:
    dims = [*axes.taken(node.args[0])]
    dim, start, stop, step = bounds(node)
    size = shape_of(node.args[0])[dim]
    if (start, stop, step) == (0, size, 1):
        return dims
    if step != 1:
        if size % step or start >= step or stop <= size - step:
            raise ProgramError("takes other than each of so many")
        outer, inner = divide(dims[dim], [size // step, step])
        _fix(inner)
        dims[dim] = outer
        return dims
    dims[dim] = _part(dims[dim], size, start, stop)
    return dims


def _part(axes: Dim, size: int, start: int, stop: int) -> Dim:
    """A range of a dim: so many of its parts."""
    unit = math.gcd(start, stop, size)
    outer, inner = divide(axes, [size // unit, unit])
    _fix(outer)
    count = (stop - start) // unit
    return [*([Axis(count, True)] if count > 1 else []), *inner]


def _fix(axes: Iterable[Axis]) -> None:
    for axis in axes:
        axis.fix()


def _slice_scatter(axes: Axes, node: fx.Node) -> list[Dim]:
    whole, part = axes.taken(node.args[0]), axes.taken(node.args[1])
    dim, start, stop, step = bounds(node)
    size = shape_of(node)[dim]
    for i, (x, y) in enumerate(zip(whole, part, strict=True)):
        if i != dim:
            unify(x, y)
    if step == 1:
        unit = math.gcd(start, stop, size)
        outer, inner = divide(whole[dim], [size // unit, unit])
        _fix(outer)
        counted, rest = divide(part[dim], [(stop - start) // unit, unit])
        _fix(counted)
        unify(inner, rest)
    else:
        outer, inner = divide(whole[dim], [size // step, step])
        _fix(inner)
        unify(outer, part[dim])
    return whole


def _select(axes: Axes, node: fx.Node) -> list[Dim]:
    dims = [*axes.taken(node.args[0])]
    _fix(dims.pop(int(argument(node, 1, "dim", 0)) % len(dims)))
    return dims


def _cat(axes: Axes, node: fx.Node) -> list[Dim]:
    pieces: Any = node.args[0]
    shape = shape_of(node)
    dim = int(argument(node, 1, "dim", 0)) % len(shape)
    sizes = [shape_of(x)[dim] for x in pieces]
    unit = math.gcd(*sizes)
    dims = [*axes.taken(pieces[0])]
    inner: Dim = []
    for piece, size in zip(pieces, sizes, strict=True):
        given = axes.taken(piece)
        outer, rest = divide(given[dim], [size // unit, unit])
        _fix(outer)
        inner = unify(inner, rest) if inner else rest
        for i, other in enumerate(given):
            if i != dim:
                unify(dims[i], other)
    dims[dim] = [Axis(sum(sizes) // unit, True), *inner]
    return dims


def _stack(axes: Axes, node: fx.Node) -> list[Dim]:
    pieces: Any = node.args[0]
    dims = [*axes.taken(pieces[0])]
    for piece in pieces[1:]:
        for x, y in zip(dims, axes.taken(piece), strict=True):
            unify(x, y)
    dim = int(argument(node, 1, "dim", 0)) % (len(dims) + 1)
    return [*dims[:dim], [Axis(len(pieces), True)], *dims[dim:]]


def _expand(axes: Axes, node: fx.Node) -> list[Dim]:
    given, shape = axes.taken(node.args[0]), shape_of(node)
    given = [*([[]] * (len(shape) - len(given))), *given]
    return [dim or ([Axis(n)] if n != 1 else []) for dim, n in zip(given, shape, strict=True)]


def _repeat(axes: Axes, node: fx.Node) -> list[Dim]:
    given, times = axes.taken(node.args[0]), _listed(node.args[1])
    given = [*([[]] * (len(times) - len(given))), *given]
    return [
        [*([Axis(n, True)] if n > 1 else []), *dim] for dim, n in zip(given, times, strict=True)
    ]


def _pad(axes: Axes, node: fx.Node) -> list[Dim]:
    dims, pads = [*axes.taken(node.args[0])], _listed(node.args[1])
    shape, inside = shape_of(node), shape_of(node.args[0])
    for i, dim in enumerate(reversed(range(len(dims)))):
        before, after = (*pads[2 * i : 2 * i + 2], 0, 0)[:2]
        if before or after:
            unit = math.gcd(before, after, inside[dim])
            outer, inner = divide(dims[dim], [inside[dim] // unit, unit])
            _fix(outer)
            dims[dim] = [Axis(shape[dim] // unit, True), *inner]
    return dims


def _mm(axes: Axes, node: fx.Node) -> list[Dim]:
    a, b = axes.taken(node.args[0]), axes.taken(node.args[1])
    unify(a[-1], b[-2])
    for x, y in zip(a[:-2], b[:-2], strict=True):
        unify(x, y)
    return [*a[:-1], b[-1]]


def _reduce(axes: Axes, node: fx.Node) -> list[Dim]:
    given, listed = axes.taken(node.args[0]), argument(node, 1, "dim")
    if listed is None or listed == []:
        listed = range(len(given))
    over = {d % len(given) for d in _listed(listed)}
    if len(shape_of(node)) == len(given):
        return [[] if i in over else dim for i, dim in enumerate(given)]
    return [dim for i, dim in enumerate(given) if i not in over]


def _gather(axes: Axes, node: fx.Node) -> list[Dim]:
    given, index = axes.taken(node.args[0]), axes.taken(node.args[2])
    dim = int(argument(node, 1, "dim", 0)) % len(given)
    for i, (x, y) in enumerate(zip(given, index, strict=True)):
        if i != dim and math.prod(a.size for a in x) == math.prod(a.size for a in y):
            unify(x, y)
    return index


def _new(axes: Axes, node: fx.Node) -> list[Dim]:
    return fresh(shape_of(node))


_RULES: dict[str, Callable[[Axes, fx.Node], list[Dim]]] = {
    **dict.fromkeys(RESHAPES, _view),
    **dict.fromkeys((*COPIES, "detach", "flip", "roll"), _same),
    **dict.fromkeys(("tril", "triu", "cumsum", "_softmax", "_log_softmax"), _same),
    **dict.fromkeys(("permute", "t"), _permute),
    **dict.fromkeys(REDUCTIONS, _reduce),
    **dict.fromkeys(("argmax", "argmin", "any", "all"), _reduce),
    **dict.fromkeys(("mm", "bmm"), _mm),
    **dict.fromkeys((*SIZED, "arange", "iota", "scalar_tensor", "philox"), _new),
    "transpose": _transpose,
    "slice": _slice,
    "slice_scatter": _slice_scatter,
    "select": _select,
    "cat": _cat,
    "stack": _stack,
    "expand": _expand,
    "repeat": _repeat,
    "constant_pad_nd": _pad,
    "gather": _gather,
}
