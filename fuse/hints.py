"""Hints of sizes that are symbols: asking a symbol makes a guard."""

from __future__ import annotations

import contextlib
from collections.abc import Collection, Iterator

import torch
from torch import fx

from coda_agent.agent.authors.composer.retrace import SYMBOLIC, plain


@contextlib.contextmanager
def hinted(graph: fx.Graph) -> Iterator[None]:
    """Give values of a graph numbers for sizes; symbols are at `SYMBOLIC`.

    Nodes that are new afterwards have no values.
    """
    values = {node: node.meta.get("val") for node in graph.nodes}
    if not any(map(_is_symbolic, values.values())):
        yield
        return
    for node, value in values.items():
        node.meta[SYMBOLIC] = value
        if isinstance(value, torch.Tensor):
            shape, strides = ([plain(x) for x in xs] for xs in (value.shape, value.stride()))
            empty = torch.empty_strided(shape, strides, dtype=value.dtype, device="meta")
            node.meta["val"] = empty
        elif value is not None:
            node.meta["val"] = plain(value)
    try:
        yield
    finally:
        for node in graph.nodes:
            node.meta.pop(SYMBOLIC, None)
            node.meta.pop("val", None)
            if (value := values.get(node)) is not None:
                node.meta["val"] = value


def may_be_symbolic(nodes: Collection[fx.Node]) -> bool:
    """Whether a node's size may be a symbol. In a graph that has some, that of a new one may."""
    some = any(SYMBOLIC in node.meta for node in next(iter(nodes)).graph.nodes)
    known = (node.meta.get(SYMBOLIC) for node in nodes)
    return some and any(value is None or _is_symbolic(value) for value in known)


def _is_symbolic(value: object) -> bool:
    if isinstance(value, torch.Tensor):
        return any(not isinstance(x, int) for x in (*value.shape, *value.stride()))
    return isinstance(value, torch.SymInt | torch.SymFloat | torch.SymBool)
