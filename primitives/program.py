"""A `Program`, where all readings start; `@epilogue` makes one of Python.

A text is no function: `reader.py` makes programs of it, and runs nothing.
"""

from __future__ import annotations

import hashlib
import inspect
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Graph, Node, Shape, Value
from coda_agent.primitives.groups import check, spans
from coda_agent.primitives.kinds import Operand, Output
from coda_agent.primitives.operation import PLACED
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.reductions import Reduction
from coda_agent.primitives.resources import (
    OPERAND_KINDS,
    OUTPUT_KINDS,
    AddTile,
    OddRows,
    WideTile,
)

if TYPE_CHECKING:
    import torch

# Compiling takes 28 s at 195 operations and 126 s at 771; the largest accepted program has 19.
MAX_NODES = 512


@dataclass(frozen=True)
class Program:
    """An epilogue program: declared resources and the graph that computes the outputs.

    Attributes:
        name: The function's name.
        doc: Its docstring.
        operands: Operand name to annotation class, in signature order.
        outputs: Output name to kind class, in declaration order.
        graph: What it computes.
    """

    name: str
    doc: str
    operands: Mapping[str, type[Operand]]
    outputs: Mapping[str, type[Output]]
    graph: Graph

    @cached_property
    def paired(self) -> bool:
        """Whether the program works on adjacent column pairs of the accumulator."""
        return any(n.shape.half_width for n in self.graph.nodes)

    @cached_property
    def wide(self) -> bool:
        """Whether the program reads and writes double-width tiles."""
        return any(n.shape is Shape.WIDE for n in self.graph.nodes)

    @cached_property
    def accumulated(self) -> str | None:
        """The output that is added to what its buffer holds, if any."""
        return next((o for o, kind in self.outputs.items() if kind.accumulates), None)

    @cached_property
    def spread(self) -> str | None:
        """The operand that has B's odd rows, where they lie apart from the even ones."""
        return next((o for o, kind in self.operands.items() if kind is OddRows), None)

    def columns(self, b: torch.Tensor) -> int:
        """Find N of what is given for B."""
        return b.shape[0] * (2 if self.spread else 1)

    @cached_property
    def reductions(self) -> dict[str, type[Reduction]]:
        return {k: v for k, v in self.outputs.items() if issubclass(v, Reduction)}

    @cached_property
    def group(self) -> int:
        """Columns of its widest group; 0 without. N is a multiple.

        It takes a statistic of such a group, or stores one element of it. A tile's width is a
        multiple, too.
        """
        stored = (getattr(kind, "width", 0) for kind in self.outputs.values())
        return max([*spans(self.graph).values(), *stored], default=0)

    @cached_property
    def placed(self) -> list[int]:
        """Nodes that follow from an element's place."""
        return [i for i, n in enumerate(self.graph.nodes) if n.op in PLACED]

    @cached_property
    def digest(self) -> str:
        """SHA-256 of what is computed, whatever the tensors are called.

        The order of operands and outputs enters, that of commutative arguments does not.
        """
        position = {name: i for i, name in enumerate(self.operands)}
        keys: list[str] = []
        for n in self.graph.nodes:
            args = [keys[a] for a in n.args]
            if n.args and operation(n.op).commutative:
                args.sort()
            leaf = f"{position.get(n.name, '')}|{n.value!r}|{n.shape.value}"
            keys.append(_sha(f"{n.op}|{leaf}|{','.join(args)}"))
        parts = [f"{k.__name__}={keys[self.graph.outputs[n]]}" for n, k in self.outputs.items()]
        return _sha(";".join([*(k.__name__ for k in self.operands.values()), *parts]))

    def without(self, outputs: Collection[str]) -> Program:
        """Leave out the computation of these outputs.

        Raises:
            ProgramError: what is left does not read every operand, or the accumulator.
        """
        graph = Graph(self.graph.nodes, {})
        left = {o: kind for o, kind in self.outputs.items() if o not in outputs}
        found = {o: Value(graph, self.graph.outputs[o]) for o in left}
        return finish(replace(self, outputs=left, graph=graph), found)

    def to_dict(self) -> dict[str, Any]:
        """Write the program as JSON-ready data, which crosses process boundaries."""
        return {
            "name": self.name,
            "doc": self.doc,
            "operands": {k: v.__name__ for k, v in self.operands.items()},
            "outputs": {k: [v.__name__, self.graph.outputs[k]] for k, v in self.outputs.items()},
            "nodes": [
                [n.op, list(n.args), n.shape.name, n.name, n.value] for n in self.graph.nodes
            ],
        }

    @classmethod
    def from_dict(cls, data: Mapping[str, Any]) -> Program:
        """Rebuild what `to_dict` gave, by every rule of the language.

        The data may come from another process or machine. Shapes are derived anew.

        Raises:
            ProgramError: it is no program's record.
        """
        try:
            return _rebuilt(data)
        except (KeyError, TypeError, ValueError, AttributeError, IndexError) as error:
            raise ProgramError("the record of a program is malformed") from error


