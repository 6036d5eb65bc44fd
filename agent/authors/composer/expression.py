"""What an epilogue computes, as interned expressions in one canonical form.

- Equal expressions are the same object, so identity is equality.
- `Builder`'s methods take arithmetic as a reference spells it; trivial identities vanish at once.
- `canonical` then flattens products and sums of values used once, sorts them by a key without
  names, and recognises activations that were spelled out. Values used more than once stay as
  given: they are what the program will name.
"""

from __future__ import annotations

import hashlib
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any

from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.graph import OPS

if TYPE_CHECKING:
    import torch

REDUCTIONS = ("row_sum", "row_mean", "row_max")

# Points an unnamed function of one value is compared at, and how far it may be off.
_POINTS = (-9.0, -3.3, -1.7, -0.6, -0.2, 0.3, 0.9, 2.1, 5.2)
_CLOSE = 1e-10


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """One value: an operation over others, or a leaf ("acc", "operand", "const").

    Attributes:
        op: A name of the vocabulary or a structural one; once canonical, "mul" and "add" take any
            number of arguments.
        dims: Which of M, N, H (half of N) and K it varies over.
        key: Order among commutative arguments; holds positions of inputs, never names.
    """

    op: str
    args: tuple[Expr, ...]
    dims: frozenset[str]
    name: str = ""
    value: float = 0.0
    key: tuple[str, ...] = field(default=())

    @property
    def reduction(self) -> bool:
        return self.op in REDUCTIONS

    @property
    def reduced(self) -> bool:
        """Whether it is a reduction, or a norm that could still be squared into one."""
        return self.reduction or (self.op == "sqrt" and self.args[0].reduction)


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
    """How often each is an argument or a root; both halves of a pair count as one use."""
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


