"""B's even and odd rows in two tensors, as two weights lie in a model."""

from __future__ import annotations

from dataclasses import replace

from coda_agent.primitives.graph import Value
from coda_agent.primitives.operation import Term
from coda_agent.primitives.pairwise import interleave, pairs
from coda_agent.primitives.program import Program, begin, finish
from coda_agent.primitives.ptx import operation
from coda_agent.primitives.resources import OddRows


def spread(program: Program) -> Program:
    """Make a program take B's odd rows by an operand of their own, its last."""
    name = "odd_rows"
    while name in {*program.operands, *program.outputs}:
        name += "_"
    return replace(program, operands={**program.operands, name: OddRows})


def packed(program: Program) -> Program:
    """Make a program take all of B as one tensor: the inverse of `spread`."""
    whole = {o: kind for o, kind in program.operands.items() if kind is not OddRows}
    return replace(program, operands=whole) if program.spread else program


def exchanged(program: Program) -> Program:
    """Make a program that is spread take B's odd rows for its even ones, and the reverse."""
    parameters = {"acc": None, **packed(program).operands}
    opened, values = begin(program.name, program.doc, parameters, program.outputs)
    even, odd = pairs(values["acc"])

    def apply(op: str, *args: Term) -> Term:
        return operation(op).call(*args)

    found = program.graph.replay(interleave(odd, even), values, apply)
    results = {
        o: x if isinstance(x, Value) else opened.graph.const(x)
        for o, x in ((o, found[i]) for o, i in program.graph.outputs.items())
    }
    return replace(finish(opened, results), operands=program.operands)
