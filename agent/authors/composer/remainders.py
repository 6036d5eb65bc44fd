"""What a graph computes of its own roundings: digits that a float64 check does not see."""

from __future__ import annotations

import itertools

import torch
from torch import fx

from coda_agent.agent.authors.composer.calls import CASTS, VIEWS, name_of, widens
from coda_agent.agent.authors.composer.problem import Refusal

_LARGE = 2.0**20
"""From such a number on, adding it rounds what is near 1."""
_Term = tuple[object, int]


def kept_roundings(graph: fx.Graph) -> frozenset[fx.Node]:
    """Find casts to 16 bits beside which their source is read, too.

    So are numbers split in a high part and the rest. Float16 is kept where it is widened again: it
    may have left its range. Other roundings are left out: a kernel computes in float32 throughout.
    """
    return frozenset(n for n in graph.nodes if is_rounding(n) and (is_copy(n) or _limits(n)))


def is_rounding(node: fx.Node) -> bool:
    """Whether a node is a cast of float32 to 16 bits."""
    if node.op != "call_function" or name_of(node) not in CASTS:
        return False
    own, source = (n.meta["val"].dtype for n in (node, *node.all_input_nodes))
    return own in (torch.bfloat16, torch.float16) and source in (torch.float32, torch.float64)


def is_copy(cast: fx.Node) -> bool:
    """Whether what a cast rounds is read otherwise, too."""
    return len(cast.all_input_nodes[0].users) > 1


def _limits(cast: fx.Node) -> bool:
    """Whether a cast may give infinities, which are read."""
    wide = [user for user in cast.users if name_of(user) in CASTS]
    return cast.meta["val"].dtype is torch.float16 and any(map(widens, wide))


def check_sums(graph: fx.Graph) -> None:
    """Refuse a difference that takes off again what a sum has added.

    It is the sum's rounding, as in compensated sums; as an expression it is the other term.
    """
    terms: dict[object, set[_Term]] = {}
    for node in graph.nodes:
        parts = _parts(node) if node.op == "call_function" else []
        known = [{(y, sign * s) for y, s in terms.get(x, {(x, 1)})} for x, sign in parts]
        for one, other in itertools.combinations(known, 2):
            if not one.isdisjoint({(x, -sign) for x, sign in other}):
                message = "takes off again what was added, which leaves a rounding"
                raise Refusal(message, "", node)
        if known:
            terms[node] = {(node, 1)}.union(*known)


def _parts(node: fx.Node) -> list[_Term]:
    """List what a call adds, with signs: values, and large numbers."""
    op, (one, other) = name_of(node), (*node.args, None, None)[:2]
    alpha = node.kwargs.get("alpha", 1)
    minus = -1 if isinstance(alpha, int | float) and alpha < 0 else 1
    pair: list[_Term] = []
    if op in ("add", "sub"):
        pair = [(one, 1), (other, minus if op == "add" else -minus)]
    elif op == "rsub":
        pair = [(other, 1), (one, -minus)]
    elif op in (*VIEWS, "neg") or (op == "mul" and isinstance(other, int | float)):
        down = op == "neg" or (isinstance(other, int | float) and other < 0)
        pair = [(one, -1 if down else 1)]
    found: list[_Term] = [(x, s) for x, s in pair if isinstance(x, fx.Node)]
    numbers = [(x, s) for x, s in pair if isinstance(x, int | float) and abs(x) >= _LARGE]
    return [*found, *((abs(x), s if x > 0 else -s) for x, s in numbers)]
