"""What an epilogue computes, as expressions.

- Equal expressions compute the same of the same inputs; where they stand does not matter.
- Their arithmetic is as a reference spells it; trivial identities vanish at once. `canonical` then
  gives equivalent spellings one form.
"""

from __future__ import annotations

import hashlib
import math
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from coda_agent.primitives.errors import ProgramError

AGAIN = "uses a row reduction again in the same kernel, but a row spans many tiles"
NEXT = "return the reduction as an output and apply it in the next kernel"


class Reduction(NamedTuple):
    """Reduction of a row or column; `left` names the dim that stays."""

    kind: str
    aten: str
    left: str
    words: str


REDUCTIONS = {
    "row_sum": Reduction("RowSum", "sum", "M", "row sum"),
    "row_mean": Reduction("RowMean", "mean", "M", "row mean"),
    "row_max": Reduction("RowMax", "amax", "M", "row maximum"),
    "row_min": Reduction("RowMin", "amin", "M", "row minimum"),
    "row_logsumexp": Reduction("RowLogSumExp", "logsumexp", "M", "row log-sum-exp"),
    "col_sum": Reduction("ColSum", "sum", "N", "column sum"),
    "col_max": Reduction("ColMax", "amax", "N", "column maximum"),
}


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """One value: an operation over others, or a leaf.

    Attributes:
        op: A name of the vocabulary, a structural one, or a leaf's: "acc", "operand", "index",
            "const". Once canonical, "mul" and "add" take any number of arguments.
        dims: Which of M, N, N/2, 2*N and K it varies over.
        value: Of a constant; of a reduction, over how many elements it is.
        key: Order among commutative arguments; holds positions of inputs, never names.
        identity: Equal for equal expressions.
    """

    op: str
    args: tuple[Expr, ...] = ()
    dims: frozenset[str] = frozenset()
    name: str = ""
    value: float = 0.0
    key: tuple[str, ...] = ()
    identity: bytes = field(init=False)

    def __post_init__(self) -> None:
        own = f"{self.op} {self.name} {self.value!r} ".encode()
        digest = hashlib.sha256(own + b"".join(a.identity for a in self.args)).digest()
        object.__setattr__(self, "identity", digest)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Expr) and self.identity == other.identity

    def __hash__(self) -> int:
        return hash(self.identity)

    def is_number(self, value: float) -> bool:
        return self.op == "const" and self.value == value

    @property
    def reduction(self) -> bool:
        return self.op in REDUCTIONS

    @property
    def reduced(self) -> bool:
        """Whether it is a reduction, or a norm that is its root."""
        return self.reduction or (self.op == "sqrt" and self.args[0].reduction)

    def __add__(self, other: Expr | float) -> Expr:
        x, y = self, lift(other)
        if x.op == "const":
            x, y = y, x
        if x.op == "const":
            return const(x.value + y.value)
        if y.is_number(0.0):
            return x
        for a, b in ((x, y), (y, x)):
            if a.op == "row_logsumexp" and a.args[0] == _centred(b):
                return make("row_logsumexp", b.args[0], dims=a.dims, value=a.value)
        return make("add", x, y)

    def __sub__(self, other: Expr | float) -> Expr:
        centred = _centred(lift(other))
        return centred if centred and centred.args[0] == self else self + -lift(other)

    def __rsub__(self, other: float) -> Expr:
        return const(other) - self

    def __neg__(self) -> Expr:
        if self.op == "const":
            return const(-self.value)
        if self.op in ("row_sum", "row_mean", "col_sum"):
            return _scaled(self, const(-1.0))
        return self.args[0] if self.op == "neg" else make("neg", self)

    def __mul__(self, other: Expr | float) -> Expr:
        x, y = self, lift(other)
        if x.op == "const" or y.reduction:
            x, y = y, x
        if x.reduction:
            return _scaled(x, y)
        if y.op == "const":
            if x.op == "const":
                return const(x.value * y.value)
            if y.value in (1.0, -1.0):
                return x if y.value == 1.0 else -x
            if x.op == "mul" and x.args[1].op == "const" and abs(x.args[1].value * y.value) == 1:
                return x.args[0] * (x.args[1].value * y.value)
        if x == y and x.op == "sqrt" and x.args[0].reduction:
            square = x.args[0].args[0]
            if square.op == "mul" and square.args[0] == square.args[1]:
                return x.args[0]
        return make("mul", x, y)

    def __truediv__(self, other: Expr | float) -> Expr:
        y = lift(other)
        if y.op == "const" and y.value:
            return self * (1.0 / y.value)
        if y.op == "sqrt" and not y.args[0].reduction:
            return self * make("rsqrt", y.args[0])
        if y.op == "add" and y.args[1].is_number(1.0) and y.args[0].op == "exp":
            return self * make("sigmoid", -y.args[0].args[0])
        if self.reduction and not y.reduced:
            return _scaled(self, 1.0 / y)
        return make("div", self, y)

    def __rtruediv__(self, other: float) -> Expr:
        return const(other) / self

    def __pow__(self, exponent: Expr) -> Expr:
        n = exponent.value
        if exponent.op != "const":
            if self.op == "const" and self.value > 0:
                return apply("exp", exponent * math.log(self.value))
            return apply("power", self, exponent)
        if n in (-0.5, 0.5):
            return make("sqrt", self) if n > 0 else 1.0 / make("sqrt", self)
        if n != int(n) or abs(n) > 16:
            return apply("power", self, n)
        if n <= 0:
            return 1.0 / self ** const(-n) if n else const(1.0)
        if n < 5:
            product = self
            for _ in range(int(n) - 1):
                product = product * self
            return product
        half = self ** const(n // 2)
        return half * half * self if n % 2 else half * half


def const(value: float) -> Expr:
    value = float(value)
    return Expr("const", value=value, key=("9999", repr(value)))


def lift(value: Expr | float) -> Expr:
    """A number as an expression; an expression as it is."""
    return value if isinstance(value, Expr) else const(value)


def leaf(op: str, name: str, position: int, dims: frozenset[str]) -> Expr:
    return Expr(op, (), dims, name, key=(f"{position:04d}",))


def make(op: str, *args: Expr, dims: frozenset[str] | None = None, value: float = 0.0) -> Expr:
    """An operation as it stands.

    Raises:
        ProgramError: An argument is known only when the kernel is done, or is an index.
    """
    if any(a.reduced for a in args) and (op != "sqrt" or args[0].op not in ("row_sum", "col_sum")):
        raise ProgramError(AGAIN, hint=NEXT)
    if op != "gather":
        for arg in args:
            if arg.op == "index":
                message = f"computes with {arg.name!r}, and an index only selects columns"
                raise ProgramError(message, hint="give it as an input of a floating type too")
            if arg.op == "gather":
                return _within_gather(op, args, arg.args[1])
    if dims is None:
        dims = frozenset[str]().union(*(a.dims for a in args))
    keys = (*(part for arg in args for part in arg.key), f"~{op}")
    if len(keys) > 128:
        keys = (*keys[:64], hashlib.sha256("|".join(keys).encode()).hexdigest())
    return Expr(op, args, dims, value=value, key=keys)


def apply(op: str, *args: Expr | float) -> Expr:
    """An elementwise operation of the vocabulary that no operator writes."""
    x, *others = map(lift, args)
    if op == "log" and x.op == "add" and x.args[1].is_number(1.0) and x.args[0].op == "exp":
        return make("softplus", x.args[0].args[0])
    if op == "log" and x.op == "row_sum" and x.args[0].op == "exp":
        return make("row_logsumexp", *x.args[0].args, dims=x.dims, value=x.value)
    return make(op, x, *others)


def by_columns(ranges: Sequence[tuple[float, Expr]]) -> Expr:
    """The value of each range of columns; a range ends before a column, the last with all."""
    *others, (_, following) = ranges
    result, column = following, make("column_index", dims=frozenset("N"))
    for stop, value in reversed(others):
        if value != following:
            before = make("greater", const(float(stop)), column)
            result, following = make("where", before, value, result), value
    return result


def _within_gather(op: str, args: tuple[Expr, ...], index: Expr) -> Expr:
    """Move what is computed with gathered elements inside: gathers are only stored."""
    inner = [a.args[0] if a.op == "gather" else a for a in args]
    if any((a.op == "gather" and a.args[1] != index) or not a.dims <= {"M"} for a in args):
        raise ProgramError(
            "uses a gathered element again in the same kernel, where most of its row is not",
            hint="return it as an output, and use it in the next kernel",
        )
    return make("gather", make(op, *inner), index, dims=frozenset({"M"}))


def _scaled(x: Expr, scale: Expr) -> Expr:
    """Move a factor that is the same along a reduction inside it."""
    if scale.is_number(1.0):
        return x
    if scale.reduction or scale.op == "gather" or not scale.dims <= x.dims:
        raise ProgramError(AGAIN, hint=NEXT)
    if x.op == "row_logsumexp":
        raise ProgramError("scales a log-sum-exp, which no scale of its terms does", hint=NEXT)
    if x.op.endswith(("_max", "_min")) and not (scale.op == "const" and scale.value > 0):
        raise ProgramError(
            "scales a maximum or minimum by other than a positive constant", hint=NEXT
        )
    if x.op == "row_sum" and scale.op == "const" and abs(scale.value * x.value - 1) < 1e-12:
        return make("row_mean", x.args[0], dims=x.dims, value=x.value)
    return make(x.op, x.args[0] * scale, dims=x.dims, value=x.value)


def _centred(maximum: Expr) -> Expr | None:
    """A row maximum's argument less that maximum, only for a log-sum-exp."""
    if maximum.op != "row_max":
        return None
    (x,) = maximum.args
    return make("centred", x, dims=x.dims)


def group_width(expr: Expr) -> int:
    """Count in how many adjacent columns an expression of groups is alike."""
    widths = set[int]()
    stack, seen = [expr], set[Expr]()
    while stack:
        e = stack.pop()
        if e in seen or e.dims <= {"M"}:
            continue
        seen.add(e)
        if e.op.startswith("group_"):
            widths.add(int(e.value))
        elif e.args:
            stack += e.args
        else:
            return 0
    return min(widths, default=0)


def joins_columns(expr: Expr) -> bool:
    """Tell whether an operation reads other columns of a group than its own."""
    return expr.op.startswith("group_") or expr.op == "rotate_half"


def walk(roots: list[Expr]) -> Iterator[Expr]:
    """Every expression below `roots`, once, arguments first."""
    seen: set[Expr] = set()
    stack = [(root, False) for root in reversed(roots)]
    while stack:
        expr, ready = stack.pop()
        if ready:
            yield expr
        elif expr not in seen:
            seen.add(expr)
            stack.append((expr, True))
            stack.extend((arg, False) for arg in reversed(expr.args))


def uses(roots: list[Expr]) -> Counter[Expr]:
    """Count each as argument or root; a pair's halves are one use."""
    count = Counter(roots)
    paired: set[Expr] = set()
    for expr in walk(roots):
        for arg in expr.args:
            if expr.op in ("even", "odd"):
                if arg in paired:
                    continue
                paired.add(arg)
            count[arg] += 1
    return count


def negative(term: Expr) -> bool:
    """Whether a sum writes `term` with a minus."""
    first = term.args[0] if term.op in ("mul", "div") and term.args else term
    if first.op == "mul" and first is not term:
        first = first.args[0]
    return term.op == "neg" or (first.op == "const" and first.value < 0)
