"""Small edits of a graph, each with the mistake that it undoes."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any, NamedTuple

from coda_agent.agent.judge.replaying import INFIX, SIGNS, Reading, Replay, expression, shown
from coda_agent.primitives.graph import Graph, Node
from coda_agent.primitives.operation import GROUPS, OPS, PLACED
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import OUTPUT_KINDS

Values = list[Any]
Changes = dict[Any, Any]
_OTHER = {"add": "sub", "sub": "add"}
BOUNDS = "minimum", "maximum"
_NAMED = {"<": "minimum", ">": "maximum", "s": "copysign"}
# Of one or two arguments, and meant by nobody in the place of another.
_NEVER = {"neg", "power", "fmod", "atan2", "tan", "trunc", "equal", "rint"}
_INSERTED = ("absolute", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "log1p", "expm1")


class Edit(NamedTuple):
    """A mistake, and the changes that undo it.

    A place is a node's number, a use (node, argument), the output (-1, 0), or the output's name,
    which gives it another kind. A changed value that is a number of a node is that node's.
    """

    fault: str
    text: str
    changes: Callable[[Values], Changes]


def stores(replay: Replay) -> Iterator[Edit]:
    """Reduce otherwise along the same axis; store pairs the other way round."""
    kind = replay.kind
    for name, other in OUTPUT_KINDS.items() if issubclass(kind, Reduction) else ():
        if issubclass(other, Reduction) and other.dims == kind.dims and other is not kind:
            text = f"{replay.o} is a {kind.__name__}: a {name} is due"
            yield Edit("wrong_statistics", text, lambda v, k=other: {replay.o: k})
    for i, n in enumerate(replay.graph.nodes):
        if n.op == "interleave":
            text = f"even and odd columns of `{replay.read.text(i)}` are swapped"
            yield Edit("swapped_pair", text, _call(i, n, (1, 0)))


def branches(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[Edit]:
    """Take one value of a choice always, or no bound."""
    for i, n in nodes:
        what, due = "the condition", n.args[1:] if n.op == "where" else ()
        if n.op in BOUNDS:  # one on each side is one mistake
            inner = (graph.nodes[a].args for a in n.args if graph.nodes[a].op in BOUNDS)
            what, due = "a bound", (*n.args, *itertools.chain(*inner))
        for a in due:
            text = f"{what} of `{graph.text(i)}` is too much: `{graph.text(a)}` is due"
            yield Edit("extra_term", text, lambda v, i=i, a=a: {i: a})


def signs(
    graph: Reading, nodes: list[tuple[int, Node]], sites: list[tuple[Any, int]]
) -> Iterator[Edit]:
    for i, n in nodes:
        if other := _OTHER.get(n.op):
            text = f"`{graph.text(i)}` has the other sign: {INFIX[other]} is due"
            yield Edit("wrong_sign", text, _call(i, n, op=other))
        if n.op == "sub":
            text = f"`{graph.text(i)}` has the other sign"
            yield Edit("wrong_sign", text, _call(i, n, (1, 0)))
    for place, i in sites:
        text = f"`{graph.text(i)}` has the other sign{graph.use(place)}"
        yield Edit("wrong_sign", text, lambda v, p=place, i=i: {p: -v[i]})
    subs = [(i, n) for i, n in nodes if n.op in _OTHER]
    for (i, n), (j, m) in itertools.combinations(subs, 2):  # two signs of a rotation
        one, two = (_call(k, x, op=_OTHER[x.op]) for k, x in ((i, n), (j, m)))
        text = f"`{graph.text(i)}` and `{graph.text(j)}` have the other signs"
        yield Edit("wrong_sign", text, lambda v, one=one, two=two: {**one(v), **two(v)})


def swaps(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[Edit]:
    """Exchange pairs, operands and arguments."""
    halves = {n.args: i for i, n in nodes if n.op == "odd"}
    both = [(i, halves[n.args], n.args[0]) for i, n in nodes if n.op == "even" and n.args in halves]
    for i, j, x in both:
        text = f"even and odd columns of `{graph.text(x)}` are swapped"
        yield Edit("swapped_pair", text, _exchanged((i, j)))
    if len(both) > 1:
        text = "even and odd columns are swapped, such as gate and up"
        yield Edit("swapped_pair", text, _exchanged(*((i, j) for i, j, _ in both)))
    for (i, n), (j, m) in itertools.combinations(enumerate(graph.nodes), 2):
        if n.op == m.op == "operand" and n.shape is m.shape:
            text = f"{n.name} and {m.name} change places"
            yield Edit("swapped_operands", text, _exchanged((i, j)))
    for i, n in nodes:
        if n.op == "where":
            text = f"the two values of `{graph.text(i)}` change places"
            yield Edit("swapped_operands", text, _call(i, n, (0, 2, 1)))
        elif len(n.args) == 2 and n.op in OPS and not OPS[n.op].commutative and n.op != "sub":
            text = f"the arguments of `{graph.text(i)}` change places"
            yield Edit("swapped_operands", text, _call(i, n, (1, 0)))


def dropped(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[Edit]:
    for i, n in nodes:
        for a in n.args if n.op in OPS and n.op not in ("where", *BOUNDS) else ():
            w = next((b for b in n.args if b != a), None)
            other, fault = graph.nodes[a if w is None else w], "extra_term"
            what = n.op if w is None else graph.text(w)
            if other.op == "operand" and (w is None or sum(w in m.args for _, m in nodes) > 1):
                fault = "doubled_operand"
            elif other.op == "const" and n.op == "mul":
                fault = "constant_factor"
            twice = fault == "doubled_operand" and len(n.args) > 1
            said = "enters twice" if twice else "is too much"
            text = f"`{what}` {said} in `{graph.text(i)}`: `{graph.text(a)}` is due"
            text += ", or a number too small to show" * (other.op == "const" and n.op == "add")
            yield Edit(fault, text, lambda v, i=i, a=a: {i: a})


def superfluous(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[Edit]:
    """Drop a factor, or a number, from all places where it is multiplied or added."""
    for i, n in nodes:
        by = {m.op for _, m in nodes if i in m.args}
        several = sum(i in m.args for _, m in nodes) > 1
        if several and n.op == "const" and by == {"add"}:
            text = f"the constant {graph.text(i)} is too much where it is added"
            yield Edit("wrong_constant", text, lambda v, i=i: {i: 0.0 * v[i]})
        elif several and n.args and by == {"mul"}:
            text = f"the factor `{graph.text(i)}` is too much"
            yield Edit("extra_term", text, lambda v, i=i: {i: 0.0 * v[i] + 1.0})


def operations(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[Edit]:
    """Apply another operation of as many arguments."""
    for i, n in nodes:
        arity = len(n.args)
        if n.op == "atan" and (of := graph.nodes[n.args[0]]).op == "div":
            text = f"`{graph.text(i)}` should be `{shown(graph, 'atan2', of.args, 0)}`"
            yield Edit("wrong_operation", text, _call(i, of, op="atan2"))
        if arity not in (1, 2) or n.op not in OPS:
            continue
        for op, known in OPS.items():
            if known.arity == arity and op != n.op and op not in _NEVER:
                due = shown(graph, op, n.args, 0)
                text = f"`{graph.text(i)}` should be `{due}`"
                yield Edit("wrong_operation", text, _call(i, n, op=op))


def groups(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[Edit]:
    """Take groups of another width, or exchange at another distance; another statistic."""
    for i, n in nodes:
        for op in GROUPS if n.op in GROUPS else ():
            (name, number), (other, due) = n.op.split(), op.split()
            if (other == name) != (due == number):
                fault = "wrong_constant" if other == name else "wrong_operation"
                text = f"`{graph.text(i)}` should be `{shown(graph, op, n.args, 0)}`"
                call = _call(i, n, op=op)
                yield Edit(fault, text, call)
                for j, m in nodes if other == name == "group_sum" else ():  # a mean's
                    c = next((a for a in m.args if i in m.args and a != i), None)
                    if c is not None and graph.nodes[c].value == 1 / int(number):
                        text = f"`{graph.text(j)}` is the mean of {number}: that of {due} is due"
                        share = 1 / int(due)
                        changes = lambda v, c=c, f=call, to=share: {**f(v), c: 0.0 * v[c] + to}
                        yield Edit(fault, text, changes)


def inserted(
    graph: Reading, sites: list[tuple[Any, int]], terms: list[int], fault: str, signs: str
) -> Iterator[Edit]:
    """Add a term, a factor or a bound."""
    for place, i in sites:
        for w in terms:
            if w == i or _at(place) in graph.below(w):
                continue
            for sign in signs:
                op = _NAMED.get(sign) or SIGNS[sign]
                what, at = graph.text(w), graph.text(i)
                due = f"{op}({at}, {what})" if sign in _NAMED else f"{at} {sign} {what}"
                text = f"`{what}` is left out: `{due}` is due{graph.use(place)}"
                yield Edit(
                    fault, text,
                    lambda v, p=place, i=i, w=w, op=op: {p: operation(op).torch(v[i], v[w])},
                )  # fmt: skip


def moved(
    graph: Reading, nodes: list[tuple[int, Node]], sites: list[tuple[Any, int]]
) -> Iterator[Edit]:
    """Move a factor or a term to another place."""
    for i, n in nodes:
        if n.op not in INFIX:
            continue
        for k in (0, 1):
            w = n.args[k]
            if n.op in ("sub", "div") and k == 0:
                continue
            for place, j in sites:
                at = _at(place)
                if at == i or j == w or at in graph.below(w):
                    continue
                left, op, right = _left(graph, j, i, n.args[1 - k]), INFIX[n.op], graph.text(w)
                due = f"{left} {op} {right}"
                # Outside of a choice, it may be: no sentence says it.
                if _bare(graph.text(i)) in map(_bare, (due, f"{right} {op} {left}")):
                    continue
                text = f"`{graph.text(w)}` stands in the wrong place: "
                text += f"not in `{graph.text(i)}`, but `{due}`{graph.use(place)}"
                yield Edit("misplaced", text, _move(graph, i, k, place, j))


def _bare(text: str) -> str:
    return text.replace("(", "").replace(")", "")


def _left(graph: Reading, j: int, i: int, by: int) -> str:
    """Write a node with another in the place of node `i`."""
    if i == j or i not in graph.below(j):
        return graph.text(by if i == j else j)
    nodes = [replace(n, args=tuple(by if a == i else a for a in n.args)) for n in graph.nodes]
    return expression(Graph(nodes, {}), j)


def _move(graph: Reading, i: int, k: int, place: Any, j: int) -> Callable[[Values], Changes]:
    """Apply a node's operation by one argument at another place."""
    op, args = graph.nodes[i].op, graph.nodes[i].args

    def changes(v: Values) -> Changes:
        # What comes after the first change is computed from it.
        moved = _again(graph, v, {i: v[args[1 - k]]})
        return {i: args[1 - k], place: operation(op).torch(moved[j], moved[args[k]])}

    return changes


