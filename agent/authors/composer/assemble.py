"""From canonical expressions to a program, by the vocabulary itself."""

from __future__ import annotations

import functools
import math
import operator
from collections.abc import Mapping
from typing import Any

from coda_agent import primitives
from coda_agent.agent.authors.composer.expression import Expr, negative, uses, walk
from coda_agent.agent.authors.composer.problem import Rewritten
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.operation import PLACED
from coda_agent.primitives.program import Program, begin, finish
from coda_agent.primitives.resources import OPERAND_KINDS, OUTPUT_KINDS

# float32's largest number, whose own digits are above the largest that a program may hold.
_LARGEST = 3.4028234663852886e38


def assemble(rewritten: Rewritten) -> Program:
    """Build the program of canonical expressions, as their text would.

    Raises:
        ProgramError: the language has no such program.
    """
    operands = {name: OPERAND_KINDS[kind] for name, kind in rewritten.operands.items()}
    outputs = {name: OUTPUT_KINDS[kind] for name, kind in rewritten.outputs.items()}
    program, given = begin(rewritten.name, "", {"acc": None, **operands}, outputs)
    # A reduction is its argument, declared as reduced.
    stored = {k: e.args[0] if e.reduction else e for k, e in rewritten.values.items()}
    shared = uses([*stored.values()])
    values: dict[Expr, Any] = {}
    for expr in walk([*stored.values()]):
        if expr.op in ("acc", "operand", "index"):
            values[expr] = given[expr.name]
        elif expr.op == "add":
            values[expr] = _sum(expr, values, shared)
        else:
            values[expr] = _call(expr, [values[a] for a in expr.args], given["acc"])
    return finish(program, {name: values[expr] for name, expr in stored.items()})


def number(value: float) -> float:
    """A constant as a program holds it; its literals are finite.

    Raises:
        ProgramError: it is not a number.
    """
    if math.isnan(value):
        message = f"a program cannot hold the constant {value}"
        raise ProgramError(message, hint="compute it from finite numbers, or give it as an input")
    return math.copysign(3.4028234e38, value) if abs(value) == _LARGEST else value


def _call(expr: Expr, args: list[Any], acc: Any) -> Any:
    """What an operation gives of values that the program has."""
    op = expr.op
    if op == "const":
        value = number(expr.value)
        infinite = primitives.log(0.0) if math.isinf(value) else 0.0
        return infinite if value < 0 and infinite else -infinite if infinite else value
    if op == "mul":
        return functools.reduce(operator.mul, args)
    if op in ("div", "neg"):
        return operator.truediv(*args) if op == "div" else -args[0]
    if op in ("even", "odd"):
        return primitives.pairs(args[0])[op == "odd"]
    if op.startswith("d_"):
        return primitives.derivative(getattr(primitives, op[2:]), args[0])
    if op not in primitives.__all__:
        raise ProgramError(
            f"{op!r} has no counterpart among the primitives", hint="write it otherwise"
        )
    function = getattr(primitives, op)
    if op.startswith("group_") or op == "rotate_half":
        return function(args[0], int(expr.value))
    return function(acc, *args) if op in PLACED else function(*args)


def _sum(expr: Expr, values: Mapping[Expr, Any], shared: Mapping[Expr, int]) -> Any:
    """A sum; a negative term used once takes its sign along."""
    first, *rest = expr.args
    total = values[first]
    for term in rest:
        if negative(term) and (shared[term] == 1 or not term.args):
            total = total - _opposite(term, values)
        else:
            total = total + values[term]
    return total


def _opposite(term: Expr, values: Mapping[Expr, Any]) -> Any:
    """The value of a negative term without its sign."""
    if term.op == "neg":
        return values[term.args[0]]
    if term.op == "const":
        return -term.value
    first, *rest = term.args
    above = _opposite(first, values)
    by = operator.mul if term.op == "mul" else operator.truediv
    return functools.reduce(by, (values[a] for a in rest), above)
