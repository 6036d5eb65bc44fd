"""What follows from an element's place, such as a triangle."""

from __future__ import annotations

import torch

from coda_agent.agent.authors.composer.codes import Elements, Frame
from coda_agent.agent.authors.composer.elementwise import Elementwise
from coda_agent.agent.authors.composer.expression import Expr, apply, make
from coda_agent.primitives.errors import ProgramError


class Places:
    """Such values in one trace."""

    def __init__(self, elementwise: Elementwise) -> None:
        self.elementwise, self.layout = elementwise, elementwise.layout
        self._tile = tuple(self.layout.extents[d] for d in "MN")

    def counted(self, found: torch.Tensor) -> Elements | torch.Tensor:
        """Take the numbers of all rows or columns by place."""
        for dim, name in (("M", "row"), ("N", "column")):
            count = self.layout.extents[dim]
            if torch.equal(found, torch.arange(count, dtype=found.dtype)):
                made = make(f"{name}_index", dims=frozenset({dim}))
                return self.layout.codes.write(made, (count,), Frame((dim,)))
        return found

    def triangle(self, op: str, x: object, diagonal: int = 0) -> Elements | None:
        """Keep x below a diagonal, or above it; None of some constants."""
        x = self.elementwise.lift(x)
        shape = tuple(x.codes.shape)
        if shape != self._tile and {e.op for e in self.layout.codes.sources(x)} == {"const"}:
            return None
        row, column = (self.of_tile(f"{name}_index", shape) for name in ("row", "column"))
        if op == "triu":
            row, column, diagonal = column, row, -diagonal

        def masked(x: Expr, row: Expr, column: Expr) -> Expr:
            return apply("where", apply("greater_equal", row + float(diagonal), column), x, 0.0)

        return self.elementwise.apply(masked, [x, row, column], {})

    def of_tile(self, op: str, shape: tuple[int, ...], *numbers: object) -> Elements:
        """What an operation gives at each place of (M, N)."""
        if shape != self._tile:
            raise ProgramError(f"draws numbers for {list(shape)}; a kernel's are [M, N]")
        given = [self.layout.read(self.elementwise.lift(x), (), Frame(())) for x in numbers]
        made = make(op, *given, dims=frozenset("MN"))
        return self.layout.codes.write(made, shape, Frame(("M", "N")))
