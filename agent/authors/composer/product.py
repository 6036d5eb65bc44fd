"""The product of a graph, as the accumulator of its kernel."""

from __future__ import annotations

import itertools

import torch

from coda_agent.agent.authors.composer.codes import Elements
from coda_agent.agent.authors.composer.expression import Expr, const, leaf, walk
from coda_agent.agent.authors.composer.layout import Layout
from coda_agent.primitives.errors import ProgramError


class Product:
    """What calls of a matrix product mean in one trace."""

    def __init__(self, layout: Layout) -> None:
        self.problem, self.codes = layout.problem, layout.codes
        self.acc = leaf("acc", "acc", 0, frozenset({"M", "N"}))

    def gemm(self, x: object, y: object) -> Elements:
        """Multiply A with some of B's rows, over K or part.

        A product over a part that is packed is a value of its own; with the others it is the whole.
        """
        if not (isinstance(x, Elements) and isinstance(y, Elements)):
            raise self._other_product()
        if any(e == self.acc for v in (x, y) for e in walk(self.codes.sources(v))):
            raise ProgramError(
                "is a second GEMM; a kernel has one",
                hint="make a kernel of each: the first's output is an input of the second",
            )
        if x.codes.shape[:-2].numel() != 1 or y.codes.shape[:-2].numel() != 1:
            raise self._other_product()
        one, other = (codes.reshape(codes.shape[-2:]) for codes in (x.codes, y.codes.mT))
        for first, second, turned in ((one, other, False), (other, one, True)):
            left, right = self._side(first, "M"), self._side(second, "N")
            if left is None or right is None or not torch.equal(left[1], right[1]):
                continue
            start, stop = int(left[1][0]), int(left[1][-1]) + 1
            every = torch.arange(self.codes.extents["M"])
            if torch.equal(left[0], every) and torch.equal(left[1], torch.arange(start, stop)):
                scale = self._scale(left[2], "M") * self._scale(right[2], "N")
                value = self._summed(start, stop) * scale
                codes = self.codes.grid(value, ("M", "N"))[:, right[0]]
                codes = codes.mT if turned else codes
                return Elements(codes.reshape(*x.codes.shape[:-1], y.codes.shape[-1]))
        raise self._other_product()

    def _side(
        self, codes: torch.Tensor, rows: str
    ) -> tuple[torch.Tensor, torch.Tensor, Expr] | None:
        """Rows and columns of A or B that a matrix is of."""
        expr = self.codes.only(codes)
        if expr is None or expr.dims != {rows, "K"}:
            return None
        at = self.codes.taken(codes, expr, (rows, "K"))
        return (*at, expr) if at else None

    def _summed(self, start: int, stop: int) -> Expr:
        """The product over a range of K; the last is the rest."""
        if (start, stop) == (0, self.codes.extents["K"]):
            return self.acc
        ends = [0, *itertools.accumulate(self.problem.inner)]
        if (start, stop) not in itertools.pairwise(ends):
            raise self._other_product()
        parts = [leaf("part", f"part {i}", 0, self.acc.dims) for i in range(len(ends) - 2)]
        rest = self.acc
        for part in parts:
            rest = rest - part
        return [*parts, rest][ends.index(start)]

    def _other_product(self) -> ProgramError:
        a, b = self.problem.sides
        message = f"is not the product of {a} with {b} that `gemm` declares; a kernel has one"
        return ProgramError(message, hint="declare what is multiplied, or make a kernel of each")

    def _scale(self, expr: Expr, rows: str) -> Expr:
        """The scale of an operand, which commutes past the product."""
        name = self.problem.gemm[rows == "N"]
        if expr.op == "operand" and expr.name == name:
            return const(1.0)
        if expr.op in ("mul", "div", "neg"):
            inside = [a for a in expr.args if "K" in a.dims]
            if len(inside) == 1 and (expr.op != "div" or inside[0] == expr.args[0]):
                scale = self._scale(inside[0], rows)
                if expr.op == "neg":
                    return -scale
                other = expr.args[1] if inside[0] == expr.args[0] else expr.args[0]
                return scale * other if expr.op == "mul" else scale / other
        if expr.op == "operand":
            raise self._other_product()
        raise ProgramError(
            f"{name} enters the GEMM through {expr.op!r}; only a scale per row of it, or a scalar,"
            " commutes past the product",
            hint=f"compute it where {name} is written, and give the result as the input",
        )
