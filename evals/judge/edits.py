"""Edits of a program's graph: single faults, and other spellings."""

import dataclasses
import itertools
from collections.abc import Callable, Iterator, Mapping
from typing import NamedTuple

import torch

from coda_agent.primitives import interleave, pairs
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Shape, Value, record
from coda_agent.primitives.operation import OPS
from coda_agent.primitives.program import Program
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import (
    ColMax,
    ColSum,
    ColVector,
    RowMax,
    RowMean,
    RowSum,
    RowVector,
    Scalar,
)

Change = Callable[[Value, list[Value]], Value | None]
"""The value of a node as it was, and its arguments, to what takes its place; None leaves it."""


class Edit(NamedTuple):
    """A change of a program, such as one fault.

    Attributes:
        faults: What a diagnosis may call it, the best name first.
        changes: Changed nodes by number.
        operands: Changed kinds of operands.
        outputs: Changed kinds of outputs.
    """

    operator: str
    site: str
    faults: tuple[str, ...] = ()
    changes: Mapping[int, Change] = {}
    operands: Mapping[str, type] = {}
    outputs: Mapping[str, type] = {}

    def apply(self, program: Program) -> Program | None:
        """Edit a program; None where it is none then, or unchanged."""
        try:
            edited = self._recorded(program)
        except ProgramError:
            return None
        return None if edited.digest == program.digest else edited

    def _recorded(self, program: Program) -> Program:
        kinds, graph, values = {**program.operands, **self.operands}, Graph(), list[Value]()
        for i, node in enumerate(program.graph.nodes):
            arguments = [values[a] for a in node.args]
            value = _again(graph, node, arguments, kinds)
            changed = self.changes[i](value, arguments) if i in self.changes else None
            values.append(value if changed is None else changed)
        for name, index in program.graph.outputs.items():
            if values[index].shape is not program.graph.nodes[index].shape:
                raise ProgramError(f"output {name!r} changed its width")
            graph.outputs[name] = values[index].index
        kept = {**program.outputs, **self.outputs}
        return Program(program.name, program.doc, kinds, kept, graph.prune())


def _again(graph: Graph, node: Node, arguments: list[Value], kinds: Mapping[str, type]) -> Value:
    match node.op:
        case "operand":
            return graph.add(dataclasses.replace(node, shape=kinds[node.name].varies))
        case "acc" | "const" | "gather":
            return graph.add(dataclasses.replace(node, args=tuple(a.index for a in arguments)))
        case "even" | "odd":
            return pairs(arguments[0])[node.op == "odd"]
        case "interleave":
            return interleave(*arguments)
        case op if all(graph.nodes[a.index].op == "const" for a in arguments):
            numbers = (torch.tensor(graph.nodes[a.index].value).double() for a in arguments)
            return graph.const(float(OPS[op].torch(*numbers)))
        case op:
            return record(op, *arguments)


_UNKNOWN = ("wrong_function", "wrong_statistics", "approximated")
_FACTOR = ("constant_factor",)
_SIGN = ("wrong_sign", "wrong_operation")
_ACTIVATIONS = {
    "sigmoid": ("tanh",), "gelu_tanh": ("sigmoid", "gelu_erf"), "gelu_erf": ("gelu_tanh",),
    "maximum": ("minimum",), "minimum": ("maximum",), "absolute": ("neg",),
}  # fmt: skip
# What leaves a value alone as long as it stays where a spec's draws usually are.
_BOUNDS: dict[str, Change] = {
    "at most 4": lambda v, args: record("minimum", v, 4.0),
    "at least -4": lambda v, args: record("maximum", v, -4.0),
    "its absolute value": lambda v, args: record("absolute", v),
}
# The same as the operation is, or nearly so, for arguments of usual size.
_NEARLY: dict[str, dict[str, Change]] = {
    "sigmoid": {
        "at least 0.0004": lambda v, args: record("maximum", v, 0.0004),
        "as a quotient of exponentials": lambda v, args: _quotient(args[0]),
    },
    "gelu_tanh": {"with 0.0457": lambda v, args: _gelu(v, args, 0.0457)},
    "exp": {"at most at 8": lambda v, args: record("exp", record("minimum", args[0], 8.0))},
}
_KINDS: dict[type, type] = {RowMean: RowSum, RowMax: RowSum, ColSum: ColMax, ColMax: ColSum}


