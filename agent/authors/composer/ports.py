"""How tensors of a graph stand to the kernel's."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import fx

from coda_agent.agent.authors.composer.axes import Axes, Axis, Dim
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.resize import Roles
from coda_agent.agent.authors.composer.retrace import SLICE, SYMBOLIC, TURN, Retraced, Step
from coda_agent.primitives import ColIndex, ColVector, HalfTile, RowVector, Scalar, Tile, WideTile
from coda_agent.primitives.groups import GROUP_TILES
from coda_agent.primitives.kinds import Resource
from coda_agent.primitives.tables import Table

_RESHAPE, _PERMUTE = torch.ops.aten.reshape.default, torch.ops.aten.permute.default


class Extent(int):
    """A size that is a product of symbols, or their hint.

    Attributes:
        symbols: Their names, each as often as it is a factor; and numbers.
    """

    symbols: tuple[str, ...]

    def __new__(cls, hint: int, symbols: tuple[str, ...]) -> Extent:
        self = super().__new__(cls, hint)
        self.symbols = tuple(sorted(symbols))
        return self

    def __mul__(self, other: int) -> Extent:
        symbols = other.symbols if isinstance(other, Extent) else (str(other),) * (other != 1)
        return Extent(int(self) * int(other), self.symbols + symbols)

    __rmul__ = __mul__

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Extent) and self.symbols == other.symbols

    def __hash__(self) -> int:
        return hash(self.symbols)


def extents_of_call(
    traced: Retraced, axes: Axes, roles: Roles, product: fx.Node
) -> dict[Axis, int]:
    """The extent of each axis; of what is a symbol an `Extent`.

    Raises:
        Refusal: parts of a dim are no sizes of the graph, or its columns change.
    """
    symbols, dims = dict[Axis, torch.SymInt](), [*_sized(traced, axes)]
    fixed = {a for size, dim in dims if isinstance(size, int) for a in dim}
    for _ in range(len(dims)):  # a dim of several gives the last that no other gives
        for size, dim in dims:
            left = [a for a in dim if a not in fixed and a not in symbols]
            if not isinstance(size, int) and len(left) == 1:
                others = [symbols.get(a, a.size) for a in dim if a is not left[0]]
                symbols[left[0]] = size // math.prod(others)
    for size, dim in dims:
        if not isinstance(size, int) and any(a not in fixed and a not in symbols for a in dim):
            raise Refusal("has a dim whose parts are no sizes of the graph", "", product)
    if any(a in symbols and a not in roles.rows for a in (*roles.columns, *roles.inner)):
        raise Refusal("has a number of columns that changes", "", product)
    known = {a: Extent(a.size, (str(x),)) for a, x in symbols.items()}
    return {a: a.size for a in axes.every()} | known


def _sized(traced: Retraced, axes: Axes) -> Iterator[tuple[int | torch.SymInt, Dim]]:
    """Sizes of the graph's dims, with their axes."""
    for node in axes.dims:
        user = traced.user(node)
        shape = getattr(None if user is None else user.meta.get(SYMBOLIC), "shape", ())
        if len(shape) == len(axes.of(node)):
            yield from zip(shape, axes.of(node), strict=True)


@dataclass(frozen=True)
class Stand:
    """How the axes of a tensor stand in the kernel's one.

    Attributes:
        axes: Of each dim of the tensor.
        groups: The same axes, of each dim of the kernel's tensor.
        kind: What it is to the program; None of A and B.
    """

    axes: Sequence[Dim]
    groups: Sequence[Dim]
    kind: type[Resource] | None

    def steps(self, sizes: Mapping[Axis, int]) -> list[Step]:
        """Views that make the kernel's tensor of the graph's."""
        flat, order, final = self._parts(sizes)
        own = [sizes[a] for a in flat]
        shape = [math.prod(sizes[a] for a in dim) for dim in self.axes]
        return _trimmed(shape, own, order, final)

    def back(self, sizes: Mapping[Axis, int]) -> list[Step]:
        """Views that make the graph's tensor of the kernel's."""
        flat, order, final = self._parts(sizes)
        inverse = [order.index(i) for i in range(len(order))]
        own = [sizes[flat[i]] for i in order]
        shape = [math.prod(sizes[a] for a in dim) for dim in self.axes]
        return _trimmed(final, own, inverse, shape)

    def _parts(self, sizes: Mapping[Axis, int]) -> tuple[list[Axis], list[int], list[int]]:
        flat = [a for dim in self.axes for a in dim]
        order = [flat.index(a) for dim in self.groups for a in dim]
        return flat, order, [math.prod(sizes[a] for a in dim) for dim in self.groups]


def _trimmed(
    shape: Sequence[int], own: list[int], order: list[int], final: list[int]
) -> list[Step]:
    """Reshape, permute and reshape a tensor, without what changes nothing."""
    runs: list[list[int]] = []
    for i in order:  # what moves together is one dim
        if runs and i == runs[-1][-1] + 1:
            runs[-1].append(i)
        else:
            runs.append([i])
    if len(runs) <= 1:
        return [] if [*shape] == final else [(_RESHAPE, (final,))]
    before = sorted(runs)
    extents = [math.prod(own[i] for i in run) for run in before]
    order = [before.index(run) for run in runs]
    moved = [extents[i] for i in order]
    steps: list[Step] = [] if [*shape] == extents else [(_RESHAPE, (extents,))]
    return [*steps, (_PERMUTE, (order,)), *([] if moved == final else [(_RESHAPE, (final,))])]