def wrapped(graph: Reading, sites: list[tuple[Any, int]]) -> Iterator[Edit]:
    """Apply one more operation."""
    for place, i in sites:
        for op in _INSERTED:
            due = f"{op}({graph.text(i)})"
            text = f"an operation is left out: `{due}` is due{graph.use(place)}"
            yield Edit(
                "missing_term", text,
                lambda v, p=place, i=i, op=op: {p: operation(op).torch(v[i])},
            )  # fmt: skip


def replaced(graph: Reading, sites: list[tuple[Any, int]], others: list[int]) -> Iterator[Edit]:
    """Put another value of the program in a place."""
    for place, i in sites:
        for j in others:
            if j == i or _at(place) in graph.below(j):
                continue
            missing, extra = i in graph.below(j), j in graph.below(i)
            name = graph.nodes[j].op == "operand"
            fault = "missing_operand" if name else "missing_term" if missing else "extra_term"
            fault = fault if missing or extra or name else "wrong_operation"
            text = f"`{graph.text(j)}` is due where `{graph.text(i)}` stands"
            yield Edit(fault, text + graph.use(place), lambda v, p=place, j=j: {p: v[j]})


def activations(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[Edit]:
    """Put a function of one argument for a composed one."""
    known = {op: known.torch for op, known in OPS.items() if known.arity == 1}
    known |= {
        "relu": lambda x: x.clamp_min(0.0),
        "silu": lambda x: x * x.sigmoid(),
        "square": lambda x: x * x,
    }
    for i, n in nodes:
        for a in sorted(graph.below(i) - {i}, reverse=True) if n.args else ():
            named = graph.nodes[a].op not in ("const", *PLACED)  # erfc of an index means nothing
            for op, function in known.items() if named else ():
                text = f"`{graph.text(i)}` should be `{op}({graph.text(a)})`"
                yield Edit("wrong_operation", text, lambda v, i=i, a=a, f=function: {i: f(v[a])})


def _exchanged(*pairs: tuple[int, int]) -> Callable[[Values], Changes]:
    return lambda v: {k: w for i, j in pairs for k, w in ((i, v[j]), (j, v[i]))}


def _call(
    i: int, n: Node, order: tuple[int, ...] | None = None, op: str = ""
) -> Callable[[Values], Changes]:
    """Reorder a node's arguments, or apply another operation to them."""
    args = [n.args[k] for k in order] if order else n.args
    return lambda v: {i: operation(op or n.op).torch(*(v[a] for a in args))}


def _again(graph: Reading, values: Values, changed: dict[int, Any]) -> Values:
    """Compute all values again, with some changed ones."""
    found, moved = list(values), set(changed)
    for i, n in enumerate(graph.nodes):
        if i in changed:
            found[i] = changed[i]
        elif moved.intersection(n.args):
            found[i] = operation(n.op).torch(*(found[a] for a in n.args))
            moved.add(i)
    return found


def _at(place: Any) -> int:
    """Give the node of a place; -1 of the output."""
    return place if isinstance(place, int) else place[0]
