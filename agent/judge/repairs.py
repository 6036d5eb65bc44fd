"""Name the mistake in a wrong program: the one small edit that makes it right.

- Each edit changes a node of the graph, or one use of it: another operation, a sign, an operand, a
  constant, a factor on the other side of an activation. It counts where the edited program gives
  the truth at nearly all elements, on the inputs that failed and on others.
- Before that, digits are followed: a node that overflows, and one whose rounding is what is off.
- Edits are tried from the simplest on. All run in float64, on the rows that are most wrong.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Iterable, Iterator
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.replaying import (
    INFIX,
    MISFITS,
    SIGNS,
    Mistake,
    Reading,
    Replay,
    found_lost,
    shown,
)
from coda_agent.primitives.graph import Node
from coda_agent.primitives.operation import OPS
from coda_agent.primitives.program import Program
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import OUTPUT_KINDS
from coda_agent.specs import Spec

if TYPE_CHECKING:
    import torch

    Values = list[Any]
    Changes = dict[Any, Any]

FAULTS = {
    "wrong_sign": "a term, a factor or a rotation of the other sign",
    "wrong_operation": "another operation or activation in one place",
    "wrong_constant": "another number",
    "misplaced": "a factor or a term on the wrong side of an operation",
    "missing_term": "a factor, a term or an operation left out",
    "extra_term": "a factor, a term or an operation too many",
    "overflow": "an intermediate value that overflows",
    "cancellation": "digits lost between numbers that nearly cancel",
}
# A program of 48 operations has 36,000 edits, which took 8 s. Of 618 mistakes of people and of
# mutants that were found, the last one was after 5,301 trials.
_MAX_RUNS = 7_000
_STEPS = 8  # of Newton's method for a number
_NAMED = {"<": "minimum", ">": "maximum", "s": "copysign"}
# Of one or two arguments, and meant by nobody in the place of another.
_NEVER = {"neg", "power", "fmod", "atan2", "tan", "trunc", "equal", "rint"}
_INSERTED = ("absolute", "exp", "log", "sqrt", "rsqrt", "tanh", "sigmoid", "log1p", "expm1")


class _Edit(NamedTuple):
    """A mistake and what undoes it: from the values of all nodes to changed ones, by place.

    A place is a node's number, a use (node, argument), the output (-1, 0), or the output's name,
    which gives it another kind. A changed value that is a number of a node is that node's.
    """

    fault: str
    text: str
    changes: Callable[[Values], Changes]


def mistake(
    spec: Spec, program: Program, o: str, sets: Iterable[tuple[Inputs, torch.Tensor]],
) -> Mistake | None:  # fmt: skip
    """The mistake that explains a wrong output, or None.

    Args:
        spec: The spec.
        program: The program, whose output is wrong in float64.
        o: The output.
        sets: Inputs in float64, each with the exact output; on the first it is wrong. What is found
            there holds on the others too.
    """
    first, *others = sets
    whole = Replay(spec, program, o, *first)
    if (lost := found_lost(whole, 2.0**-52)) is not None:
        return lost
    if not bool(whole.wrong.any()):
        return None
    some = Replay(spec, program, o, *first, whole.out)
    more = [Replay(spec, program, o, *x, single=True) for x in others]
    overflowing: Mistake | None = None
    for edit in _edits(some):
        if some.runs > _MAX_RUNS:
            break
        try:
            changes = edit.changes(some.values)
            found = some.right(changes) and not (some.small and some.branched(changes))
            found = found and whole.right(edit.changes(whole.values))
            if found and all(r.right(edit.changes(r.values)) for r in more):
                return Mistake(edit.fault, edit.text)
            # The right program may overflow as well: it is named where nothing else is found.
            if (
                found
                and overflowing is None
                and all(r.right(edit.changes(r.values)) for r in more[:1])
            ):
                overflowing = Mistake(edit.fault, edit.text)
        except MISFITS:
            continue
    return overflowing


# The edits.


def _edits(replay: Replay) -> Iterator[_Edit]:
    graph, root = replay.read, replay.root
    live = graph.below(root)
    nodes = [(i, n) for i, n in enumerate(graph.nodes) if i in live]
    uses = [(c, k) for c, n in nodes for k in range(len(n.args))] + [(-1, 0)]
    source = {u: graph.nodes[u[0]].args[u[1]] if u[0] >= 0 else root for u in uses}
    count = {i: sum(s == i for s in source.values()) for i in live}
    # A node with one use is that use: trying both would find nothing new.
    sites: list[tuple[Any, int]] = [(i, i) for i, n in nodes if n.op != "const"]
    sites += [(u, i) for u, i in source.items() if count[i] > 1 and graph.nodes[i].op != "const"]
    yield from _stores(replay)
    yield from _signs(graph, sites)
    yield from _swaps(graph, nodes)
    yield from _dropped(graph, nodes)
    yield from _operations(graph, nodes)
    yield from _constants(replay, nodes)
    yield from _bounds(graph, replay)
    operands = [i for i, n in enumerate(graph.nodes) if n.op == "operand"]
    yield from _inserted(graph, sites, operands, "missing_operand", "+·")
    yield from _moved(graph, nodes, sites)
    yield from _inserted(graph, sites, operands, "missing_operand", "-/")
    yield from _fitted(replay, sites)
    yield from _wrapped(graph, sites)
    yield from _inserted(graph, sites, operands, "missing_operand", "<>s")
    others = [i for i, n in enumerate(graph.nodes) if n.op not in ("operand", "const")]
    if replay.small and any(n.op == "where" for n in graph.nodes):
        others = []  # the value of the other branch is among them
    yield from _inserted(graph, sites, others, "missing_term", "+-·/<>s")
    yield from _replaced(graph, sites, others + operands)
    yield from _activations(graph, nodes)


def _stores(replay: Replay) -> Iterator[_Edit]:
    """Another reduction along the same axis, and pairs stored the wrong way round."""
    kind = replay.kind
    for name, other in OUTPUT_KINDS.items() if issubclass(kind, Reduction) else ():
        if issubclass(other, Reduction) and other.dims == kind.dims and other is not kind:
            text = f"{replay.o} is a {kind.__name__}: a {name} is due"
            yield _Edit("wrong_statistics", text, lambda v, k=other: {replay.o: k})
    for i, n in enumerate(replay.graph.nodes):
        if n.op == "interleave":
            text = f"even and odd columns of `{replay.read.text(i)}` are swapped"
            yield _Edit("swapped_pair", text, _call(i, n, (1, 0)))


def _swaps(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[_Edit]:
    """Pairs, operands and arguments in each other's place."""
    halves = {n.args: i for i, n in nodes if n.op == "odd"}
    both = [(i, halves[n.args], n.args[0]) for i, n in nodes if n.op == "even" and n.args in halves]
    for i, j, x in both:
        text = f"even and odd columns of `{graph.text(x)}` are swapped"
        yield _Edit("swapped_pair", text, lambda v, i=i, j=j: {i: v[j], j: v[i]})
    if len(both) > 1:
        text = "even and odd columns are swapped, such as gate and up"
        changed = [(i, j) for i, j, _ in both]
        yield _Edit(
            "swapped_pair", text,
            lambda v: {k: w for i, j in changed for k, w in ((i, v[j]), (j, v[i]))},
        )  # fmt: skip
    for (i, n), (j, m) in itertools.combinations(enumerate(graph.nodes), 2):
        if n.op == m.op == "operand" and n.shape is m.shape:
            text = f"{n.name} and {m.name} change places"
            yield _Edit("swapped_operands", text, lambda v, i=i, j=j: {i: v[j], j: v[i]})
    for i, n in nodes:
        if n.op == "where":
            text = f"the two values of `{graph.text(i)}` change places"
            yield _Edit("swapped_operands", text, _call(i, n, (0, 2, 1)))
        elif len(n.args) == 2 and n.op in OPS and not OPS[n.op].commutative and n.op != "sub":
            text = f"the arguments of `{graph.text(i)}` change places"
            yield _Edit("swapped_operands", text, _call(i, n, (1, 0)))


