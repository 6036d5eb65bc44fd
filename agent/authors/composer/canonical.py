"""Expressions in the one form that equivalent spellings share.

Products and sums of values used once are flattened and sorted by a key without names; activations
and derivatives that were spelled out are recognised. Values used more than once stay as given: they
are what the program will name.
"""

import itertools
from collections.abc import Iterator

from coda_agent.agent.authors.composer.expression import Expr, const, make, negative, uses, walk
from coda_agent.agent.authors.composer.recognise import known_product

_ROUNDED = ("floor", "trunc", "round_even", "rint")


def canonical(roots: list[Expr]) -> list[Expr]:
    """The canonical form of each of `roots`, which may share values."""
    form = _Form(roots)
    return [form.done[root] for root in roots]


class _Form:
    def __init__(self, roots: list[Expr]) -> None:
        self.count = uses(roots)
        self.done: dict[Expr, Expr] = {}
        for expr in walk(roots):
            self.done[expr] = self._of(expr)

    def _of(self, expr: Expr) -> Expr:
        if expr.op == "add" or (expr.op == "neg" and self._difference(expr.args[0])):
            terms = self._terms(expr, root=True)
            return _sum(
                [_product([self.done[t]], [], -1.0) if m else self.done[t] for t, m in terms]
            )
        if expr.op in ("mul", "div", "neg"):
            above, below, coefficient = [], [], 1.0
            for part, inverse in self._factors(expr, root=True):
                value = self.done.get(part, part)
                named = self.count[part] > 1 and value.op != "const"
                c, rest = (1.0, [value]) if named else _coefficient(value)
                coefficient *= 1 / c if inverse else c
                (below if inverse else above).extend(rest)
            return _product(above, below, coefficient)
        args = [self.done[a] for a in expr.args]
        if expr.op in ("maximum", "minimum"):
            return _extremum(expr.op, args, inner=self.count[expr.args[0]] == 1)
        return make(expr.op, *args, dims=expr.dims, value=expr.value) if args else expr

    def _difference(self, expr: Expr) -> bool:
        """Whether -expr is as short as expr: a difference, which turns around."""
        return expr.op == "add" and self.count[expr] == 1 and any(a.op == "neg" for a in expr.args)

    def _factors(
        self, expr: Expr, root: bool = False, inverse: bool = False
    ) -> Iterator[tuple[Expr, bool]]:
        """Factors of a product, and whether they divide."""
        if not root and (self.count[expr] > 1 or expr.op not in ("mul", "div", "neg")):
            yield expr, inverse
            return
        if expr.op == "neg":
            yield const(-1.0), inverse
        for i, arg in enumerate(expr.args):
            yield from self._factors(arg, inverse=inverse ^ (expr.op == "div" and i == 1))

    def _terms(
        self, expr: Expr, root: bool = False, minus: bool = False
    ) -> Iterator[tuple[Expr, bool]]:
        """Terms of a sum, and whether they are subtracted."""
        apart = self.count[expr] > 1 or expr.op not in ("add", "neg") or _remnant(expr)
        if not root and apart:
            yield expr, minus
            return
        for arg in expr.args:
            yield from self._terms(arg, minus=minus ^ (expr.op == "neg"))


def _remnant(expr: Expr) -> bool:
    """Whether it is what rounding leaves.

    That is x - trunc(x) or, in torch 2.11, x - sign(x) · floor(|x|). In a longer
    sum x would cancel late, and take other terms' digits along.
    """

    def rounded(a: Expr) -> bool:
        return a.op in _ROUNDED or (a.op in ("neg", "mul") and any(map(rounded, a.args)))

    return expr.op == "add" and any(map(rounded, expr.args))


def _extremum(op: str, args: list[Expr], *, inner: bool) -> Expr:
    """A maximum or minimum, or a clamp taking an `inner` one in.

    ReLU and leaky ReLU are spelled so, too; an `inner` value is used here only.
    """
    x, y = sorted(args, key=lambda a: (a.op == "const", a.key))
    if x == y:
        return x
    if op == "maximum" and y.op == "const" and x.op == "minimum":
        high = x.args[1]
        if high.op == "const" and y.value <= high.value and inner:
            return make("clamp", x.args[0], y, high)
    if op == "maximum" and y.is_number(0.0):
        return make("relu", x)
    for a, b in ((x, y), (y, x)):
        if op == "maximum" and b.op == "mul" and b.args[1:] == (a,):
            if b.args[0].op == "const" and 0 <= b.args[0].value <= 1:
                return make("leaky_relu", a, b.args[0])
    if op == "minimum" and y.op == "const" and inner:
        if x.op == "relu":
            return make("clamp", x.args[0], const(0.0), y)
        if x.op == "maximum" and x.args[1].op == "const":
            return make("clamp", *x.args, y)
    return make(op, x, y)


def _product(above: list[Expr], below: list[Expr], coefficient: float) -> Expr:
    if len(above) == 1 and not below:
        # A coefficient within the only factor joins the one outside.
        c, rest = _coefficient(above[0])
        if c != 1.0 and rest:
            return _product(rest, [], coefficient * c)
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
        above = [make(name, x), *(f for f, inverse in factors if not inverse)]
        return _product(above, [f for f, inverse in factors if inverse], coefficient * c)
    above.sort(key=lambda p: (bool(p.dims), p.key))
    below.sort(key=lambda p: (bool(p.dims), p.key))
    if coefficient == -1.0 and above:
        return make("neg", _product(above, below, 1.0))
    if coefficient != 1.0 or not above:
        above.insert(0, const(coefficient))
    top = above[0] if len(above) == 1 else make("mul", *above)
    if not below:
        return top
    return make("div", top, below[0] if len(below) == 1 else make("mul", *below))


def _coefficient(expr: Expr) -> tuple[float, list[Expr]]:
    """The number in a product, and its other factors."""
    if expr.op == "neg":
        return -1.0, [*expr.args]
    if expr.op == "mul" and expr.args[0].op == "const":
        return expr.args[0].value, [*expr.args[1:]]
    return (expr.value, []) if expr.op == "const" else (1.0, [expr])


def _sum(terms: list[Expr]) -> Expr:
    constant = sum(t.value for t in terms if t.op == "const")
    rest = [t for t in terms if t.op != "const"]
    first: list[Expr] = []
    for term in [t for t in rest if t.op == "neg"]:
        value = term.args[0]
        if value not in rest:
            continue
        rest.remove(term)
        rest.remove(value)
        # An input, or a product that no kernel has by itself, is left out. Another value may be
        # infinite, and then the difference is NaN; it comes first, or takes others' digits along.
        if value.op not in ("operand", "part"):
            first += value, term
    rest.sort(key=lambda t: (negative(t), min(t.key), t.key))
    rest = first + rest
    if constant:
        rest.append(const(constant))
    if not rest:
        return const(0.0)
    if len(rest) == 1:
        return rest[0]
    made = make("add", *rest)
    known = known_product((made, False))
    return _product([make(*known[:2])], [], known[2]) if known else made