@dataclass(frozen=True)
class Port:
    """A tensor of the graph that a kernel takes or gives.

    Attributes:
        name: The program's operand or output; "A" and "B" of the product's.
        node: The graph's; None where it is several.
        steps: Views that make the kernel's tensor of it: calls of ATen with further arguments.
        back: The inverse.
        dtype: Its element type.
        parts: Tensors that are joined before `steps`, along `dim`.
    """

    name: str
    node: fx.Node | None
    steps: tuple[Step, ...]
    back: tuple[Step, ...]
    dtype: torch.dtype
    parts: tuple[Port, ...] = ()
    dim: int = 0

    @property
    def nodes(self) -> tuple[fx.Node, ...]:
        """The graph's tensors, one or several."""
        own = () if self.node is None else (self.node,)
        return own + tuple(node for part in self.parts for node in part.nodes)

    @property
    def packed(self) -> bool:
        """Whether a kernel's tensor is a copy, for want of a view."""
        return bool(self.parts) or (len(self.steps) > 1 and self.name == "B")

    @property
    def _alternates(self) -> bool:
        """Whether rows of parts that are alike stand in turn."""
        turn = tuple(view for view, _ in self.steps[:2]) == (_RESHAPE, _PERMUTE)
        if self.dim or not turn:
            return False
        (extents,), (order,) = (arguments for _, arguments in self.steps[:2])
        return order == [1, 0, 2] and extents[0] == len(self.parts)

    def canonical(self, *tensors: Any, sized: Sized = list) -> Any:
        """The kernel's tensor, of those of `nodes`."""
        given = iter(tensors)
        if self.parts:
            pieces = [
                part.canonical(*(next(given) for _ in part.nodes), sized=sized)
                for part in self.parts
            ]
            if self._alternates:  # one copy, not two
                pieces = [torch.ops.aten.unsqueeze.default(piece, 1) for piece in pieces]
                return applied(self.steps[2:], torch.ops.aten.cat.default(pieces, 1), sized)
            return applied(self.steps, torch.ops.aten.cat.default(pieces, self.dim), sized)
        return applied(self.steps, next(given), sized)

    def restored(self, x: Any, sized: Sized = list) -> Any:
        """The graph's tensor, of the kernel's."""
        return applied(self.back, x, sized)


def side_by_side(name: str, ports: Sequence[Port]) -> Port:
    """Several ports as one along its first dim; ranges that are all of a tensor are that one."""
    several = Port(name, None, (), (), ports[0].dtype, tuple(ports), 0)
    first, steps = ports[0].node, ports[0].steps[1:]
    dim = int(steps == TURN)
    alike = all((p.node, p.steps[1:]) == (first, steps) for p in ports)
    if first is None or steps not in ((), TURN) or not alike:
        return several
    cuts = [p.steps[0] for p in ports if p.steps]
    stops = [arguments[2] for view, arguments in cuts if view is SLICE]
    ranges = [(SLICE, (dim, *pair)) for pair in itertools.pairwise((0, *stops))]
    if cuts != ranges or stops[-1:] != [first.meta["val"].shape[dim]]:
        return several
    return replace(several, node=first, steps=steps, parts=())


Sized = Callable[[Sequence[int]], list[Any]]
"""What a graph has for sizes, some of which may be an `Extent`."""


def applied(steps: Iterable[Step], x: Any, sized: Sized = list) -> Any:
    """A tensor after some steps."""
    for view, arguments in steps:
        x = view(x, *(sized(a) if isinstance(a, list) else a for a in arguments))
    return x


def entering(axes: Sequence[Dim], roles: Roles, *, whole: bool) -> Stand | None:
    """How what an epilogue reads stands in the kernel's tensor, or None.

    Columns of `roles` are in the kernel's order; the elements may be `whole` numbers.
    """
    own = {a for dim in axes for a in dim}
    if len(own) < sum(map(len, axes)) or not own <= {*roles.rows, *roles.columns}:
        return None
    rows = [a for a in roles.rows if a in own]
    columns = [a for a in roles.columns if a in own]
    if whole:
        return Stand(axes, [rows], ColIndex) if rows == roles.rows and not columns else None
    full = rows == roles.rows, columns == roles.columns
    if all(full):
        return Stand(axes, [rows, columns], Tile)
    if not own:
        return Stand(axes, [], Scalar)
    if full[0] and not columns:
        return Stand(axes, [rows], ColVector)
    if full[1] and not rows:
        return Stand(axes, [columns], RowVector)
    return Stand(axes, [rows, columns], Table)


def leaving(axes: Sequence[Dim], roles: Roles) -> Stand | None:
    """How what a kernel stores stands in its tensor, or None."""
    own = {a for dim in axes for a in dim}
    if len(own) < sum(map(len, axes)):
        return None
    rows, (*outer, last) = roles.rows, roles.columns
    known: list[tuple[list[Dim], type[Resource]]] = [
        ([rows, roles.columns], Tile), ([rows], ColVector), ([roles.columns], RowVector)
    ]  # fmt: skip
    if last.size == 2 and last.unit:
        known.append(([rows, outer], HalfTile))
    for i in range(1, len(roles.columns)):  # a group's columns may be cut, as a head is in halves
        width = math.prod(a.size for a in roles.columns[i:])
        known += [([rows, roles.columns[:i]], kind) for kind in GROUP_TILES if kind.width == width]
    more = own.difference(rows, roles.columns)
    if len(more) == 1 and (pair := more.pop()).size == 2 and pair.unit:
        known.append(([rows, [*roles.columns, pair]], WideTile))
    for groups, kind in known:
        if own == {a for dim in groups for a in dim}:
            return Stand(axes, groups, kind)
    return None