def _signs(graph: Reading, sites: list[tuple[Any, int]]) -> Iterator[_Edit]:
    for i, n in enumerate(graph.nodes):
        if n.op in ("add", "sub"):
            other = {"add": "sub", "sub": "add"}[n.op]
            text = f"`{graph.text(i)}` has the other sign: {INFIX[other]} is due"
            yield _Edit("wrong_sign", text, _call(i, n, op=other))
        if n.op == "sub":
            text = f"`{graph.text(i)}` has the other sign"
            yield _Edit("wrong_sign", text, _call(i, n, (1, 0)))
    for place, i in sites:
        text = f"`{graph.text(i)}` has the other sign{_use(graph, place)}"
        yield _Edit("wrong_sign", text, lambda v, p=place, i=i: {p: -v[i]})
    subs = [(i, n) for i, n in enumerate(graph.nodes) if n.op in ("add", "sub")]
    for (i, n), (j, m) in itertools.combinations(subs, 2):  # two signs of a rotation
        one, two = (_call(k, x, op={"add": "sub", "sub": "add"}[x.op]) for k, x in ((i, n), (j, m)))
        text = f"`{graph.text(i)}` and `{graph.text(j)}` have the other signs"
        yield _Edit("wrong_sign", text, lambda v, one=one, two=two: {**one(v), **two(v)})