def faulty(program: Program) -> Iterator[Edit]:
    """List every fault that the operators can make in a program."""
    nodes = program.graph.nodes
    for i, node in enumerate(nodes):
        yield from _at_node(program, i, node)
    for name, index in program.graph.outputs.items():
        if nodes[index].shape not in (Shape.WIDE, Shape.GATHERED):
            yield Edit("scale an output", f"{name} by 0.98", _FACTOR, {index: _scale(0.98)})
        if issubclass(kind := program.outputs[name], Reduction):
            other, faults = _KINDS.get(kind, RowMax), ("wrong_statistics", *_FACTOR)
            site = f"{name} to {other.__name__}"
            yield Edit("change a reduction", site, faults, outputs={name: other})
    for x, kind in program.operands.items():
        if kind in (ColVector, RowVector):
            yield other_axis(program, x)
    index_of = {n.name: i for i, n in enumerate(nodes) if n.op == "operand"}
    for x, y in itertools.combinations(program.operands, 2):
        if program.operands[x] is program.operands[y]:
            read = {index_of[x]: _read(y), index_of[y]: _read(x)}
            yield Edit("swap two operands", f"{x}, {y}", ("swapped_operands", *_UNKNOWN), read)


def other_axis(program: Program, x: str) -> Edit:
    """Declare a vector by row as one by column, or the reverse."""
    other = RowVector if program.operands[x] is ColVector else ColVector
    return Edit("declare the other axis", x, ("wrong_broadcast",), operands={x: other})


def _at_node(program: Program, i: int, node: Node) -> Iterator[Edit]:
    op, nodes = node.op, program.graph.nodes

    def edit(operator: str, faults: tuple[str, ...], change: Change, site: str = "") -> Edit:
        return Edit(operator, site or f"{op}#{i}", faults, {i: change})

    if op in ("add", "sub", "mul"):
        what = "factor" if op == "mul" else "term"
        for side in (0, 1) if OPS[op].commutative else (1,):
            missing = _operand_fault(program, node.args[side], "missing")
            keep: Change = lambda v, args, side=side: args[1 - side]
            yield edit(f"drop a {what}", missing, keep, f"{op}#{i}.{side}")
        doubled = _operand_fault(program, node.args[1], "doubled")
        yield edit(f"repeat a {what}", doubled, lambda v, args: record(op, v, args[1]))
    if op in ("sub", "div"):
        turned: Change = lambda v, args: record(op, args[1], args[0])
        yield edit("swap operands", (*_SIGN, *_UNKNOWN, *_FACTOR, "swapped_operands"), turned)
    if op == "even":
        swap: dict[int, Change] = {i: lambda v, args: pairs(args[0])[1]}
        if (odd := Node("odd", node.args, node.shape)) in nodes:
            swap[nodes.index(odd)] = lambda v, args: pairs(args[0])[0]
        yield Edit("swap a pair", f"{op}#{i}", ("swapped_pair", *_UNKNOWN), swap)
    for name in _ACTIVATIONS.get(op, ()):
        changed: Change = lambda v, args, name=name: record(name, *args)
        faults = ("wrong_operation", *_UNKNOWN, *_FACTOR, "wrong_sign", "extra_term", "overflow")
        yield edit("change an activation", faults, changed, f"{op}#{i} to {name}")
    for how, nearly in _NEARLY.get(op, {}).items():
        yield edit("change an activation a little", (), nearly, f"{op}#{i} {how}")
    if op in ("operand", "acc") and node.shape not in (Shape.INDEX, Shape.WIDE):
        for c in (1.001, 1.02, 2.0, -1.0):
            faults = (*_FACTOR, *{2.0: ["doubled_operand"], -1.0: _SIGN[:1]}.get(c, []))
            yield edit("scale a value", faults, _scale(c), f"{node.name or op} by {c}")
        for how, bounded in _BOUNDS.items():
            yield edit("bound a value", (), bounded, f"{node.name or op} {how}")
    if op == "const":
        for c in (1.05, 1.001):
            other: Change = lambda v, args, c=c: v.graph.const(c * node.value)
            site = f"{node.value:g} by {c}"
            yield edit("change a constant", ("wrong_constant", *_UNKNOWN, *_FACTOR), other, site)


