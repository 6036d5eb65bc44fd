"""The spec format: a Markdown file, which becomes a frozen `Spec`.

- Front matter (YAML between `---` lines) declares names, shapes, element types and draws.
- The prose carries the mathematics, for people and for authors.
- One fenced block opened by "```python reference" defines `reference(...)`, plain PyTorch; where a
  user would run something else for speed, `baseline(...)` beside it is what kernels are timed
  against.
"""

from __future__ import annotations

import ast
import itertools
import math
import operator
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Annotated, Any, Literal, NamedTuple

from pydantic import BaseModel, ConfigDict, Field, PlainValidator, model_validator

from coda_agent.primitives.errors import SpecError
from coda_agent.primitives.resources import steps
from coda_agent.specs.layout import ENTRY, Layout, extent, factors, shown
from coda_agent.specs.names import functions_in

DTYPES = {
    "bfloat16": 2, "float16": 2, "float32": 4, "float8_e4m3fn": 1, "int32": 4, "int64": 8
}  # fmt: skip
"""Bytes of an element of each type."""

_OPERATORS: dict[type[ast.AST], Callable[[float, float], float]] = {
    ast.Add: operator.add,
    ast.Sub: operator.sub,
    ast.Mult: operator.mul,
    ast.Div: operator.truediv,
    ast.Pow: math.pow,
}
_DRAW_ARGUMENTS = {"normal": 1, "constant": 1, "uniform": 2, "integers": 2}


def evaluate(expression: float | str, sizes: Mapping[str, int]) -> float:
    """Evaluate a number, or small arithmetic over dims such as `K**-0.5`.

    Raises:
        ValueError: Anything but numbers, dims, + - * / ** and parentheses, or no real value.
    """

    def visit(node: ast.AST) -> float:
        match node:
            case ast.Constant(value=int() | float() as number):
                return float(number)
            case ast.Name(id=name) if name in sizes:
                return float(sizes[name])
            case ast.BinOp(left=left, op=op, right=right) if type(op) in _OPERATORS:
                return _OPERATORS[type(op)](visit(left), visit(right))
            case ast.UnaryOp(op=ast.USub(), operand=operand):
                return -visit(operand)
        raise ValueError(f"{ast.unparse(node)} is not allowed")

    try:
        # Bounded, so that nesting cannot exhaust the stack.
        if len(str(expression)) > 100:
            raise ValueError("it is too long")
        value = visit(ast.parse(str(expression).strip(), mode="eval").body)
        if not math.isfinite(value):
            raise ValueError("it is not finite")
        return value
    except (SyntaxError, ValueError, ArithmeticError) as error:
        raise ValueError(
            f"{expression!r} has no value ({error}); expected numbers, dims"
            f" ({', '.join(sizes)}) and + - * / **"
        ) from None


class Shape(NamedTuple):
    """A tensor's shape in ints and dims: "N", "N/2", "2*N", "B*S"."""

    parameter: str
    """The parameter the shape depends on; empty when there is one shape only."""
    cases: dict[str, tuple[int | str, ...]]
    """Shape per value of the parameter; the only key is "" when it depends on none."""


class Draw(NamedTuple):
    """How values are drawn, by numbers or expressions over dims."""

    kind: Literal["normal", "uniform", "constant", "integers"]
    args: tuple[float | str, ...]
    """normal: std; uniform: lo, hi; constant: the value; integers: lo, hi (hi excluded)."""


def _parse_entries(raw: Any) -> tuple[int | str, ...]:
    entries = raw if isinstance(raw, list) else [raw]
    for entry in entries:
        good = isinstance(entry, str) and all(map(ENTRY.fullmatch, factors(entry)))
        if entry is raw or not (good or (type(entry) is int and entry > 0)):
            raise ValueError(
                f"expected a list of dims, DIM/INT, INT*DIM and positive ints, got {shown(raw)}"
            )
    return tuple(entries)


def _parse_shape(raw: Any) -> Shape:
    if not isinstance(raw, dict):
        return Shape("", {"": _parse_entries(raw)})
    cases = {value: _parse_entries(raw[value]) for value in raw if value != "parameter"}
    if not isinstance(raw.get("parameter"), str) or not cases:
        raise ValueError("a shape by cases needs `parameter: NAME` and one list per value of it")
    return Shape(raw["parameter"], cases)


def _parse_draw(raw: Any) -> Draw:
    given: Any = {"normal": {"std": 1}} if raw == "normal" else raw
    if isinstance(given, dict) and len(given) == 1:
        kind, value = next(iter(given.items()))
        if kind == "normal":
            value = value["std"] if isinstance(value, dict) and [*value] == ["std"] else []
        args: list[Any] = value if isinstance(value, list) else [value]
        numbers = all(isinstance(arg, int | float | str) for arg in args)
        if numbers and len(args) == _DRAW_ARGUMENTS.get(kind):
            return Draw(kind, tuple(args))
    raise ValueError(
        "expected `normal`, `normal: {std: X}`, `uniform: [LO, HI]`, `constant: X` or"
        f" `integers: [LO, HI]`, got {shown(raw)}"
    )


