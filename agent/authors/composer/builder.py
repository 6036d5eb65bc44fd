"""Expressions in one canonical form.

- Equal expressions are the same object, so identity is equality.
- `Builder`'s methods take arithmetic as a reference spells it; trivial identities vanish at once.
- `canonical` then flattens products and sums of values used once, sorts them by a key without
  names, and recognises activations and derivatives that were spelled out. Values used more than
  once stay as given: they are what the program will name.
"""

from __future__ import annotations

import hashlib
import itertools
from collections import Counter
from collections.abc import Iterator

from coda_agent.agent.authors.composer.expression import Expr, negative, uses, walk
from coda_agent.agent.authors.composer.recognise import known_product
from coda_agent.primitives.errors import ProgramError

AGAIN = (
    "uses a row reduction again in the same kernel, but a row spans many tiles; return the"
    " reduction as an output and apply it in the next kernel"
)


class Builder:
    """Makes expressions; the one place that interns them."""

    def __init__(self, columns: int) -> None:
        self.columns = columns
        self._interned: dict[tuple[object, ...], Expr] = {}

    def make(self, op: str, *args: Expr, dims: frozenset[str] | None = None) -> Expr:
        if any(a.reduced for a in args) and (
            op != "sqrt" or args[0].op not in ("row_sum", "col_sum")
        ):
            raise ProgramError(AGAIN)
        if op != "gather":
            for arg in args:
                if arg.op == "index":
                    raise ProgramError(f"computes with {arg.name!r}; an index only selects columns")
                if arg.op == "gather":
                    return self._within_gather(op, args, arg.args[1])
        if dims is None:
            dims = frozenset[str]().union(*(a.dims for a in args))
        keys = (*(part for arg in args for part in arg.key), f"~{op}")
        if len(keys) > 128:
            keys = (*keys[:64], hashlib.sha256("|".join(keys).encode()).hexdigest())
        return self._intern((op, *args), Expr(op, args, dims, key=keys))

    def _within_gather(self, op: str, args: tuple[Expr, ...], index: Expr) -> Expr:
        """What is computed with gathered elements moves inside: a gather can only be stored."""
        inner = [a.args[0] if a.op == "gather" else a for a in args]
        if any((a.op == "gather" and a.args[1] is not index) or not a.dims <= {"M"} for a in args):
            raise ProgramError(
                "uses a gathered element again in the same kernel, where most of its row is not;"
                " return it as an output"
            )
        return self.make("gather", self.make(op, *inner), index, dims=frozenset({"M"}))

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
        """A factor that is the same along what is reduced moves inside: only that is stored."""
        value = x.args[0]
        if scale.op == "const" and scale.value == 1.0:
            return x
        if scale.reduction or scale.op == "gather" or not scale.dims <= x.dims:
            raise ProgramError(AGAIN)
        if x.op == "row_logsumexp":
            raise ProgramError("scales a log-sum-exp, which no scale of its terms does")
        if x.op.endswith("_max") and not (scale.op == "const" and scale.value > 0):
            raise ProgramError("a maximum can be scaled by a positive constant only")
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
        for a, b in ((x, y), (y, x)):
            if a.op == "row_logsumexp" and a.args[0] is self._centred(b):
                return self.make("row_logsumexp", b.args[0], dims=a.dims)
        return self.apply("add", x, y)

    def _centred(self, maximum: Expr) -> Expr | None:
        """What a row maximum is the maximum of, less that maximum; only in a log-sum-exp."""
        if maximum.op != "row_max":
            return None
        (x,) = maximum.args
        return self.make("centred", x, dims=x.dims)

    def sub(self, x: Expr, y: Expr) -> Expr:
        centred = self._centred(y)
        if centred and centred.args[0] is x:
            return centred
        return self.add(x, self.neg(y))

    def neg(self, x: Expr) -> Expr:
        if x.op == "const":
            return self.const(-x.value)
        if x.op in ("row_sum", "row_mean", "col_sum"):
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
        if op == "log" and args[0].op == "row_sum" and args[0].args[0].op == "exp":
            return self.make("row_logsumexp", *args[0].args[0].args, dims=args[0].dims)
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
                named = count[part] > 1 and value.op != "const"
                c, rest = (1.0, [value]) if named else self._coefficient(value)
                coefficient *= 1 / c if inverse else c
                (below if inverse else above).extend(rest)
            return self._product(above, below, coefficient)
        args = [done[a] for a in expr.args]
        if expr.op in ("maximum", "minimum"):
            args.sort(key=lambda a: (a.op == "const", a.key))
            x, y = args
            if x is y:
                return x
            if expr.op == "maximum" and y.op == "const" and x.op == "minimum":
                high = x.args[1]
                if high.op == "const" and y.value <= high.value and count[expr.args[0]] == 1:
                    return self.make("clamp", x.args[0], y, high)
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
            c, rest = self._coefficient(above[0])
            if c != 1.0 and rest:
                return self._product(rest, [], coefficient * c)
        # Two factors whose product is c times a known function become it, a derivative first.
        factors = [*((f, False) for f in above), *((f, True) for f in below)]
        found = [
            (known, pair)
            for pair in itertools.combinations(factors, 2)
            if (known := known_product(*pair))
        ]
        if found:
            (name, x, c), pair = min(found, key=lambda f: not f[0][0].startswith("d_"))
            for factor in pair:
                factors.remove(factor)
            above = [self.make(name, x), *(f for f, inverse in factors if not inverse)]
            return self._product(above, [f for f, inverse in factors if inverse], coefficient * c)
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

    @staticmethod
    def _coefficient(expr: Expr) -> tuple[float, list[Expr]]:
        """The number in a product, and its other factors."""
        if expr.op == "neg":
            return -1.0, [*expr.args]
        if expr.op == "mul" and expr.args[0].op == "const":
            return expr.args[0].value, [*expr.args[1:]]
        return (expr.value, []) if expr.op == "const" else (1.0, [expr])

    def _sum(self, terms: list[Expr]) -> Expr:
        constant = sum(t.value for t in terms if t.op == "const")
        rest = [t for t in terms if t.op != "const"]
        for term in [t for t in rest if t.op == "neg"]:
            if term.args[0] in rest:
                rest.remove(term)
                rest.remove(term.args[0])
        rest.sort(key=lambda t: (negative(t), min(t.key), t.key))
        if constant:
            rest.append(self.const(constant))
        if not rest:
            return self.const(0.0)
        if len(rest) == 1:
            return rest[0]
        made = self.make("add", *rest)
        known = known_product((made, False))
        return self._product([self.make(*known[:2])], [], known[2]) if known else made
