"""A graph with some values changed; and digits it loses.

`Replay` answers what an output would be with other values in some places, in float64. With it an
overflow and a rounding are followed through the graph, and `repairs.py` looks for mistakes.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, NamedTuple

from coda_agent.agent.judge.records import Inputs
from coda_agent.agent.judge.runners import held
from coda_agent.agent.judge.variant import Variant
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.graph import Graph, Node, Shape
from coda_agent.primitives.operation import GROUPS, PLACED
from coda_agent.primitives.program import Program
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import RowVector

_ROWS = 12  # that a search looks at
_FIXED, _BROKEN = 0.9995, 1e-4  # shares: of what was wrong at least, of what was right at most
_LEFT, _NEAR, _EXACT = 0.1, 1e-5, 1e-9  # of the difference, of the truth, of the truth at any rate
_PROBED, _FAR = 64, 1e-2  # elements looked at first, and how far off they are not right
_ROUND = 8.0  # roundings of one size that an element's error may come to
_SMALL = 2.0**-6  # of the element, or of the mean
COMPARISONS = frozenset(("equal", "greater", "greater_equal", "step"))
SIGNS = {"+": "add", "-": "sub", "·": "mul", "/": "div"}
INFIX = {op: sign for sign, op in SIGNS.items()}
# What torch raises where a change fits no shape.
MISFITS = (CodaError, ArithmeticError, RuntimeError, TypeError, ValueError, IndexError)


class Mistake(NamedTuple):
    """A fault, a key of `diagnosis.FAULTS`, and one sentence."""

    fault: str
    text: str


def is_small(difference: torch.Tensor, truth: torch.Tensor) -> bool:
    """Whether a difference is small beside each element, or beside their mean."""
    there = truth.isfinite()
    difference, size = difference[there], truth[there].abs()
    return bool((difference.abs() <= _SMALL * (size + size.mean())).all())


class Replay:
    """A program on some rows of inputs, and an output's truth."""

    def __init__(
        self, variant: Variant, o: str, inputs: Inputs, truth: torch.Tensor,
        out: torch.Tensor | None = None, single: bool = False,
    ) -> None:  # fmt: skip
        spec, program = variant.spec, variant.program
        self.graph, self.o = program.graph, o
        self.kind, self.root = program.outputs[o], program.graph.outputs[o]
        a, b = (inputs[x].double() for x in spec.gemm)
        given = {**inputs, **held(spec, program, inputs)}
        acc = a @ b.mT
        # Beside a rounded maximum of it, none is equal otherwise.
        acc = acc.float().double() if single else acc
        lifted = {x: kind.lifted(given[x], acc) for x, kind in program.operands.items()}
        self.added = given[o].double() if self.kind.accumulates else None
        self.truth = truth
        placed = any(n.op in PLACED for n in self.graph.nodes)
        fixed = placed or getattr(self.kind, "over_rows", False) or len(truth) != len(acc)
        if out is not None and not fixed and len(acc) > _ROWS:
            wrong = _apart(out, truth) > _NEAR
            counts = wrong.reshape(len(acc), -1).sum(1).double()
            rows = counts.topk(_ROWS).indices.sort().values
            # A vector over columns is as long as there are rows where M is N.
            over = (x for x, kind in program.operands.items() if not issubclass(kind, RowVector))
            by_row = [x for x in over if lifted[x].ndim and len(lifted[x]) == len(acc)]
            lifted |= {x: lifted[x][rows] for x in by_row}
            acc = acc[rows]
            self.truth = truth[rows]
            self.added = None if self.added is None else self.added[rows]
        self.acc, self.single, self.read = acc, single, Reading(program.graph)
        self.runs = 0
        self.values = _tensors(self.graph.replay(acc, lifted, self._applied))
        self.out = self.run({})
        self.difference = _apart(self.out, self.truth)
        # Where two branches nearly agree, to take the other one mends a program, and says nothing.
        self.small = is_small(self.out - self.truth, self.truth)
        self.wrong = self.difference > _EXACT * 10
        probed = self.wrong.flatten().nonzero().flatten()
        self._probed = probed[:: max(1, len(probed) // _PROBED)]
        self._due = self.truth.flatten()[self._probed]

    def run(self, changes: Mapping[Any, Any]) -> torch.Tensor:
        """Compute the output with other values in some places."""
        self.runs += 1
        values, moved = list(self.values), {i for i in changes if isinstance(i, int)}
        touched = {place[0] for place in changes if isinstance(place, tuple)}
        first = min((*moved, *(t for t in touched if t >= 0)), default=len(values))
        for i in range(first, self.root + 1):
            n = self.graph.nodes[i]
            if i in changes:
                values[i] = values[c] if isinstance(c := changes[i], int) else c
            elif i in touched or moved.intersection(n.args):
                args = (changes.get((i, k), values[a]) for k, a in enumerate(n.args))
                values[i] = self._applied(n.op, *args)
                moved.add(i)
        kind, self.after = changes.get(self.o), values
        return self._stored(changes.get((-1, 0), values[self.root]), kind)

    def branched(self, changes: Mapping[Any, Any]) -> bool:
        """Whether the last run's changes lead into another branch."""
        both = zip(self.values, self.after, strict=True)
        return any(
            (i in changes and n.op == "where")
            or (n.op in COMPARISONS and x is not y and bool((x != y).any()))
            for i, (n, (x, y)) in enumerate(zip(self.graph.nodes, both, strict=True))
        )

    def _applied(self, op: str, *args: Any) -> Any:
        """Apply an operation, in float32 where `single`."""
        value = operation(op).torch(*args)
        return value.float().double() if self.single else value

    def _stored(self, value: Any, kind: Any = None) -> torch.Tensor:
        value = torch.as_tensor(value, dtype=torch.float64)
        value = value.expand(*self.acc.shape) if not value.ndim else value
        value = value.expand(len(self.acc), *value.shape[1:])
        if issubclass(kind := kind or self.kind, Reduction):
            folded = len(value) if kind.over_rows else value.shape[1]
            return kind.finalise(kind.partials(value, 128), folded, 128)
        stored = kind.taken(value)
        return stored if self.added is None else self.added + stored

    def right(self, changes: Mapping[Any, Any]) -> bool:
        """Whether changes make the output right, or nearly in single precision."""
        try:
            out = self.run(changes)
        except MISFITS:
            return False
        if out.shape != self.truth.shape:
            return False
        # Nearly every edit is off at nearly every element: a few of them say so in less time.
        seen = (out.flatten()[self._probed] - self._due).abs()
        far = seen > (_FAR if self.single else 2 * _NEAR) * self._due.abs() + 1e-30
        if int(far.sum()) > len(far) // 2:
            return False
        left = _apart(out, self.truth)
        if self.single:
            seen = (out - self.truth).abs().nan_to_num(torch.inf) > 1e-30  # less may be flushed
            return int((seen & (left > 1e-3)).sum()) <= 0.05 * left.numel()
        limit = torch.where(self.wrong, (_LEFT * self.difference).clamp_max(_NEAR), _NEAR)
        off = left > limit + _EXACT
        count, total = int(self.wrong.sum()), off.numel()
        fixed = int((off & self.wrong).sum()) <= (1 - _FIXED) * count
        return fixed and int((off & ~self.wrong).sum()) <= _BROKEN * total


def lost_digits(
    variant: Variant, o: str, inputs: Inputs, out: torch.Tensor, truth: torch.Tensor
) -> Mistake | None:
    """Find what a right program loses in float32, or None."""
    exact = {x: _exact(v) for x, v in inputs.items()}
    replay = Replay(variant, o, exact, truth)
    replay.out = out.double()
    replay.difference = _apart(replay.out, truth)
    replay.wrong = replay.difference > 2.0**-7
    return found_lost(replay, 2.0**-24)


_CHOOSES = ("maximum", "minimum", "where", "absolute", "neg", "copysign")
"""What rounds nothing: it gives an argument, or its other sign."""


def found_lost(replay: Replay, unit: float) -> Mistake | None:
    """Find an overflow, or a rounding that later operations blow up."""
    wrong, nodes = replay.wrong, replay.graph.nodes
    if not bool(wrong.any()):
        return None
    if bool((~replay.out.isfinite() & wrong).any()):
        for i, value in enumerate(replay.values):
            lost = ~value.isfinite()
            if not bool(lost.any()) or nodes[i].op in ("acc", "operand"):
                continue
            if all(bool(replay.values[a].isfinite().all()) for a in nodes[i].args):
                what = float(value[lost].flatten()[0])
                text = f"`{expression(replay.graph, i)}` is {what:g} for some inputs"
                return Mistake("overflow", text)
        return None
    total, worst, size = torch.zeros_like(replay.out), -1, 0.0
    tiny, usual = 2.0**-30, replay.run({})
    place = int((replay.difference.nan_to_num(torch.inf) * wrong).argmax())
    for i, value in enumerate(replay.values[: replay.root + 1]):
        if nodes[i].op in ("const", "acc", "operand", "even", "odd", "interleave", "gather"):
            continue
        # To both sides: a sign that is copied on makes them equal.
        up, down = (replay.run({i: value * (1 + t)}) for t in (tiny, -tiny))
        moved = (up - usual).abs() + (down - usual).abs()
        moved = moved.nan_to_num(0.0, 0.0, 0.0) * (unit / (2 * tiny))
        total += moved
        if nodes[i].op not in _CHOOSES and float(moved.flatten()[place]) > size:
            worst, size = i, float(moved.flatten()[place])
    error = (replay.out - replay.truth).abs()
    explained = (error <= _ROUND * total + unit * replay.truth.abs()) & wrong
    if int(explained.sum()) < 0.95 * int(wrong.sum()) or worst < 0:
        return None
    text = f"digits are lost: the rounding of `{expression(replay.graph, worst)}` is what is off"
    return Mistake("cancellation", f"{text}, since what follows nearly cancels it")


def _apart(out: torch.Tensor, truth: torch.Tensor) -> torch.Tensor:
    """Measure each element's distance as a share of a finite truth."""
    share = (out - truth).abs() / truth.abs().clamp_min(1e-290)
    share = torch.where(out == truth, 0.0, share.nan_to_num(torch.inf))
    return torch.where(truth.isfinite(), share, 0.0)


def _exact(value: Any) -> Any:
    floating = getattr(value, "is_floating_point", lambda: False)()
    return value.double() if floating else value


def _tensors(values: Iterable[Any]) -> list[Any]:
    return [torch.as_tensor(v, dtype=torch.float64) if isinstance(v, float) else v for v in values]


SHIFT = "shift"
"""The name of what `followed` adds on behalf of the judge: no text shows it, and no edit."""


def followed(program: Program, by: Mapping[int, tuple[str, float]], name: str = "") -> Program:
    """Apply an operation with a number to some nodes' values, by node."""
    nodes, places = list[Node](), list[int]()
    for i, node in enumerate(program.graph.nodes):
        nodes.append(replace(node, args=tuple(places[a] for a in node.args)))
        if i in by:
            op, number = by[i]
            nodes.append(Node("const", (), Shape.SCALAR, name, float(number)))
            nodes.append(Node(op, (len(nodes) - 2, len(nodes) - 1), node.shape, name))
        places.append(len(nodes) - 1)
    outputs = {o: places[i] for o, i in program.graph.outputs.items()}
    return replace(program, graph=Graph(nodes, outputs))


class Reading:
    """A graph's nodes as text, with all they are computed from."""

    def __init__(self, graph: Graph) -> None:
        self.nodes = graph.nodes
        self.text = functools.cache(functools.partial(expression, graph))
        self._below: list[set[int]] = []
        for i, n in enumerate(graph.nodes):
            self._below.append({i}.union(*(self._below[a] for a in n.args)))

    def below(self, i: int) -> set[int]:
        """List a node and all that it is computed from."""
        return self._below[i]

    def use(self, place: Any) -> str:
        """Say where a place is, if it is one use of several."""
        if isinstance(place, int):
            return ""
        return f", in `{self.text(place[0])}`" if place[0] >= 0 else ", in the output"


def expression(graph: Graph, i: int, length: int = 48) -> str:
    """Write a node as an author would, to some length."""
    for depth in (8, 5, 4, 3, 2, 1):
        text = _written(graph, i, depth)
        if len(text) <= length:
            break
    return text


def _written(graph: Graph | Reading, i: int, depth: int, tight: bool = False) -> str:
    n = graph.nodes[i]
    if not n.args:
        return n.name or ("acc" if n.op == "acc" else f"{n.value:.7g}")
    if n.name == SHIFT:
        return _written(graph, n.args[0], depth, tight)
    if not depth:
        return "…"
    text = shown(graph, n.op, n.args, depth)
    return f"({text})" if tight and n.op in (*INFIX, "fma") else text


def shown(graph: Graph | Reading, op: str, args: tuple[int, ...], depth: int) -> str:
    depth = depth or 3
    if op in INFIX:
        left, right = (_written(graph, a, depth - 1, tight=True) for a in args)
        return f"{left} {INFIX[op]} {right}"
    if op == "neg":
        return f"-{_written(graph, args[0], depth - 1, tight=True)}"
    if op == "fma":  # which is no name of the vocabulary
        x, y, z = (_written(graph, a, depth - 1, tight=True) for a in args)
        return f"{x} {INFIX['mul']} {y} {INFIX['add']} {z}"
    name = op.partition("\n")[0].partition(":")[0]
    name = "round_even" if name == "rint" else name  # which the vocabulary does not export
    given = [_written(graph, a, depth - 1) for a in args]
    if op in GROUPS:
        name, number = op.split()
        given.append(number)
    return f"{name}({', '.join(given)})"