def _rebuilt(data: Mapping[str, Any]) -> Program:
    kinds = OPERAND_KINDS | {OddRows.__name__: OddRows}
    operands = {o: kinds[k] for o, k in data["operands"].items()}
    outputs = {o: OUTPUT_KINDS[k] for o, (k, _) in data["outputs"].items()}
    for name in (data["name"], *operands, *outputs):
        if not name.isidentifier():
            raise ProgramError(f"{name!r} is no name")
    graph = Graph()
    values: list[Value] = []
    for op, args, shape, name, value in data["nodes"]:
        if any(type(a) is not int or not 0 <= a < len(values) for a in args):
            raise ProgramError(f"operation {op!r} refers to a value that does not precede it")
        made = _node(graph, op, [values[a] for a in args], name, float(value), operands)
        if made.index != len(values) or made.shape is not Shape[shape]:
            raise ProgramError(f"operation {op!r} is not what it says of itself")
        values.append(made)
    if any(type(i) is not int or not 0 <= i < len(values) for _, i in data["outputs"].values()):
        raise ProgramError("an output of a serialised program refers to no value")
    result = {o: values[i] for o, (_, i) in data["outputs"].items()}
    return finish(Program(data["name"], str(data["doc"]), operands, outputs, graph), result)


def _node(
    graph: Graph,
    op: str,
    args: list[Value],
    name: str,
    value: float,
    operands: Mapping[str, type[Operand]],
) -> Value:
    """Record one node of a serialised program, as the language itself would."""
    match op, args:
        case "acc", []:
            return graph.add(Node("acc", (), Shape.TILE))
        case "operand", []:
            return graph.add(Node("operand", (), operands[name].varies, name))
        case "const", []:
            return graph.const(value)
    known = operation(op)
    if len(args) != known.arity:
        raise ProgramError(f"operation {op!r} has {len(args)} arguments")
    return known.call(*args)


def _sha(text: str) -> str:
    return hashlib.sha256(text.encode()).hexdigest()


def epilogue(**outputs: type[Output]) -> Callable[[Callable[..., object]], Program]:
    """Declare an epilogue program.

    The decorated function takes the fp32 accumulator first, then operands annotated with a kind of
    `OPERAND_KINDS`, and returns a dict with exactly the outputs declared here as a kind of
    `OUTPUT_KINDS` (both in resources.py).

    Raises:
        ProgramError: a resource is misdeclared, an output is never written, an operand never used,
            or widths disagree.
    """
    _check_outputs(outputs)

    def decorate(fn: Callable[..., object]) -> Program:
        doc = inspect.cleandoc(fn.__doc__ or "")
        program, values = begin(fn.__name__, doc, _parameters(fn), outputs)
        return finish(program, fn(**values))

    return decorate


def begin(
    name: str, doc: str, parameters: Mapping[str, Any], outputs: Mapping[str, Any]
) -> tuple[Program, dict[str, Value]]:
    """Open a program that computes nothing yet.

    Args:
        parameters: Their kinds, by name; that of the first, the accumulator, does not matter.
        outputs: Their kinds, by name.

    Returns:
        The program, and the value of each parameter.
    """
    _check_outputs(outputs)
    acc, *names = [*parameters] or [""]
    if acc != "acc":
        raise ProgramError(f"{name}: the first parameter must be acc, the accumulator")
    operands = {o: parameters[o] for o in names}
    for o, kind in operands.items():
        if kind not in OPERAND_KINDS.values():
            raise ProgramError(
                f"{name}: operand {o!r} is annotated {_label(kind)}, expected one of "
                f"{', '.join(OPERAND_KINDS)}"
            )
    if clash := sorted(set(outputs) & set(operands)):
        raise ProgramError(f"{name}: {clash[0]!r} is an operand and an output")
    graph = Graph()
    values = {o: graph.add(Node("operand", (), kind.varies, o)) for o, kind in operands.items()}
    values[acc] = graph.add(Node("acc", (), Shape.TILE))
    return Program(name, doc, operands, dict(outputs), graph), values


