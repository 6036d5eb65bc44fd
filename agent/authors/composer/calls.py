"""Calls of ATen in a traced graph: names, arguments, shapes, needs."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterable
from typing import Any, TypeVar

import torch
from torch import fx

T = TypeVar("T")
CASTS = ("_to_copy", "convert_element_type")
"""Names of calls that only change the element type."""
RESHAPES = ("view", "_unsafe_view", "reshape", "_reshape_alias", "squeeze", "unsqueeze")
"""Names of calls that give the same elements, in their order, another shape."""
COPIES = ("alias", "clone", "contiguous")
"""Names of calls that give the same tensor."""
VIEWS = (*RESHAPES, *COPIES, "detach", "permute", "t", "transpose")
"""Names of calls that give all elements of a tensor, moved at most."""


def shape_of(node: Any) -> tuple[int, ...]:
    """The shape of a node's tensor."""
    return tuple(node.meta["val"].shape)


def name_of(node: fx.Node) -> str:
    """The name of an ATen operation, without its overload."""
    schema = getattr(node.target, "_schema", None)
    return schema.name.split("::")[1] if schema else getattr(node.target, "__name__", "")


def is_elementwise(node: fx.Node) -> bool:
    """Whether a call computes element by element."""
    return torch.Tag.pointwise in getattr(node.target, "tags", ())


def behind(node: fx.Node, names: Collection[str]) -> fx.Node:
    """Find what calls of these names, one on the other, begin with."""
    while node.op == "call_function" and name_of(node) in names:
        node = node.all_input_nodes[0]
    return node


def valued(node: fx.Node, like: fx.Node, shape: Iterable[int]) -> fx.Node:
    """Note what a new node gives: values like another's, of a shape."""
    value = torch.empty(tuple(shape), dtype=like.meta["val"].dtype, device="meta")
    node.meta = {**like.meta, "val": value}
    return node


def widens(node: fx.Node) -> bool:
    """Whether a call that only copies keeps all digits."""
    source: Any = node.args[0]
    dtype = source.meta["val"].dtype
    return dtype.is_floating_point and dtype.itemsize <= node.meta["val"].dtype.itemsize


def argument(node: fx.Node, position: int, name: str, default: Any = None) -> Any:
    """An argument of a call, by place or by name."""
    return node.args[position] if len(node.args) > position else node.kwargs.get(name, default)


def bounds(node: fx.Node) -> tuple[int, int, int, int]:
    """Find dim, start, stop and step of a slice, a scatter or what is selected."""
    shift = name_of(node) == "slice_scatter"
    shape = shape_of(node.args[0])
    dim = argument(node, 1 + shift, "dim", 0) % len(shape)
    if name_of(node) == "select":
        start = argument(node, 2, "index") % shape[dim]
        return dim, start, start + 1, 1
    start = argument(node, 2 + shift, "start") or 0
    stop = argument(node, 3 + shift, "end")
    size = shape[dim]
    start = max(start + size, 0) if start < 0 else min(start, size)
    stop = size if stop is None else max(stop + size, 0) if stop < 0 else min(stop, size)
    return dim, start, stop, argument(node, 4 + shift, "step", 1)


def ancestors(nodes: Iterable[fx.Node], since: fx.Node | None = None) -> set[fx.Node]:
    """Collect nodes and what they are computed from, `since` one."""
    later: Callable[[Iterable[fx.Node]], list[fx.Node]] = lambda some: [
        node for node in some if not (since and node < since)
    ]
    return reached(later(nodes), lambda node: later(node.all_input_nodes))


def reached(starts: Iterable[T], step: Callable[[T], Iterable[T]]) -> set[T]:
    """Collect nodes, and those that `step` leads to from each."""
    seen, pending = set[T](), [*starts]
    while pending:
        if (node := pending.pop()) not in seen:
            seen.add(node)
            pending += step(node)
    return seen