def _parse_domain(raw: Any) -> tuple[float, float]:
    if raw == "positive":
        return 0.0, math.inf
    if isinstance(raw, list) and len(raw) == 2 and all(type(x) in (int, float) for x in raw):
        if -math.inf < raw[0] < raw[1] < math.inf:
            return float(raw[0]), float(raw[1])
    raise ValueError(f"expected `positive` or [LO, HI], two numbers, got {shown(raw)}")


def _parse_gemm(raw: Any) -> tuple[str, ...]:
    sides = [side.split() if isinstance(side, str) else side for side in raw or ()]
    names = [x for side in sides if isinstance(side, list) for x in side or [None]]
    if len(sides) != 2 or len(names) < 2 or not all(isinstance(x, str) for x in names):
        raise ValueError(
            f"expected two inputs, each of which may be a list of some, got {shown(raw)}"
        )
    return tuple(" ".join(side) for side in sides)


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)


class Dim(_Model):
    """A symbolic extent."""

    multiple_of: int = Field(default=1, ge=1)
    only: int | None = None
    """The one extent that it has, if any."""


class Output(_Model):
    """A tensor the kernel writes; a list alone is its shape."""

    shape: Annotated[Shape, PlainValidator(_parse_shape)]
    dtype: str = "T"

    @model_validator(mode="before")
    @classmethod
    def _shape_alone(cls, raw: object) -> object:
        return {"shape": raw} if isinstance(raw, list) else raw


class Input(Output):
    """A tensor, or with shape [] a scalar, that the kernel reads."""

    draw: Annotated[Draw, PlainValidator(_parse_draw)] = Draw("normal", (1.0,))
    domain: Annotated[tuple[float, float] | None, PlainValidator(_parse_domain)] = None
    """Smallest and largest value that the function is meant for; (0, inf) leaves out 0 itself.
    None: any number."""


class InPlace(_Model):
    """An output that starts from an input, and may overwrite it."""

    output: str
    input: str
    when: dict[str, str] = {}
    """Static parameters' values that select the variants; all of them when empty."""


class Tolerance(_Model):
    """The judge's bound: `multiple` times PyTorch's own error against the exact run."""

    multiple: float = Field(gt=0)


class Header(_Model):
    """The front matter; `defaults.py` completes what is empty."""

    name: str
    level: Literal["compose", "reparameterise", "extend"] = "compose"
    summary: str = ""
    types: dict[str, tuple[str, ...]] = {}
    dims: dict[str, Dim] = {}
    gemm: Annotated[tuple[str, ...], PlainValidator(_parse_gemm)]
    """A and B; of several that lie side by side, their names with a space between."""
    pairs: Literal["adjacent", "halves"] = "adjacent"
    """Which columns of the product are a pair: 2j and 2j + 1, or j and j + N/2."""
    split: tuple[str, ...] = ()
    """Outputs that are consecutive columns of the product, where their shapes leave it open."""
    scales: dict[str, float] = {}
    """What weights of a sum of products are multiplied by as they are packed: powers of two."""
    parameters: dict[str, tuple[str, ...]] = {}
    inputs: dict[str, Input]
    outputs: dict[str, Output] = Field(min_length=1)
    in_place: InPlace | None = None
    check_shapes: tuple[dict[str, int], ...] = Field(default=(), min_length=1)
    bench_shapes: tuple[dict[str, int], ...] = Field(default=(), min_length=1)
    tolerance: Tolerance = Tolerance(multiple=2.0)
    target: float = Field(default=0.97, gt=0)


