"""Programs of products that share A as one, side by side."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace

import torch
from torch import fx

from coda_agent.agent.authors.composer.canonical import canonical
from coda_agent.agent.authors.composer.emit import program_of
from coda_agent.agent.authors.composer.expression import Expr, by_columns, joins_columns, walk
from coda_agent.agent.authors.composer.ports import Port, side_by_side
from coda_agent.agent.authors.composer.problem import Refusal, Rewritten
from coda_agent.agent.authors.composer.retrace import SLICE, plain
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.program import Program

_FOR_ROWS, _REPEATED = ("Scalar", "ColVector"), "PositionTable"


@dataclass(frozen=True)
class Composition:
    """A subgraph as a kernel.

    Attributes:
        a: Where A (M, K) comes from; B (N, K) of `b`.
        operands: Where the program's operands come from, by name.
        outputs: Where its outputs go, by the name of the graph's output; each names the program's.
        extents: M, N and K of the call.
    """

    program: Program
    a: Port
    b: Port
    operands: Mapping[str, Port]
    outputs: Mapping[str, Port]
    extents: Mapping[str, int]
    rewritten: Rewritten

    @property
    def weights(self) -> tuple[fx.Node, ...]:
        """Where the rows of B are."""
        odd = self.operands.get(self.program.spread or "")
        return (*self.b.nodes, *(odd.nodes if odd else ()))


def joined(parts: Sequence[Composition]) -> Composition:
    """One program with the columns of several side by side.

    Raises:
        Refusal: they do not fit into one; names an output.
    """
    first = parts[0]
    starts = [sum(p.extents["N"] for p in parts[:i]) for i in range(len(parts))]
    total = starts[-1] + parts[-1].extents["N"]
    operands, kinds, values = _operands(parts, starts, total)
    outputs: dict[str, Port] = {}
    stored: dict[str, list[tuple[float, Expr]]] = {}
    for part, start, expressions in zip(parts, starts, values, strict=True):
        stop = start + part.extents["N"]
        for i, (graph_name, port) in enumerate(part.outputs.items()):
            if part.rewritten.outputs[port.name] != "Tile":
                kind = part.rewritten.outputs[port.name]
                message = f"output {graph_name!r} is a {kind} of one of several products"
                raise Refusal(message, "make a kernel of each", port.node)
            name = [*first.outputs][i] if i < len(first.outputs) else graph_name
            stored.setdefault(name, []).append((stop, expressions[port.name]))
            back = ((SLICE, (1, start, stop)), *port.back)
            outputs[graph_name] = replace(port, name=name, back=back)
    chosen = {x: by_columns(exprs) for x, exprs in stored.items()}
    chosen = dict(zip(chosen, canonical([*chosen.values()]), strict=True))
    types = {x: {p.dtype for p in outputs.values() if p.name == x} for x in chosen}
    if any(len(t) > 1 for t in types.values()):
        raise Refusal("stores parts of one product in several types", "make a kernel of each")
    rewritten = Rewritten(first.rewritten.name, kinds, dict.fromkeys(chosen, "Tile"), chosen)
    b = side_by_side("B", [p.b for p in parts])
    extents = {**first.extents, "N": total}
    try:
        program = program_of(rewritten)
    except ProgramError as error:
        raise Refusal(error.message, error.hint) from None
    return Composition(program, first.a, b, operands, outputs, extents, rewritten)


def _operands(
    parts: Sequence[Composition], starts: Sequence[int], total: int
) -> tuple[dict[str, Port], dict[str, str], list[dict[str, Expr]]]:
    """Operands of the whole, their kinds, and each part's expressions of those."""
    operands: dict[str, Port] = {}
    kinds: dict[str, str] = {}
    vectors = [
        [x for x, kind in p.rewritten.operands.items() if kind == "RowVector"] for p in parts
    ]
    for i, names in enumerate(zip(*vectors, strict=False)):
        ports = [p.operands[x] for p, x in zip(parts, names, strict=True)]
        name = vectors[0][i]
        operands[name] = side_by_side(name, ports)
        kinds[name] = "RowVector"
    values: list[dict[str, Expr]] = []
    for part, start, own in zip(parts, starts, vectors, strict=True):
        if len(own) != len(vectors[0]):
            raise Refusal(
                "has a vector over the columns of some of several products",
                "make a kernel of each",
                part.operands[own[-1]].node if own else None,
            )
        names = dict(zip(own, vectors[0], strict=True))
        for name, kind in part.rewritten.operands.items():
            if name in own:
                continue
            if kind == "Tile":
                kind = _REPEATED  # of all columns of its part, such as one head
            port, width = part.operands[name], _width(part, name, kind)
            if not width or start % width or total % width:
                message = f"reads {name!r}, a {kind}, in some of several products"
                raise Refusal(message, "make a kernel of each", port.node)
            if kinds.setdefault(name, kind) != kind or operands.get(name, port) != port:
                # In another order than another part reads it.
                names[name] = f"{name}_{starts.index(start)}"
                port = replace(port, name=names[name])
                kinds[port.name] = kind
            operands[port.name] = port
        for expr in walk([*part.rewritten.values.values()]):
            if expr.op in ("column_index", "philox_uniform") or start % _step(expr):
                raise Refusal("counts the columns of one of several products", "")
        values.append({x: renamed(e, names) for x, e in part.rewritten.values.items()})
    return operands, kinds, values


def _width(part: Composition, name: str, kind: str) -> int:
    """After how many columns an operand is read again, or 0."""
    if kind in _FOR_ROWS:
        return 1
    if kind not in (_REPEATED, "SampleTable", "PositionPairs"):
        return 0
    node = part.operands[name].node
    if node is None:
        return 0
    shape = [plain(x) for x in node.meta["val"].shape]
    columns = part.operands[name].canonical(torch.empty(shape, device="meta")).shape[-1]
    return columns * (2 if kind == "PositionPairs" else 1)


def _step(expr: Expr) -> int:
    """Of how many adjacent columns an operation takes account."""
    if joins_columns(expr):
        return int(expr.value)
    return 2 if expr.op in ("even", "odd", "interleave") else 1


def renamed(root: Expr, names: Mapping[str, str]) -> Expr:
    """An expression with other names of operands."""
    values: dict[Expr, Expr] = {}
    for expr in walk([root]):
        if expr.op == "operand" and expr.name in names:
            values[expr] = replace(expr, name=names[expr.name])
        elif expr.args:
            args = tuple(values[a] for a in expr.args)
            values[expr] = expr if args == expr.args else replace(expr, args=args)
        else:
            values[expr] = expr
    return values[root]