def _operations(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[_Edit]:
    """Another operation of as many arguments."""
    for i, n in nodes:
        arity = len(n.args)
        if arity not in (1, 2) or n.op not in OPS:
            continue
        for op, known in OPS.items():
            if known.arity == arity and op != n.op and op not in _NEVER:
                due = shown(graph, op, n.args, 0)
                text = f"`{graph.text(i)}` should be `{due}`"
                yield _Edit("wrong_operation", text, _call(i, n, op=op))


def _constants(replay: Replay, nodes: list[tuple[int, Node]]) -> Iterator[_Edit]:
    for i, n in nodes:
        if n.op != "const":
            continue
        found = _fit(replay, lambda v, t, i=i: {i: v[i] + t})
        if found is None:
            continue
        used = next((j for j, m in nodes if i in m.args), None)
        where = f" in `{replay.read.text(used)}`" if used is not None else ""
        value = n.value + found
        if abs(value + n.value) < 1e-6 * abs(value):
            fault, text = "wrong_sign", f"the constant {n.value:.9g}{where} has the other sign"
        else:
            fault = "wrong_constant"
            text = f"the constant {n.value:.9g}{where} should be {_rounded(value):.9g}"
        yield _Edit(fault, text, lambda v, i=i, t=found: {i: v[i] + t})


def _bounds(graph: Reading, replay: Replay) -> Iterator[_Edit]:
    """Two numbers of one size, such as the ends of a range."""
    consts = [(i, n.value) for i, n in enumerate(graph.nodes) if n.op == "const" and n.value]
    for (i, c), (j, d) in itertools.combinations(consts, 2):
        if c != -d:
            continue

        def scaled(v: Values, t: float, i: int = i, j: int = j) -> Changes:
            return {i: v[i] * (1 + t), j: v[j] * (1 + t)}

        if (t := _fit(replay, scaled)) is not None:
            text = f"the constants ±{abs(c):.7g} should be ±{_rounded(abs(c) * (1 + t)):.7g}"
            yield _Edit("wrong_constant", text, lambda v, f=scaled, t=t: f(v, t))


def _inserted(
    graph: Reading, sites: list[tuple[Any, int]], terms: list[int], fault: str, signs: str
) -> Iterator[_Edit]:
    """One more term or factor, or a bound: < and > are the smaller and the larger, s gives
    the sign."""
    for place, i in sites:
        for w in terms:
            if w == i or (isinstance(place, int) and place in graph.below(w)):
                continue
            if isinstance(place, tuple) and place[0] in graph.below(w):
                continue
            for sign in signs:
                op = _NAMED.get(sign) or SIGNS[sign]
                what, at = graph.text(w), graph.text(i)
                due = f"{op}({at}, {what})" if sign in _NAMED else f"{at} {sign} {what}"
                text = f"`{what}` is left out: `{due}` is due{_use(graph, place)}"
                yield _Edit(
                    fault, text,
                    lambda v, p=place, i=i, w=w, op=op: {p: operation(op).torch(v[i], v[w])},
                )  # fmt: skip


def _dropped(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[_Edit]:
    for i, n in nodes:
        for a in n.args if n.op in OPS else ():
            w = next((b for b in n.args if b != a), None)
            other, fault = graph.nodes[a if w is None else w], "extra_term"
            what = n.op if w is None else graph.text(w)
            if other.op == "operand" and (w is None or sum(w in m.args for _, m in nodes) > 1):
                fault = "doubled_operand"
            elif other.op == "const" and n.op == "mul":
                fault = "constant_factor"
            said = "enters twice" if fault == "doubled_operand" else "is too much"
            text = f"`{what}` {said} in `{graph.text(i)}`: `{graph.text(a)}` is due"
            yield _Edit(fault, text, lambda v, i=i, a=a: {i: a})


def _fitted(replay: Replay, sites: list[tuple[Any, int]]) -> Iterator[_Edit]:
    """A factor, a term or a bound that is a number."""
    import torch

    graph = replay.read
    for place, i in sites:
        what, use = graph.text(i), _use(graph, place)

        def scaled(v: Values, t: float, p: Any = place, i: int = i) -> Changes:
            return {p: v[i] * (1 + t)}

        def shifted(v: Values, t: float, p: Any = place, i: int = i) -> Changes:
            return {p: v[i] + t}

        consts = [n.value for n in graph.nodes if n.op == "const" and abs(n.value) not in (0, 1)]
        # An infinite constant has no inverse, and a fit may find that nothing is left of a value.
        factors = (f for c in (2.0, *consts) if math.isfinite(c) for f in (c, 1 / c))
        known = (f - 1 for f in factors if replay.right(scaled(replay.values, f - 1)))
        t = next(known, None) or _fit(replay, scaled)
        if t is not None and abs(1 + t) > 1e-9:  # less leaves nothing of the value
            text = f"`{what}` enters times {_rounded(1 / (1 + t)):.7g}{use}"
            text += f": `{_rounded(1 + t):.7g} · {what}` is due"
            yield _Edit("constant_factor", text, lambda v, f=scaled, t=t: f(v, t))
        if (t := _fit(replay, shifted)) is not None:
            text = f"a term is left out: `{what} {'+-'[t < 0]} {abs(_rounded(t)):.7g}` is due{use}"
            yield _Edit("missing_term", text, lambda v, f=shifted, t=t: f(v, t))
        value = torch.as_tensor(replay.values[i], dtype=torch.float64)
        for op, share in (("minimum", 0.98), ("maximum", 0.02)):
            start = float(value.flatten()[:100_000].quantile(share)) if value.numel() > 1 else 0.0

            def bounded(
                v: Values, t: float, p: Any = place, i: int = i, op: str = op, s: float = start
            ) -> Changes:
                return {p: operation(op).torch(v[i], torch.tensor(s + t, dtype=torch.float64))}

            if value.numel() > 1 and (t := _fit(replay, bounded)) is not None:
                due = f"{op}({what}, {_rounded(start + t):.7g})"
                text = f"a bound is left out: `{due}` is due{use}"
                yield _Edit("missing_term", text, lambda v, f=bounded, t=t: f(v, t))


def _wrapped(graph: Reading, sites: list[tuple[Any, int]]) -> Iterator[_Edit]:
    """One more operation."""
    for place, i in sites:
        for op in _INSERTED:
            due = f"{op}({graph.text(i)})"
            text = f"an operation is left out: `{due}` is due{_use(graph, place)}"
            yield _Edit(
                "missing_term", text,
                lambda v, p=place, i=i, op=op: {p: operation(op).torch(v[i])},
            )  # fmt: skip


def _moved(
    graph: Reading, nodes: list[tuple[int, Node]], sites: list[tuple[Any, int]]
) -> Iterator[_Edit]:
    """A factor or a term at another place than it has."""
    for i, n in nodes:
        if n.op not in INFIX:
            continue
        for k in (0, 1):
            w, kept = n.args[k], n.args[1 - k]
            if n.op in ("sub", "div") and k == 0:
                continue
            for place, j in sites:
                at = place if isinstance(place, int) else place[0]
                if at == i or j == w or (at >= 0 and at in graph.below(w)):
                    continue
                due = f"{graph.text(j)} {INFIX[n.op]} {graph.text(w)}"
                text = f"`{graph.text(w)}` stands in the wrong place: "
                text += f"not in `{graph.text(i)}`, but `{due}`{_use(graph, place)}"

                def changes(
                    v: Values, i: int = i, kept: int = kept, w: int = w, p: Any = place,
                    j: int = j, op: str = n.op,
                ) -> Changes:  # fmt: skip
                    # What comes after the first change is computed from it.
                    moved = _again(graph, v, {i: v[kept]})
                    return {i: kept, p: operation(op).torch(moved[j], moved[w])}

                yield _Edit("misplaced", text, changes)


def _replaced(graph: Reading, sites: list[tuple[Any, int]], others: list[int]) -> Iterator[_Edit]:
    """Another value of the program in a place."""
    for place, i in sites:
        at = place if isinstance(place, int) else place[0]
        for j in others:
            if j == i or (at >= 0 and at in graph.below(j)):
                continue
            missing, extra = i in graph.below(j), j in graph.below(i)
            name = graph.nodes[j].op == "operand"
            fault = "missing_operand" if name else "missing_term" if missing else "extra_term"
            fault = fault if missing or extra or name else "wrong_operation"
            text = f"`{graph.text(j)}` is due where `{graph.text(i)}` stands"
            yield _Edit(fault, text + _use(graph, place), lambda v, p=place, j=j: {p: v[j]})


def _activations(graph: Reading, nodes: list[tuple[int, Node]]) -> Iterator[_Edit]:
    """A function of one argument in the place of a composed one."""
    known = {op: known.torch for op, known in OPS.items() if known.arity == 1}
    known |= {
        "relu": lambda x: x.clamp_min(0.0),
        "silu": lambda x: x * x.sigmoid(),
        "square": lambda x: x * x,
    }
    for i, n in nodes:
        for a in sorted(graph.below(i) - {i}, reverse=True) if n.args else ():
            for op, function in known.items() if graph.nodes[a].op != "const" else ():
                text = f"`{graph.text(i)}` should be `{op}({graph.text(a)})`"
                yield _Edit("wrong_operation", text, lambda v, i=i, a=a, f=function: {i: f(v[a])})


def _fit(replay: Replay, changes: Callable[[Values, float], Changes]) -> float | None:
    """The number with which the changes make the output right, by Newton's method on the median of
    the elements; None where there is none."""
    wrong, truth, t, step = replay.wrong, replay.truth, 0.0, 1e-6
    for _ in range(_STEPS):
        try:
            here = replay.run(changes(replay.values, t))
            slope = (replay.run(changes(replay.values, t + step)) - here) / step
        except MISFITS:
            return None
        if here.shape != truth.shape:
            return None
        # Steps of what does not move are infinite: left out.
        moves = ((truth - here) / slope)[wrong & (slope.abs() > 1e-12 * truth.abs())]
        moves = moves[moves.isfinite()]
        if not moves.numel():
            return None
        by = float(moves.median())
        t += by
        if not abs(t) < 1e6:
            return None
        if abs(by) <= 1e-10 * max(1.0, abs(t)):
            break
    return t if abs(t) > 1e-9 and replay.right(changes(replay.values, t)) else None


def _rounded(x: float) -> float:
    """A number as one would write it, where it is nearly that."""
    for digits in (3, 5, 7):
        short = float(f"{x:.{digits}g}")
        if abs(short - x) <= 1e-6 * abs(x):
            return short
    return x


def _call(
    i: int, n: Node, order: tuple[int, ...] | None = None, op: str = ""
) -> Callable[[Values], Changes]:
    """Node `i` with its arguments in another order, or another operation of them."""
    args = [n.args[k] for k in order] if order else n.args
    return lambda v: {i: operation(op or n.op).torch(*(v[a] for a in args))}


def _again(graph: Reading, values: Values, changed: dict[int, Any]) -> Values:
    """All values, with some changed ones."""
    found, moved = list(values), set(changed)
    for i, n in enumerate(graph.nodes):
        if i in changed:
            found[i] = changed[i]
        elif moved.intersection(n.args):
            found[i] = operation(n.op).torch(*(found[a] for a in n.args))
            moved.add(i)
    return found


def _use(graph: Reading, place: Any) -> str:
    """Where a place is, if it is one use of several."""
    if isinstance(place, int):
        return ""
    return f", in `{graph.text(place[0])}`" if place[0] >= 0 else ", in the output"
