"""What an operation is: one record, for every reading and the judge."""

from __future__ import annotations

import inspect
from collections.abc import Callable
from dataclasses import dataclass
from enum import IntEnum
from functools import wraps
from typing import Any, Literal, NamedTuple, NoReturn, TypeAlias, TypeVar

from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import Operand, Value, record

Term: TypeAlias = "torch.Tensor | float"
"""What an operation means something on in torch; one of its terms is a tensor."""
Decorator: TypeAlias = "Callable[[Callable[..., torch.Tensor]], Callable[..., Any]]"
Argument = TypeVar("Argument", Value, "torch.Tensor", float)
"""What a function of atoms is called with."""


class Degree(IntEnum):
    """How a value depends on the accumulator."""

    CONSTANT = 0
    LINEAR = 1
    AFFINE = 2
    NONLINEAR = 3


class Edge(NamedTuple):
    """Whether a value past the edge is 0, and whether finite."""

    zero: bool
    finite: bool


def kept(*values: Edge) -> Edge:
    """Give the edge of what keeps zeros 0 and finite numbers finite."""
    return Edge(all(v.zero for v in values), all(v.finite for v in values))


def unknown(*_: Edge) -> Edge:
    """Give the edge of an operation that promises nothing."""
    return Edge(False, False)


def additive(*values: Degree) -> Degree:
    """Give the degree of a sum, a negation or a move."""
    return values[0] if len({*values}) == 1 else max(*values, Degree.AFFINE)


def nonlinear(*values: Degree) -> Degree:
    """Give the degree of any other function."""
    return Degree.CONSTANT if max(values) is Degree.CONSTANT else Degree.NONLINEAR


@dataclass(frozen=True, slots=True)
class Op:
    """One operation of the vocabulary.

    Attributes:
        name: Its name in programs and graphs.
        torch: Meaning on torch tensors; the definition of the operation. On float32, one that a
            program brought along runs its instructions.
        cute: Lowering on CuTeDSL Float32 scalars.
        arity: How many arguments it takes.
        call: What a program calls: records it on values, computes it on tensors and numbers.
        flops: Floating-point operations an element, counting a transcendental as one.
        commutative: Whether the two arguments may change places.
        packed: Whether `cute` also takes packed f32x2 lanes (SM100).
        derivative: Its slope, by the chain rule, from its value, its arguments and their slopes;
            None where it has none. `derivatives.py` has what rules are written with.
        edge: What is known past the last row or column, from the `Edge`s of its arguments.
        degree: Its degree in the accumulator, from those of its arguments.
        error: What the error of its approximation on a GPU scales with: its range of about 1, its
            argument or its result. Empty where it is arithmetic, rounded once.
        aten: Names of torch functions that are this operation. A reference's call of one becomes
            the operation, but where the composer has a meaning of its own for the name.
    """

    name: str
    torch: Callable[..., torch.Tensor]
    cute: Callable[..., Any]
    arity: int
    call: Callable[..., Any]
    flops: int = 1
    commutative: bool = False
    packed: bool = False
    derivative: Callable[..., Operand] | None = None
    edge: Callable[..., Edge] = unknown
    degree: Callable[..., Degree] = nonlinear
    error: Literal["", "range", "argument", "result"] = ""
    aten: tuple[str, ...] = ()


OPS: dict[str, Op] = {}
"""Elementwise operations by name; each enters where it is defined."""

MOVES: dict[str, Op] = {}
"""Operations that move elements and compute nothing; `cute` takes their lanes as they come."""


GROUPS: dict[str, Op] = {}
"""Statistics of groups of adjacent columns; `cute` is never called, since they need the others."""


PLACED: dict[str, Op] = {}
"""What follows from an element's place; `cute` is never called, since values do not tell it."""


def elementwise(cute: Callable[..., Any], **facts: Any) -> Decorator:
    """Define an atom by its function of torch, its lowering, and `facts`."""

    def decorate(fn: Callable[..., torch.Tensor]) -> Callable[..., Any]:
        name, signature = fn.__name__, inspect.signature(fn)

        @wraps(fn)
        def call(*args: Operand | Term, **kwargs: Operand | Term) -> Operand | Term:
            try:
                values = signature.bind(*args, **kwargs).args
            except TypeError as error:
                hint = f"{name}({', '.join(signature.parameters)})"
                raise ProgramError(f"{name}(): {error}", hint=hint) from None
            if any(isinstance(v, Value) for v in values):
                return record(name, *values)
            return _constant(fn, values) if all(_is_number(v) for v in values) else fn(*values)

        OPS[name] = Op(name, fn, cute, len(signature.parameters), call, **facts)
        return call

    return decorate


def untraced(*_: object) -> NoReturn:
    """Stand for the lowering of what an element's own values do not give."""
    raise AssertionError("it needs other elements, or its place")


def as_tensors(*values: Term) -> tuple[torch.Tensor, ...]:
    """Make numbers among `values` tensors like the first tensor."""
    like = next(v for v in values if isinstance(v, torch.Tensor))
    return tuple(torch.as_tensor(v, dtype=like.dtype, device=like.device) for v in values)


def _is_number(x: object) -> bool:
    return isinstance(x, (int, float)) and not isinstance(x, bool)


def _constant(fn: Callable[..., torch.Tensor], values: tuple[float, ...]) -> float:
    """Compute an operation of numbers alone, in float64."""
    return float(fn(*(torch.tensor(float(v), dtype=torch.float64) for v in values)))
