"""What an epilogue computes, as expressions; equal ones are the same object (see `builder`)."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

REDUCTIONS = {
    "row_sum": "RowSum",
    "row_mean": "RowMean",
    "row_max": "RowMax",
    "row_logsumexp": "RowLogSumExp",
    "col_sum": "ColSum",
    "col_max": "ColMax",
}


@dataclass(frozen=True, eq=False, repr=False)
class Expr:
    """One value: an operation over others, or a leaf ("acc", "operand", "index", "const").

    Attributes:
        op: A name of the vocabulary or a structural one; once canonical, "mul" and "add" take any
            number of arguments.
        dims: Which of M, N, H (half of N), W (twice N) and K it varies over.
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


def negative(term: Expr) -> bool:
    """Whether a sum writes `term` with a minus."""
    first = term.args[0] if term.op in ("mul", "div") and term.args else term
    if first.op == "mul" and first is not term:
        first = first.args[0]
    return term.op == "neg" or (first.op == "const" and first.value < 0)