class Spec(Header):
    """A loaded spec in canonical form: `gemm` names A and B.

    They are (M, K) and (N, K), and the accumulator is `A @ B.T`.
    """

    declared: Header
    """The front matter, completed."""
    layout: Layout | None
    """How the declared tensors lie in the canonical ones; None where they are those."""
    path: Path
    text: str
    prose: str
    reference_source: str
    reference_line: int
    """Line of `text`, from 1, that the first line of the reference stands on."""
    digest: str

    @property
    def has_baseline(self) -> bool:
        """Whether the reference block defines `baseline` too."""
        return "baseline" in functions_in(self.reference_source)

    @property
    def gemm_dims(self) -> tuple[str, str, str]:
        """Names of the dims (M, N, K) of the GEMM."""
        (m, k), (n, _) = (self.symbolic_shape(name) for name in self.gemm)
        return str(m), str(n), str(k)

    @property
    def turned(self) -> str:
        """Those of A and B that callers have transposed, such as "AB"."""
        return self.layout.turned if self.layout else ""

    @property
    def elements(self) -> tuple[str, ...]:
        """The element types that a run may have, the default first."""
        return next(iter(self.types.values()), ("bfloat16",))

    def default_types(self) -> dict[str, str]:
        """Choose the first type for every symbol."""
        return {name: choices[0] for name, choices in self.types.items()}

    def type_choices(self) -> list[dict[str, str]]:
        """List what `types` may be in a run, the default first."""
        choices = next(iter(self.types.values()), ("",))
        return [dict.fromkeys(self.types, choice) for choice in choices]

    def steps(self) -> tuple[int, int]:
        """Find what N and K are multiples of in every kernel."""
        m, n, _ = self.gemm_dims
        halves = {self.symbolic_shape(o, x) for o in self.outputs for x in self.bindings()}
        found = [
            steps(
                DTYPES[self.dtype_of(self.gemm[0], types)],
                [DTYPES[self.dtype_of(o, types)] for o in self.outputs],
                half=(m, f"{n}/2") in halves,
            )
            for types in self.type_choices()
        ]
        return max(n for n, _ in found), max(k for _, k in found)

    def bindings(self) -> list[dict[str, str]]:
        """List every choice of the static parameters, the default first."""
        values = itertools.product(*self.parameters.values())
        return [dict(zip(self.parameters, choice, strict=True)) for choice in values]

    def bind(self, binding: Mapping[str, str] | None = None) -> dict[str, str]:
        """Complete `binding` with defaults, in declared order.

        Raises:
            SpecError: A parameter, or a value of one, that the spec does not declare.
        """
        given = binding or {}
        for name, value in given.items():
            if value not in self.parameters.get(name, ()):
                known = "; ".join(f"{k}: {', '.join(v)}" for k, v in self.parameters.items())
                raise SpecError(f"{self.name}: no {name}={value}; expected {known or 'none'}")
        return {name: given.get(name, values[0]) for name, values in self.parameters.items()}

    def variant(self, binding: Mapping[str, str] | None = None) -> str:
        """Name the program of a choice: `name`, then `__value` a parameter."""
        return "__".join([self.name, *self.bind(binding).values()])

    def updated(self, binding: Mapping[str, str] | None = None) -> dict[str, str]:
        """Find the output that overwrites an input, in a variant."""
        place = self.in_place
        if place is None or not place.when.items() <= self.bind(binding).items():
            return {}
        return {place.output: place.input}

    def symbolic_shape(
        self, tensor: str, binding: Mapping[str, str] | None = None
    ) -> tuple[int | str, ...]:
        """Give a tensor's shape in dims, such as ("M", "N/2")."""
        shape = self._tensor(tensor).shape
        return shape.cases[self.bind(binding)[shape.parameter] if shape.parameter else ""]

    def shape_of(
        self, tensor: str, sizes: Mapping[str, int], binding: Mapping[str, str] | None = None
    ) -> tuple[int, ...]:
        """Give a tensor's shape at `sizes`; `()` for a scalar."""
        self.check_sizes(sizes)
        known = {**self.layout.sizes(sizes), **sizes} if self.layout else sizes
        return tuple(extent(entry, known) for entry in self.symbolic_shape(tensor, binding))

    def dtype_of(self, tensor: str, types: Mapping[str, str]) -> str:
        """Give a tensor's concrete element type, `types` choosing symbolic ones.

        Raises:
            SpecError: No such tensor, or `types` lacks the symbol or chooses another than declared.
        """
        dtype = self._tensor(tensor).dtype
        if dtype not in self.types:
            return dtype
        if types.get(dtype) not in self.types[dtype]:
            allowed = ", ".join(self.types[dtype])
            raise SpecError(f"{self.name}: type {dtype} is {types.get(dtype)}; expected {allowed}")
        return types[dtype]

    def check_sizes(self, sizes: Mapping[str, int]) -> None:
        """Accept `sizes` for the dims.

        Raises:
            SpecError: A dim missing or unknown, not positive, or not a multiple of what it must be.
        """
        if set(sizes) != set(self.dims):
            got, known = ", ".join(sizes) or "none", ", ".join(self.dims)
            raise SpecError(f"{self.name}: sizes are given for {got}; expected {known}")
        for name, size in sizes.items():
            unit = self.dims[name].multiple_of
            if size <= 0 or size % unit:
                raise SpecError(
                    f"{self.name}: {name}={size}; expected a positive multiple of {unit}"
                )
            if size != (only := self.dims[name].only or size):
                raise SpecError(f"{self.name}: {name}={size}; this reference is for {only} alone")

    def _tensor(self, name: str) -> Output:
        tensor = self.inputs.get(name) or self.outputs.get(name)
        if tensor is None:
            known = ", ".join([*self.inputs, *self.outputs])
            raise SpecError(f"{self.name}: no tensor {name!r}; expected one of {known}")
        return tensor