def _check_outputs(outputs: Mapping[str, object]) -> None:
    if not outputs:
        raise ProgramError("@epilogue declares no output", hint="e.g. @epilogue(O=Tile)")
    for name, kind in outputs.items():
        if kind not in OUTPUT_KINDS.values():
            raise ProgramError(
                f"output {name!r} is declared as {_label(kind)}, "
                f"expected one of {', '.join(OUTPUT_KINDS)}"
            )


def finish(traced: Program, result: object) -> Program:
    """Close a program: `result` gives its outputs, which are checked.

    Raises:
        ProgramError: an output is never written, an operand never used, or a shape disagrees.
    """
    _bind_outputs(traced, result)
    program = replace(traced, graph=traced.graph.prune())
    name, nodes = program.name, program.graph.nodes
    if len(nodes) > MAX_NODES:
        raise ProgramError(f"{name} has {len(nodes)} operations, at most {MAX_NODES}")
    read = {x.name for x in nodes}
    unused = [o for o, kind in program.operands.items() if kind is not OddRows and o not in read]
    if unused:
        raise ProgramError(f"{name}: operand {unused[0]!r} is never used")
    if not any(n.op == "acc" for n in nodes):
        raise ProgramError(f"{name}: no output depends on the accumulator")
    _check_stores(program)
    check(program.graph, program.operands, program.wide)
    return program


def _parameters(fn: Callable[..., object]) -> dict[str, object]:
    """Read a function's annotations: kinds, also where they are texts."""
    kinds = dict[str, object]()
    for p in inspect.signature(fn).parameters.values():
        kind: Any = p.annotation
        if isinstance(kind, str):  # `from __future__ import annotations`; a text is never evaluated
            kind = OPERAND_KINDS.get(kind)
        kinds[p.name] = None if kind is p.empty else kind
    return kinds


def _bind_outputs(traced: Program, result: object) -> None:
    name, outputs = traced.name, traced.outputs
    if not isinstance(result, dict):
        raise ProgramError(f"{name} returned {type(result).__name__}, expected a dict of outputs")
    missing = [o for o in outputs if o not in result]
    if missing:
        raise ProgramError(f"{name}: output {missing[0]!r} is declared but never written")
    extra = [o for o in result if o not in outputs]
    if extra:
        raise ProgramError(
            f"{name}: returned {extra[0]!r}, which is not a declared output",
            hint=f"declared: {', '.join(outputs)}",
        )
    for output, kind in outputs.items():
        value = result[output]
        if not isinstance(value, Value):
            raise ProgramError(
                f"{name}: output {output!r} is {type(value).__name__}, expected a value"
            )
        if value.shape not in kind.values:
            raise ProgramError(
                f"{name}: output {output!r} is declared {kind.__name__} but its value is "
                f"{value.shape.value}, expected {' or '.join(s.value for s in kind.values)}"
            )
        traced.graph.outputs[output] = value.index


def _check_stores(program: Program) -> None:
    kinds = [*program.operands.values()], [*program.outputs.values()]
    wide = [side.count(WideTile) for side in kinds]
    if program.wide and (wide != [1, 1] or program.paired):
        raise ProgramError(
            f"{program.name} has {wide[0]} WideTile operands and {wide[1]} outputs"
            f"{' and pairs the accumulator' * program.paired}, expected one of each",
            hint="a wide tile takes the place of the accumulator's own pairs",
        )
    if (count := kinds[1].count(AddTile)) > 1 or (count and program.wide):
        raise ProgramError(
            f"{program.name} has {count} AddTile outputs, expected one, and no WideTile beside it"
        )


def _label(kind: object) -> str:
    return getattr(kind, "__name__", "nothing" if kind is None else repr(kind))
