"""Gradients as one would write them: a slope times what comes in, and shared products once.

Neither changes what is computed. Both spare operations, and let what is recognised by its form,
such as the derivative of an activation, be recognised.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from itertools import combinations
from typing import Any

from coda_agent.primitives.adjoint import dependents
from coda_agent.primitives.graph import Graph, Value
from coda_agent.primitives.ptx import operation


def factored(graph: Graph, gradients: Collection[str]) -> Graph:
    """An equal graph.

    - Factors that two terms of a sum share stand outside of it, where one of them varies with one
      of the operands `gradients`.
    - Two factors that several products share are multiplied once.
    """
    graph = _Factoring(graph, gradients, ()).result()
    while pair := _shared(graph):
        graph = _Factoring(graph, (), pair).result()
    return graph


class _Factoring:
    def __init__(self, graph: Graph, gradients: Collection[str], pair: tuple[int, ...]) -> None:
        self.old, self.new = graph, Graph()
        # The pair is known by what it becomes.
        self.pair = [*pair]
        leaves = [i for i, n in enumerate(graph.nodes) if n.name in gradients and n.op == "operand"]
        self.linear = dependents(graph, leaves) if leaves else set[int]()
        self.uses = _uses(graph)
        self.made: list[Value] = []
        self.carries = set[int]()
        for i, node in enumerate(graph.nodes):
            args = [self.made[a] for a in node.args]
            if not args:
                value = self.new.add(node)
            elif node.op in ("mul", "neg"):
                value = self._product(*self._factors(i, root=True))
            elif node.op in ("add", "sub"):
                value = self._sum(i)
            else:
                value = operation(node.op).call(*map(self._operand, args))
            self.made.append(value)
            if i in self.linear:
                self.carries.add(value.index)

    def result(self) -> Graph:
        self.new.outputs = {o: self.made[i].index for o, i in self.old.outputs.items()}
        return self.new.prune()

    def _operand(self, value: Value) -> Any:
        """Numbers as numbers, of which some operations make their own."""
        node = self.new.nodes[value.index]
        return node.value if node.op == "const" else value

    def _factors(self, i: int, root: bool = False) -> tuple[float, list[Value]]:
        """A product's number and its other factors; what is used again is one factor."""
        node = self.old.nodes[i]
        if node.op == "const":
            return node.value, []
        if node.op not in ("mul", "neg") or (self.uses[i] > 1 and not root):
            return 1.0, [self.made[i]]
        number, found = -1.0 if node.op == "neg" else 1.0, list[Value]()
        for arg in node.args:
            c, rest = self._factors(arg)
            number, found = number * c, found + rest
        return number, found

    def _product(self, number: float, factors: list[Value]) -> Value:
        rest = [*factors]
        pair = [self.made[i] for i in self.pair if i < len(self.made)]
        if len(pair) == 2 and (left := _without(rest, pair)) is not None:
            rest = [pair[0] * pair[1], *left]
        if not rest:
            return self.new.const(number)
        value = rest[0]
        for factor in rest[1:]:
            value = value * factor
        return value if number == 1.0 else -value if number == -1.0 else value * number

    def _sum(self, i: int) -> Value:
        node = self.old.nodes[i]
        terms = [self._factors(a) for a in node.args]
        if node.op == "sub":
            terms[1] = -terms[1][0], terms[1][1]
        common = list[Value]()
        if i in self.linear:
            left = [factors for _, factors in terms]
            for factor in terms[0][1]:
                rest = [_without(factors, [factor]) for factors in left]
                if rest[0] is not None and rest[1] is not None:
                    left = [rest[0], rest[1]]
                    common.append(factor)
            if any(f.index in self.carries for f in common):
                terms = [(c, rest) for (c, _), rest in zip(terms, left, strict=True)]
            else:
                common = []
        terms.sort(key=lambda t: t[0] < 0)
        (c, first), (d, second) = terms
        x, y = self._product(c, first), self._product(abs(d), second)
        total = x - y if d < 0 else x + y
        return self._product(1.0, [*common, total]) if common else total


def _without(factors: list[Value], some: list[Value]) -> list[Value] | None:
    """`factors` less `some`; None where one of those is not among them."""
    rest = [*factors]
    for value in some:
        at = next((i for i, f in enumerate(rest) if f.index == value.index), None)
        if at is None:
            return None
        rest.pop(at)
    return rest


def _uses(graph: Graph) -> Counter[int]:
    return Counter([*(a for n in graph.nodes for a in n.args), *graph.outputs.values()])


def _shared(graph: Graph) -> tuple[int, int] | tuple[()]:
    """Two factors that most products share, if more than one does and it is not made once."""
    uses, inner = _uses(graph), set[int]()
    products: list[list[int]] = []
    for i in reversed(range(len(graph.nodes))):
        if graph.nodes[i].op != "mul" or i in inner:
            continue
        found, pending = list[int](), [*graph.nodes[i].args]
        while pending:
            a = pending.pop()
            if graph.nodes[a].op == "mul" and uses[a] == 1:
                inner.add(a)
                pending += graph.nodes[a].args
            elif graph.nodes[a].op != "const":
                found.append(a)
        products.append(sorted(found))
    count = Counter(p for product in products for p in {*combinations(product, 2)})
    best = max(sorted(count), key=lambda p: count[p], default=())
    return best if best and count[best] > 1 else ()