def _operand_fault(program: Program, index: int, fault: str) -> tuple[str, ...]:
    """Name the faults of leaving out, or repeating, a node's value."""
    node = program.graph.nodes[index]
    term, named = {"missing": "missing_term", "doubled": "extra_term"}[fault], f"{fault}_operand"
    if node.op == "const":
        return (term, *_UNKNOWN, *_FACTOR)
    if node.op != "operand":
        return (term, *_UNKNOWN, named)
    # What a scalar does to an output may be what a constant does.
    return (named, *_FACTOR) if program.operands[node.name] is Scalar else (named, term)


def _scale(c: float) -> Change:
    return lambda v, args: v * c


def _read(name: str) -> Change:
    return lambda v, args: v.graph.add(Node("operand", (), v.shape, name))


def _nested(v: Value, args: list[Value]) -> Value | None:
    inner = v.graph.nodes[args[0].index]
    if inner.op != "mul":
        return None
    a, b = (Value(v.graph, i) for i in inner.args)
    return a * (b * args[1])


def _distributed(v: Value, args: list[Value]) -> Value | None:
    inner = v.graph.nodes[args[0].index]
    if inner.op not in ("add", "sub"):
        return None
    a, b = (Value(v.graph, i) * args[1] for i in inner.args)
    return record(inner.op, a, b)


def _over_pairs(v: Value, args: list[Value]) -> Value | None:
    inner, lane = v.graph.nodes[args[0].index], v.graph.nodes[v.index].op == "odd"
    if inner.op not in OPS:
        return None
    return record(inner.op, *(pairs(Value(v.graph, i))[lane] for i in inner.args))


def _quotient(x: Value) -> Value:
    e = record("exp", x)
    return e / (e + 1.0)


def _gelu(v: Value, args: list[Value], cubic: float = 0.044715) -> Value:
    x = args[0]
    inner = (x + x * x * x * cubic) * 0.7978845608028654
    return x * (record("tanh", inner) * 0.5 + 0.5)


REWRITES: dict[str, dict[str, Change]] = {
    "factors regrouped": {"mul": _nested},
    "factors distributed over sums": {"mul": _distributed},
    "pairs taken of each factor": {"even": _over_pairs, "odd": _over_pairs},
    "differences as sums": {"sub": lambda v, args: args[0] + -args[1]},
    "quotients as products": {"div": lambda v, args: args[0] * (1.0 / args[1])},
    "sigmoid by exp": {"sigmoid": lambda v, args: 1.0 / (record("exp", -args[0]) + 1.0)},
    "maximum by minimum": {"maximum": lambda v, args: -record("minimum", -args[0], -args[1])},
    "absolute by maximum": {"absolute": lambda v, args: record("maximum", args[0], -args[0])},
    "gelu_tanh spelled out": {"gelu_tanh": _gelu},
}
"""Other ways to write an operation: by its name, what takes its place."""


def rewritten(program: Program) -> Iterator[tuple[str, Program]]:
    """List every rewrite that applies to a program, made wherever it does."""
    nodes = program.graph.nodes
    for name, rules in REWRITES.items():
        changes = {i: rules[node.op] for i, node in enumerate(nodes) if node.op in rules}
        if (other := Edit(name, "", changes=changes).apply(program)) is not None:
            yield name, other