class Builder:
    """Makes expressions; the one place that interns them."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._interned: dict[tuple[object, ...], Expr] = {}

    def make(self, op: str, *args: Expr, dims: frozenset[str] | None = None) -> Expr:
        if any(a.reduced for a in args) and not (op == "sqrt" and args[0].op == "row_sum"):
            raise ProgramError(_AGAIN)
        if dims is None:
            dims = frozenset[str]().union(*(a.dims for a in args))
        keys = (*(part for arg in args for part in arg.key), f"~{op}")
        if len(keys) > 128:
            keys = (*keys[:64], hashlib.sha256("|".join(keys).encode()).hexdigest())
        return self._intern((op, *args), Expr(op, args, dims, key=keys))

    def leaf(self, op: str, name: str, position: int, dims: frozenset[str]) -> Expr:
        return self._intern((op, name), Expr(op, (), dims, name, key=(f"{position:04d}",)))

    def const(self, value: float) -> Expr:
        value = float(value)
        made = Expr("const", (), frozenset(), value=value, key=("9999", repr(value)))
        return self._intern(("const", repr(value)), made)

    def _intern(self, identity: tuple[object, ...], made: Expr) -> Expr:
        return self._interned.setdefault(identity, made)

    def mul(self, x: Expr, y: Expr) -> Expr:
        if x.op == "const" or y.reduction:
            x, y = y, x
        if x.reduction:
            return self._scale_reduction(x, y)
        if y.op == "const":
            if x.op == "const":
                return self.const(x.value * y.value)
            if y.value in (1.0, -1.0):
                return x if y.value == 1.0 else self.neg(x)
        if x is y and x.op == "sqrt" and x.args[0].reduction:
            square = x.args[0].args[0]
            if square.op == "mul" and square.args[0] is square.args[1]:
                return x.args[0]
        return self.make("mul", x, y)

    def _scale_reduction(self, x: Expr, scale: Expr) -> Expr:
        """A factor that is the same along the row moves inside: what is stored is a reduction."""
        value = x.args[0]
        if scale.op == "const" and scale.value == 1.0:
            return x
        if scale.reduction or not scale.dims <= {"M"}:
            raise ProgramError(_AGAIN)
        if x.op == "row_max" and not (scale.op == "const" and scale.value > 0):
            raise ProgramError("a row maximum can be scaled by a positive constant only")
        width = self.columns // (2 if "H" in value.dims else 1)
        if x.op == "row_sum" and scale.op == "const" and abs(scale.value * width - 1) < 1e-12:
            return self.make("row_mean", value, dims=x.dims)
        return self.make(x.op, self.mul(value, scale), dims=x.dims)

    def add(self, x: Expr, y: Expr) -> Expr:
        if x.op == "const":
            x, y = y, x
        if x.op == "const":
            return self.const(x.value + y.value)
        if y.op == "const" and y.value == 0.0:
            return x
        return self.apply("add", x, y)

    def sub(self, x: Expr, y: Expr) -> Expr:
        return self.add(x, self.neg(y))

    def neg(self, x: Expr) -> Expr:
        if x.op == "const":
            return self.const(-x.value)
        if x.op in ("row_sum", "row_mean"):
            return self._scale_reduction(x, self.const(-1.0))
        return x.args[0] if x.op == "neg" else self.make("neg", x)

    def div(self, x: Expr, y: Expr) -> Expr:
        if y.op == "const" and y.value:
            return self.mul(x, self.const(1.0 / y.value))
        if y.op == "sqrt" and not y.args[0].reduction:
            return self.mul(x, self.make("rsqrt", y.args[0]))
        if y.op == "add" and y.args[1] is self.const(1.0) and y.args[0].op == "exp":
            return self.mul(x, self.make("sigmoid", self.neg(y.args[0].args[0])))
        if x.reduction and not y.reduced:
            return self._scale_reduction(x, self.div(self.const(1.0), y))
        return self.make("div", x, y)

    def power(self, x: Expr, exponent: Expr) -> Expr:
        n = exponent.value
        if exponent.op != "const" or n not in (-1.0, -0.5, 0.5, 1.0, 2.0, 3.0, 4.0):
            raise ProgramError("a power must be one of -1, -1/2, 1/2, 1, 2, 3, 4")
        if n < 0:
            root = self.power(x, self.const(-n))
            return self.div(self.const(1.0), root)
        if n == 0.5:
            return self.apply("sqrt", x)
        product = x
        for _ in range(int(n) - 1):
            product = self.mul(product, x)
        return product

    def apply(self, op: str, *args: Expr) -> Expr:
        """Any other operation, elementwise."""
        if op == "log" and args[0].op == "add" and args[0].args[1] is self.const(1.0):
            if args[0].args[0].op == "exp":
                return self.make("softplus", args[0].args[0].args[0])
        return self.make(op, *args)

    def clamp(self, x: Expr, low: Expr | None, high: Expr | None = None) -> Expr:
        x = x if low is None else self.apply("maximum", x, low)
        return x if high is None else self.apply("minimum", x, high)

    def canonical(self, roots: list[Expr]) -> list[Expr]:
        """`roots` in the one form that equivalent spellings share."""
        count = uses(roots)
        done: dict[Expr, Expr] = {}
        for expr in walk(roots):
            done[expr] = self._canonical(expr, done, count)
        return [done[root] for root in roots]

    def _canonical(self, expr: Expr, done: dict[Expr, Expr], count: Counter[Expr]) -> Expr:
        if expr.op == "add" or (expr.op == "neg" and self._difference(expr.args[0], count)):
            terms = [
                self._product([done[t]], [], -1.0) if minus else done[t]
                for t, minus in self._terms(expr, count, root=True)
            ]
            return self._sum(terms)
        if expr.op in ("mul", "div", "neg"):
            above, below, coefficient = [], [], 1.0
            for part, inverse in self._factors(expr, count, root=True):
                value = done.get(part, part)
                if value.op == "const":
                    coefficient *= 1 / value.value if inverse else value.value
                else:
                    (below if inverse else above).append(value)
            return self._product(above, below, coefficient)
        args = [done[a] for a in expr.args]
        if expr.op in ("maximum", "minimum"):
            args.sort(key=lambda a: (a.op == "const", a.key))
            x, y = args
            if x is y:
                return x
            if expr.op == "maximum" and y is self.const(0.0):
                return self.make("relu", x)
            for a, b in ((x, y), (y, x)):
                if expr.op == "maximum" and b.op == "mul" and b.args[1:] == (a,):
                    if b.args[0].op == "const" and 0 <= b.args[0].value <= 1:
                        return self.make("leaky_relu", a, b.args[0])
            if expr.op == "minimum" and y.op == "const" and count[expr.args[0]] == 1:
                if x.op == "relu":
                    return self.make("clamp", x.args[0], self.const(0.0), y)
                if x.op == "maximum" and x.args[1].op == "const":
                    return self.make("clamp", *x.args, y)
        return self.make(expr.op, *args, dims=expr.dims) if args else expr

    @staticmethod
    def _difference(expr: Expr, count: Counter[Expr]) -> bool:
        """Whether -expr is as short as expr: a difference, which turns around."""
        return expr.op == "add" and count[expr] == 1 and any(a.op == "neg" for a in expr.args)

    def _factors(
        self, expr: Expr, count: Counter[Expr], root: bool = False, inverse: bool = False
    ) -> Iterator[tuple[Expr, bool]]:
        if not root and (count[expr] > 1 or expr.op not in ("mul", "div", "neg")):
            yield expr, inverse
            return
        if expr.op == "neg":
            yield self.const(-1.0), inverse
        for i, arg in enumerate(expr.args):
            flip = expr.op == "div" and i == 1
            yield from self._factors(arg, count, inverse=inverse ^ flip)

    def _terms(
        self, expr: Expr, count: Counter[Expr], root: bool = False, minus: bool = False
    ) -> Iterator[tuple[Expr, bool]]:
        if not root and (count[expr] > 1 or expr.op not in ("add", "neg")):
            yield expr, minus
            return
        for arg in expr.args:
            yield from self._terms(arg, count, minus=minus ^ (expr.op == "neg"))

    def _product(self, above: list[Expr], below: list[Expr], coefficient: float) -> Expr:
        if len(above) == 1 and not below:
            # A coefficient within the only factor joins the one outside.
            inner = above[0].args
            if above[0].op == "neg":
                return self._product([*inner], [], -coefficient)
            if above[0].op == "mul" and inner[0].op == "const":
                return self._product([*inner[1:]], [], coefficient * inner[0].value)
        above, below, coefficient = self._activations(above, below, coefficient)
        above.sort(key=lambda p: (bool(p.dims), p.key))
        below.sort(key=lambda p: (bool(p.dims), p.key))
        if coefficient == -1.0 and above:
            return self.make("neg", self._product(above, below, 1.0))
        if coefficient != 1.0 or not above:
            above.insert(0, self.const(coefficient))
        top = above[0] if len(above) == 1 else self.make("mul", *above)
        if not below:
            return top
        return self.make("div", top, below[0] if len(below) == 1 else self.make("mul", *below))

    def _sum(self, terms: list[Expr]) -> Expr:
        constant = sum(t.value for t in terms if t.op == "const")
        rest = [t for t in terms if t.op != "const"]
        rest.sort(key=lambda t: (negative(t), min(t.key), t.key))
        if constant:
            rest.append(self.const(constant))
        if not rest:
            return self.const(0.0)
        return rest[0] if len(rest) == 1 else self.make("add", *rest)

    def _activations(
        self, above: list[Expr], below: list[Expr], coefficient: float
    ) -> tuple[list[Expr], list[Expr], float]:
        """Replace factors x and f(x) whose product is c times a known activation of x.

        Compared by value, not by form, so that every way to write GELU is found.
        """
        for x in dict.fromkeys(above):
            for f, side in [*((f, above) for f in above), *((f, below) for f in below)]:
                known = None if f is x else _known_product(x, f, inverse=side is below)
                if known:
                    side.remove(f)
                    above[above.index(x)] = self.make(known[0], x)
                    return self._activations(above, below, coefficient * known[1])
        return above, below, coefficient


_AGAIN = (
    "uses a row reduction again in the same kernel, but a row spans many tiles; return the"
    " reduction as an output and apply it in the next kernel"
)


def negative(term: Expr) -> bool:
    """Whether a sum writes `term` with a minus."""
    first = term.args[0] if term.op in ("mul", "div") and term.args else term
    if first.op == "mul" and first is not term:
        first = first.args[0]
    return term.op == "neg" or (first.op == "const" and first.value < 0)


def _known_product(x: Expr, f: Expr, *, inverse: bool) -> tuple[str, float] | None:
    """The activation g and factor c with x · f(x) = c · g(x), or None."""
    import torch
    import torch.nn.functional as F

    points = torch.tensor(_POINTS, dtype=torch.float64)
    values = _at(f, x, points)
    if values is None:
        return None
    product = points / values if inverse else points * values
    for name, g in (
        ("silu", F.silu(points)),
        ("gelu_tanh", F.gelu(points, approximate="tanh")),
        ("gelu_erf", F.gelu(points)),
        ("hard_swish", F.hardswish(points)),
    ):
        c = float(product[-1] / g[-1])
        c = round(c) if abs(c - round(c)) < _CLOSE else c
        if torch.isfinite(product).all() and c and (product - c * g).abs().max() < _CLOSE * abs(c):
            return name, c
    return None


def _at(f: Expr, x: Expr, points: torch.Tensor) -> torch.Tensor | None:
    """f at `points`, or None where it depends on more than x or not on it."""
    import torch

    values: dict[Expr, Any] = {x: points}
    inner: dict[Expr, bool] = {x: True}

    def visit(e: Expr) -> bool:
        if e not in inner:
            inner[e] = e.op == "const" or (bool(e.args) and all([visit(a) for a in e.args]))
        return inner[e]

    if not visit(f):
        return None

    def value(e: Expr) -> Any:
        if e in values:
            return values[e]
        args = [value(a) for a in e.args]
        match e.op:
            case "const":
                out = torch.tensor(e.value, dtype=torch.float64)
            case "mul" | "add":
                out = args[0]
                for a in args[1:]:
                    out = OPS[e.op].torch(out, a)
            case "relu":
                out = torch.relu(args[0])
            case "clamp":
                out = torch.clamp(*args)
            case op if op in OPS:
                out = OPS[op].torch(*args)
            case _:
                raise KeyError(e.op)
        values[e] = out
        return out

    try:
        out = value(f)
    except KeyError:
        return None
    return out if isinstance(out, torch.Tensor) and out.ndim else None
