"""What a graph computes of its own roundings: digits that a float64 check does not see."""

from __future__ import annotations

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import CASTS, is_pointwise, name_of, reached
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.sources import VIEWS

_COMPARED = ("sub", "rsub", "eq", "ne", "lt", "le", "gt", "ge")


def kept_roundings(graph: fx.Graph) -> frozenset[fx.Node]:
    """Find casts to 16 bits whose result is compared with, or taken off, what they round.

    So are numbers split in a high part and the rest. Other roundings are left out: a kernel
    computes in float32 throughout.
    """
    return frozenset(node for node in graph.nodes if _rounds(node) and _is_read_beside(node))


def _is_read_beside(cast: fx.Node) -> bool:
    """Whether a call compares what is made of a cast with what else is made of its source."""
    (source,) = cast.all_input_nodes
    rounded = reached([cast], lambda n: filter(_is_carried, n.users))
    exact = reached([source], lambda n: [u for u in n.users if _is_carried(u) and u not in rounded])
    compared = {u for n in rounded for u in n.users if name_of(u) in _COMPARED}
    return any(not exact.isdisjoint(node.all_input_nodes) for node in compared)


def check_sums(graph: fx.Graph) -> None:
    """Refuse a difference that takes off again what a sum has added.

    It is the sum's rounding, as in compensated sums; as an expression it is the other term.
    """
    for node in graph.find_nodes(op="call_function", target=torch.ops.aten.sub.Tensor):
        whole, taken = node.args[:2]
        terms = reached([whole], _terms) if isinstance(whole, fx.Node) else set()
        if isinstance(taken, fx.Node) and taken is not whole and taken in terms:
            raise Refusal("takes off again what was added, which leaves a rounding", "", node)


def _terms(node: fx.Node) -> list[fx.Node]:
    return node.all_input_nodes if name_of(node) in ("add", "sub") else []


def _rounds(node: fx.Node) -> bool:
    """Whether a node is a cast of float32 to 16 bits."""
    if node.op != "call_function" or name_of(node) not in CASTS:
        return False
    own, source = (n.meta["val"].dtype for n in (node, *node.all_input_nodes))
    return own in (torch.bfloat16, torch.float16) and source in (torch.float32, torch.float64)


def _is_carried(node: fx.Node) -> bool:
    """Whether a call is computed element by element, or is a view."""
    return node.op == "call_function" and (
        is_pointwise(node) or name_of(node) in (*CASTS, *VIEWS, "slice", "select", "expand")
    )
