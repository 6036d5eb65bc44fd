"""Where the operands of a product come from."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

from torch import fx
from torch.fx.node import Argument

from coda_agent.agent.authors.composer.axes import Axes, Axis
from coda_agent.agent.authors.composer.calls import CASTS, VIEWS, name_of, widens
from coda_agent.agent.authors.composer.merge import Merged, products
from coda_agent.agent.authors.composer.problem import Refusal
from coda_agent.agent.authors.composer.retrace import Retraced

SCALES = ("mul", "div", "neg")


class Sources:
    """The sources of one traced graph's first product."""

    def __init__(self, traced: Retraced, merged: Merged) -> None:
        self.traced, self.merged, self.axes = traced, merged, Axes(traced.graph)
        self.product = products(traced.graph)[0]

    def entered(self) -> tuple[fx.Node, fx.Node]:
        """Let A and B enter the graph, and find their placeholders."""
        known = self.merged.a, self.merged.b
        for casts in (True, False):
            sides = [node or self._source(i, casts=casts) for i, node in enumerate(known)]
            if len({node.meta["val"].dtype for node in sides}) == 1:
                break
        a, b = (n if n.op == "placeholder" else self.traced.enter(n) for n in sides)
        return a, b

    def _source(self, side: int, *, casts: bool) -> fx.Node:
        """The first value from which only views, casts and scales lead here."""
        operand: Any = self.product.args[side]
        dims = self.axes.of(operand)
        own, inner = {a for dim in dims for a in dim}, {*dims[-1 if side == 0 else -2]}
        entry: fx.Node | None = None
        for node in self._chain(operand, inner, casts=casts):
            known = node.op == "placeholder" or self.traced.user(node) is not None
            if known and {a for dim in self.axes.of(node) for a in dim} == own:
                entry = node
        if entry is None:
            raise Refusal("has an operand that is no value of the graph", "", self.product)
        return entry

    def _chain(self, node: Argument, inner: set[Axis], *, casts: bool) -> Iterator[fx.Node]:
        """What an operand is made of by views, casts and scales."""
        while isinstance(node, fx.Node):
            yield node
            op, tensors = name_of(node), [x for x in node.args if isinstance(x, fx.Node)]
            if op in SCALES:
                over = [x for x in tensors if inner & {a for d in self.axes.of(x) for a in d}]
                scaled = len(over) == 1 and (op != "div" or over[0] is node.args[0])
                node = over[0] if scaled else None
            elif op in VIEWS or (op in CASTS and casts and widens(node)):
                node = tensors[0]
            else:
                return
