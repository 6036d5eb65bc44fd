"""The extents of a call, some of which are symbols of the graph."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

from torch import fx

from coda_agent.agent.authors.composer.axes import Axes, Axis, Dim
from coda_agent.agent.authors.composer.ports import Extent
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.resize import Roles
from coda_agent.agent.authors.composer.retrace import SYMBOLIC, Retraced


def extents_of_call(
    traced: Retraced, axes: Axes, roles: Roles, product: fx.Node
) -> dict[Axis, int]:
    """The extent of each axis; of what is a symbol an `Extent`.

    Raises:
        Refusal: parts of a dim are no sizes of the graph, or its columns change.
    """
    symbols, dims = dict[Axis, Any](), [*_sized(traced, axes)]
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


def _sized(traced: Retraced, axes: Axes) -> Iterator[tuple[Any, Dim]]:
    """Sizes of the graph's dims, with their axes."""
    for node in axes.dims:
        user = traced.user(node)
        shape = getattr(None if user is None else user.meta.get(SYMBOLIC), "shape", ())
        if len(shape) == len(axes.of(node)):
            yield from zip(shape, axes.of(node), strict=True)
