"""What enters a graph, as leaves of expressions."""

from __future__ import annotations

from collections.abc import Iterable

from coda_agent.agent.authors.composer.codes import Elements, Frame, Unusable
from coda_agent.agent.authors.composer.expression import Expr, leaf, walk
from coda_agent.agent.authors.composer.layout import Layout
from coda_agent.primitives import ColIndex
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.tables import TABLES, Table

_REPEATED = "repeat or expand it to one of these in the call, or use it in the next kernel"


class Inputs:
    """The inputs of one trace.

    Attributes:
        leaves: Their expressions by name, but for tables.
    """

    def __init__(self, layout: Layout) -> None:
        self.problem, self.layout = layout.problem, layout
        self.leaves: dict[str, Expr] = {}
        self._kinds: dict[str, str] = {}

    def entered(self, position: int, name: str) -> Elements | Unusable:
        """The elements of an input, the `position`th."""
        slot = self.problem.inputs[name]
        if slot.reason:
            return Unusable(slot.reason, _REPEATED)
        if slot.kind is Table:
            self._kinds[name] = "Table"
            table = self.layout.parts.table(name, position, slot.shape)
            return Elements(slot.restored(table.codes)) if slot.restored else table
        if name in self.problem.gemm:
            frame = Frame(("M" if name == self.problem.gemm[0] else "N", "K"))
        else:
            assert slot.kind is not None  # else it has a reason
            frame = Frame(slot.kind.dims)
            self._kinds[name] = slot.kind.__name__
        op = "index" if slot.kind is ColIndex else "operand"
        self.leaves[name] = expr = leaf(op, name, position, frozenset(frame.dims))
        if slot.restored:
            return Elements(slot.restored(self.layout.codes.grid(expr, frame.dims)))
        return self.layout.codes.write(expr, slot.shape, frame)

    def operands(self, values: Iterable[Expr]) -> dict[str, str]:
        """The annotations of the operands that some values use, by name."""
        used: dict[str, set[float]] = {}
        for e in walk([*values]):
            if e.op in ("operand", "index"):
                used.setdefault(e.name, set()).add(e.value)
        return {x: self._kind(x, used[x]) for x in self._kinds if x in used}

    def _kind(self, name: str, read: set[float]) -> str:
        """The annotation of an operand; a table's by how it is read."""
        if self._kinds[name] != "Table":
            return self._kinds[name]
        if len(read) > 1:
            ways = " and ".join(sorted(TABLES[int(way)].__name__ for way in read))
            raise ProgramError(
                f"{self.problem.source}reads input {name!r} in two ways, as {ways}",
                hint="give it as two inputs",
            )
        return TABLES[int(read.pop())].__name__
