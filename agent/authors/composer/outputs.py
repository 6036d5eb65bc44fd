"""What a kernel stores of a graph's results."""

from __future__ import annotations

from collections.abc import Mapping

import torch

from coda_agent.agent.authors.composer.canonical import canonical
from coda_agent.agent.authors.composer.codes import Elements, Unusable
from coda_agent.agent.authors.composer.expression import (
    AGAIN,
    NEXT,
    REDUCTIONS,
    Expr,
    by_columns,
    walk,
)
from coda_agent.agent.authors.composer.layout import Layout
from coda_agent.agent.authors.composer.problem import STORED, Columns, Refusal
from coda_agent.agent.authors.composer.rounding import before_store
from coda_agent.primitives.errors import ProgramError
from coda_agent.primitives.kinds import Resource

_ALIKE = (
    "compute all parts of the product's columns alike: what differs, such as a scale of one, is"
    " part of its weight, or of a vector over all columns; or split by numbers, .split([384, 512],"
    " -1), which fix the size"
)


class Outputs:
    """The outputs of one trace; `leaves` are its inputs."""

    def __init__(self, layout: Layout, leaves: Mapping[str, Expr]) -> None:
        self.problem, self.layout, self.leaves = layout.problem, layout, leaves
        self._starts: dict[str, tuple[int, int]] = {}
        self.parts: dict[str, tuple[str, int, int]] = {}

    def of(self, returned: object) -> tuple[dict[str, Expr], dict[str, str]]:
        """What outputs hold, and their kinds; ranges of columns in one.

        Raises:
            Refusal: a kernel cannot write one.
        """
        updated, source = self.problem.updated, self.problem.source
        values: dict[str, Expr] = {}
        outputs: dict[str, str] = {}
        for name in self.problem.outputs:
            value = returned.get(name) if isinstance(returned, dict) else None
            try:
                values[name], outputs[name] = self.one(name, value)
            except ProgramError as error:
                message = f"{source}output {name!r}{error.message}"
                raise Refusal(message, error.hint, output=name) from None
            if name in updated:
                if outputs[name] != "Tile":
                    m, n, _ = self.problem.dims
                    message = f"{source}output {name!r}: a kernel updates only [{m}, {n}] in place"
                    raise ProgramError(message, hint="leave `in_place` out")
                # Stored as what is added to the old value, which cancels.
                outputs[name] = "AddTile"
                values[name] -= self.leaves[updated[name]]
        self._join(values, outputs)
        values = dict(zip(values, canonical(list(values.values())), strict=True))
        for name, old in updated.items():
            for output, value in values.items():
                if self.leaves[old] in walk([value]):
                    raise ProgramError(
                        f"{source}output {output!r} needs {old!r}, which {name!r}"
                        f" overwrites; a kernel only adds to it, {name} = {old} + ...",
                        hint="leave `in_place` out",
                    )
        return values, outputs

    def _join(self, values: dict[str, Expr], outputs: dict[str, str]) -> None:
        """Join outputs that are ranges of columns and lie apart."""
        open_ends: dict[str, int] = {}
        scale = self.layout.count(self.problem.extents["N"]) / self.problem.extents["N"]
        ranges = {x: (round(a * scale), round(b * scale)) for x, (a, b) in self._starts.items()}
        chosen: dict[str, list[tuple[int, Expr]]] = {}
        for name in sorted(ranges, key=ranges.__getitem__):
            (start, stop), value = ranges[name], values[name]
            dtype = self.problem.outputs[name].dtype
            fits = (
                x
                for x, end in open_ends.items()
                if end <= start and self.problem.outputs[x].dtype == dtype
            )
            into = next(fits, name)
            open_ends[into] = stop
            chosen.setdefault(into, []).append((stop, value))
            self.parts[name] = into, start, stop
        for name in ranges:
            outputs.pop(name)
            values.pop(name)
        for name, several in chosen.items():
            outputs[name], values[name] = "Tile", by_columns(several)

    def one(self, name: str, value: object) -> tuple[Expr, str]:
        """What an output holds, and its kind.

        Raises:
            ProgramError: A kernel cannot write it; the message continues the output's name.
        """
        if not isinstance(value, Elements):
            if isinstance(value, Unusable):
                raise ProgramError(f": {value.reason}", hint=value.hint)
            raise ProgramError(": depends on no input", hint="leave the output out")
        m, n, _ = self.problem.dims
        slot = self.problem.outputs[name]
        if slot.kind is None or tuple(value.codes.shape) != slot.shape:
            words = self.problem.shape_words(value.codes.shape) if slot.kind else slot.words
            raise ProgramError(
                f" is {words}; a kernel writes [{m}, {n}], [{m}, {n}/2], [{m}, 2*{n}] and"
                " reductions",
                hint="return what it is made of, and put it together with torch",
            )
        kind, stored = slot.kind, (*STORED, Columns)
        try:
            expr = self._stored(name, slot.straight(value.codes), kind)
        except ProgramError as error:
            if slot.joined:
                raise ProgramError(": its parts are not computed alike", hint=_ALIKE) from None
            raise ProgramError(f" {error.message}", hint=error.hint) from None
        if any(e.op == "part" for e in walk(list(canonical([expr])))):
            raise ProgramError(
                f" does not add the products of {self.problem.sides[0]} alike; a kernel sums them"
                " in one",
                hint="fold the factor into the weight once, before it is packed, and leave it out",
            )
        if any(e.op == "centred" for e in walk([expr])):
            raise ProgramError(f" {AGAIN}", hint=NEXT)
        alone = {op: r.kind for op, r in REDUCTIONS.items()} | {"gather": "RowGather"}
        if (kind in stored) == (expr.op in alone):
            raise ProgramError(
                f" is computed by {expr.op!r}; a kernel writes full or half tiles, and [{m}] or"
                f" [{n}] only as a reduction itself, [{m}] also as a gather",
                hint="return the reduction itself, and compute with it in the next kernel",
            )
        if kind in stored and len(expr.dims) < 2:
            raise ProgramError(
                " is the same in every row or column", hint="return it without the other dim"
            )
        return before_store(expr, slot.dtype), alone.get(expr.op, kind.__name__)

    def _stored(self, name: str, codes: torch.Tensor, kind: type[Resource]) -> Expr:
        if kind is not Columns:
            return self.layout.stored(codes, kind)
        if (known := self.layout.range(codes)) is None:
            raise ProgramError("is a range of columns, whose elements are computed otherwise")
        self._starts[name] = known[1], known[1] + codes.shape[1]
        return known[0]
