"""A traced graph at small sizes, at which roles of dims differ."""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any, NamedTuple

import torch
from torch import fx

from coda_agent.agent.authors.composer.axes import SIZED, Axes, Axis, Dim
from coda_agent.agent.authors.composer.calls import argument, bounds, name_of, shape_of
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.primitives.errors import ProgramError

_PRIMES = (3, 5, 7, 11, 13, 17, 19, 23, 29, 31, 37)
_WIDEST_HEAD, _WIDEST = 128, 1 << 13


class Roles(NamedTuple):
    """The axes of a product: A's rows, B's rows, the summed."""

    rows: Dim
    columns: Dim
    inner: Dim

    def extents(self, sizes: Mapping[Axis, int]) -> dict[str, int]:
        """M, N and K."""
        return {
            name: math.prod(sizes[a] for a in axes) for name, axes in zip("MNK", self, strict=True)
        }


def small_sizes(roles: Roles, others: Iterable[Axis], *, turn: int = 0) -> dict[Axis, int]:
    """Choose extents of axes; counts of parts and heads keep theirs.

    Others are axes of tables and of what is broadcast. Another `turn` gives other extents.

    Raises:
        ProgramError: there are none at which M, N and K can be told from one another.
    """
    others = [*others]  # each turn reads them
    for first in range(turn, turn + len(_PRIMES)):
        primes = itertools.chain(_PRIMES[first % len(_PRIMES) :], _PRIMES)
        sizes: dict[Axis, int] = {}
        for axis in (*roles.rows, *roles.inner):
            sizes[axis] = axis.size if axis.unit else next(primes)
        for i, axis in enumerate(roles.columns):
            head = i == len(roles.columns) - 1 > 0 and axis.size <= _WIDEST_HEAD
            if axis.unit or head:
                sizes[axis] = axis.size
            else:
                sizes[axis] = next(primes) * (2 if i == len(roles.columns) - 1 else 1)
        for axis in others:
            if axis not in sizes:
                sizes[axis] = axis.size if axis.unit else next(primes)
        m, n, k = roles.extents(sizes).values()
        if max(sizes.values()) > _WIDEST or m * n > 1 << 22:
            raise ProgramError("counts parts of a long dim by numbers")
        if n % 2 and all(a.unit for a in roles.columns):
            raise ProgramError(f"has {n} columns, an odd number")
        if not n % 2 and len({m, n, n // 2, 2 * n, k, 1}) == 6:
            return sizes
    raise ProgramError("has rows, columns and summed elements that are alike")


def resized(
    module: fx.GraphModule, axes: Axes, sizes: Mapping[Axis, int]
) -> tuple[fx.GraphModule, dict[fx.Node, fx.Node]]:
    """The graph at these sizes; and what its nodes were.

    Raises:
        ProgramError: a call has a size that follows from no axis.
    """
    graph, copies = fx.Graph(), dict[fx.Node, fx.Node]()

    def extents(node: fx.Node) -> list[int]:
        return [math.prod(sizes[a] for a in dim) for dim in axes.of(node)]

    for node in module.graph.nodes:
        copy = graph.node_copy(node, copies.__getitem__)
        copies[node] = copy
        if node.op == "output":
            continue
        if node in axes.dims:
            shape = extents(node)
            if node.op == "call_function":
                copy.args, copy.kwargs = _arguments(node, copy, shape, extents)
            copy.meta = {**node.meta, "val": _value(node, copy, shape)}
        elif isinstance(value := node.meta.get("val"), torch.Tensor):  # without elements
            copy.meta = {**node.meta, "val": torch.empty_like(value, device="meta")}
    made = fx.GraphModule(module, graph)
    return made, {copy: node for node, copy in copies.items()}


def _value(node: fx.Node, copy: fx.Node, shape: Sequence[int]) -> torch.Tensor:
    """What a node gives, without its elements."""
    dtype = node.meta["val"].dtype
    if node.op != "call_function":
        return torch.empty(shape, dtype=dtype, device="meta")
    args, kwargs = torch.fx.map_arg((copy.args, copy.kwargs), lambda x: x.meta["val"])
    if "device" in kwargs:
        kwargs = {**kwargs, "device": "meta"}
    try:
        value = node.target(*args, **kwargs)  # pyright: ignore[reportCallIssue]
    except (RuntimeError, ValueError, TypeError, IndexError) as error:
        raise Refusal(f"{(str(error).splitlines() or [''])[0]} at other sizes", node=node) from None
    if isinstance(value, torch.Tensor) and tuple(value.shape) != tuple(shape):
        raise Refusal("has a size as a number", node=node)
    return value


def _arguments(
    node: fx.Node, copy: fx.Node, shape: list[int], extents: Callable[..., list[int]]
) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """The arguments of a call at these sizes."""
    op, args, kwargs = name_of(node), [*copy.args], dict(copy.kwargs)
    match op:
        case "view" | "_unsafe_view" | "reshape" | "_reshape_alias" | "expand":
            args[1:] = [shape]
        case _ if op in SIZED:
            args[0] = shape
        case "philox":
            args[3:] = shape
        case "arange" | "iota":
            if (len(args) == 1 and args[0] == shape_of(node)[0]) or op == "iota":
                args[0] = shape[0]
            elif shape != [*shape_of(node)]:
                raise Refusal("counts from other than 0", node=node)
        case "slice" | "slice_scatter":
            dim, start, stop, step = bounds(node)
            old, new = shape_of(node.args[0])[dim], extents(node.args[0])[dim]
            start = start if step > 1 else start * new // old
            args[2 if op == "slice_scatter" else 1 :] = [dim, start, stop * new // old, step]
            kwargs = {}
        case "constant_pad_nd":
            old, new = shape_of(node.args[0]), extents(node.args[0])
            ratios = [(x, y) for x, y in zip(old[::-1], new[::-1], strict=True) for _ in (0, 1)]
            pads: Any = argument(node, 1, "pad")
            args[1] = [p * y // x for p, (x, y) in zip(pads, ratios, strict=False)]
    return tuple(args), kwargs
