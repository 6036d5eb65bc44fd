"""The product of a spec's header, and tensors in its terms."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from fractions import Fraction
from typing import NamedTuple

from coda_agent.specs.format import Header
from coda_agent.specs.layout import Axes, Entry, factors, parts, shown

Sum = dict[str, Fraction]
"""An extent as a sum of dims; "" stands for 1."""


class Read(NamedTuple):
    """A shape as it is understood."""

    canonical: tuple[Entry, ...]
    axes: Axes
    shape: tuple[Entry, ...]
    turned: bool = False
    tail: tuple[int, ...] = ()
    table: int | None = None
    order: tuple[int, ...] = ()
    flat: bool = False


def summed(entries: Iterable[Entry]) -> Sum:
    """Add extents."""
    total: Sum = {}
    for entry in entries:
        factor, dim, divisor = (entry, "", 1) if isinstance(entry, int) else parts(entry)
        if len(factors(str(entry))) > 1:
            dim = str(entry)
        total[dim] = total.get(dim, Fraction(0)) + Fraction(factor, divisor)
    return total


def product_of(entries: Sequence[Entry]) -> Sum | None:
    """Multiply extents; None where more than one is no number."""
    letters = [e for e in entries if isinstance(e, str)]
    number = math.prod(e for e in entries if isinstance(e, int))
    if len(letters) > 1 or not entries:
        return None
    return {dim: number * share for dim, share in summed(letters or [1]).items()}


def step(entries: Sequence[Entry], units: Mapping[str, int]) -> int:
    """Find what a sum of extents is a multiple of."""
    steps = (int(share * units.get(dim, 1)) for dim, share in summed(entries).items())
    return math.gcd(*steps) or 1


class Gemm:
    """The product of a header, and what stands in its terms.

    Attributes:
        halves: Whether columns j and j + N/2 are the pairs.
        lead: Entries whose product is M.
        columns: Entries whose sum is N.
        inner: Entries whose sum is K.
        dims: Names of the canonical M, N and K.
    """

    def __init__(self, header: Header) -> None:
        self.header = header
        self.first, self.second = (tuple(name.split()) for name in header.gemm)
        a, b = self.shape(self.first[0]), self.shape(self.second[0])
        ways = [(at, to) for at in ((-1,) if len(a) > 2 else (-1, 0)) for to in (1, 0)]
        joined = len(self.second) < len(self.first)  # before one weight
        sides = [self.shape(x) for x in (self.first if joined else self.first[:1])]
        found = next(
            (
                w
                for w in ways
                if len(b) == 2 and summed(s[w[0]] for s in sides) == summed([b[w[1]]])
            ),
            None,
        )
        if found is None:
            raise ValueError(
                f"gemm: shapes {self.first[0]} {shown(a)} and {self.second[0]} {shown(b)} share no "
                "dim to sum over; expected [M, K] or [K, M], and [N, K] or [K, N]"
            )
        self.at, self.to = found
        self.along_k = len(self.first) > 1
        self.lead = [e for e in (a[1:] if self.at == 0 else a[:-1]) if e != 1]
        if not any(isinstance(entry, str) for entry in self.lead):
            raise ValueError(f"gemm: {self.first[0]} {shown(a)} has no dim of rows; name it")
        self.inner = [self.shape(x)[self.at] for x in self.first]
        columns = [self.shape(x)[1 - self.to] for x in self.second]
        wanted = self.inner if self.along_k and not joined else [b[self.to]] * len(columns)
        alike = not self.along_k or len({*columns}) == 1
        if not alike or [self.shape(x)[self.to] for x in self.second] != wanted:
            raise ValueError(
                f"gemm: {', '.join(self.first)} and {', '.join(self.second)} do not fit; expected "
                "one A and several B of one K, or as many A as B, of one N"
            )
        self.columns = columns[:1] if self.along_k else columns
        self.total = summed(self.columns)
        if len(self.total) > 1:
            raise ValueError(
                f"gemm: columns {shown(self.columns)} are of several dims, so that no size of the "
                "product says what each has; name them as multiples of one dim, such as 4*N and N"
            )
        for x, scale in header.scales.items():
            if not self.along_k or x not in self.second or math.frexp(abs(scale))[0] != 0.5:
                raise ValueError(
                    f"scales: {x} by {scale:g}; expected weights of a sum of products, as in"
                    " `gemm: [[x, xa], [w, b]]`, by powers of two, which lose no bit"
                )
        self._name_dims()
        self.halves = header.pairs == "halves" or self._of_two_gates()

    def _of_two_gates(self) -> bool:
        """Tell whether B is two alike, with outputs half as wide.

        Then pairs are of one column of each. Two outputs that together have all columns are rather
        the two products.
        """
        if self.along_k or len(self.columns) != 2 or self.columns[0] != self.columns[1]:
            return False
        reads = [
            self.read(entries, output=True)
            for tensor in self.header.outputs.values()
            for entries in tensor.shape.cases.values()
        ]
        narrow = [read for read in reads if read and f"{self.dims[1]}/2" in read.canonical]
        return len(narrow) not in (0, 2)

    def shape(self, operand: str) -> tuple[Entry, ...]:
        """Give an operand's shape; several summed dims of both as one."""
        a, b = (self.header.inputs[side[0]].shape.cases[""] for side in (self.first, self.second))
        shape = self.header.inputs[operand].shape.cases[""]
        alike = len(a) == len(b) > 2 and a[:-1] == b[:-1]
        return ("*".join(map(str, shape[:-1])), shape[-1]) if alike else shape

    def _name_dims(self) -> None:
        """Name M, N and K; a letter of two keeps one name."""
        taken, sides = set(self.header.dims), list[str]()
        for entries, name in ((self.inner, "K"), (self.lead, "M"), (self.columns, "N")):
            own = str(entries[0]) if len(entries) == 1 else ""
            if own in sides or not own.isidentifier():
                own = next(x for x in (name, f"{name}_all", 2 * name) if x not in taken)
            sides.append(own)
            taken.add(own)
        k, m, n = sides
        self.dims = m, n, k
        inner, lead = set(summed(self.inner)), set(summed(self.lead))
        self.row_names = {x: m for x in lead & inner if x}
        self.column_names = {x: n for x in self.total if x and x in inner | lead}
        for entries, names in ((self.lead, self.row_names), (self.columns, self.column_names)):
            if names and len(entries) > 1:
                raise ValueError(f"gemm: dim {next(iter(names))} stands twice; use another name")

    def read(self, entries: Sequence[Entry], *, output: bool) -> Read | None:
        """Read what a shape is over, if a program takes it."""
        core = [i for i, e in enumerate(entries) if e != 1]
        leading = self.leading(entries) if output else self.lead
        own, lead, order = [entries[i] for i in core], len(leading), ()
        rows, turned = own[:lead] == leading, False
        if not own:
            return Read((), (), tuple(entries))
        if rows and len(own) == lead and self._word(own):  # a square product's
            rows = core[0] == 0 if len(entries) > 1 else output
        of_rows = core[:lead] if rows else []
        over = [i for i in core if i not in of_rows]
        word = self._word([entries[i] for i in over])
        if over and word is None and lead == 1 and own[1:] == leading:
            of_rows, over, turned = core[1:], core[:1], True
            word = self._word(own[:1])
        elif over and word is None and output and len(own) == len(entries):
            of_rows = [i for i in core if entries[i] in leading]
            over = [i for i in core if i not in of_rows]
            fits = [entries[i] for i in of_rows] == leading
            word = self._word([entries[i] for i in over]) if fits else None
            straight = [*of_rows, *over]
            moved = [i for i, at in enumerate(straight) if i != at]
            order = tuple(straight.index(i) - len(own) for i in core[min(moved, default=0) :])
        if over and word is None:
            return None
        shape = self.renamed(entries, of_rows, self.row_names)
        shape = self.renamed(shape, over, self.column_names)
        sides = [(self.dims[0], of_rows), (word or "", over)]
        sides = [(name, places) for name, places in sides if places]
        axes = tuple(tuple(shape[i] for i in places) for _, places in sides)
        last = axes[-1] if over and len(over) > 1 else ()
        tail = tuple(e if isinstance(e, int) else -1 for e in last)
        names = tuple(name for name, _ in sides)
        return Read(names, axes, shape, turned, tail, order=order, flat=leading != self.lead)

    def leading(self, entries: Sequence[Entry]) -> list[Entry]:
        """Give the rows' entries as an output has them, maybe multiplied."""
        joined = "*".join(map(str, self.lead))
        return [joined] if joined in entries else self.lead

    def table(self, entries: Sequence[Entry]) -> Read | None:
        """Read an input over some rows' dims, or repeated over columns."""
        starts = self.lead[:1], self.lead[-1:]
        for i in range(len(entries) + 1):
            (over_rows, rows), (over, columns) = (
                ([j for j in at if entries[j] != 1], [entries[j] for j in at if entries[j] != 1])
                for at in (range(i), range(i, len(entries)))
            )
            r = 1 if not rows else self.dims[0] if rows == self.lead else rows[0]
            if rows and rows != self.lead and rows not in starts:
                continue
            number, word = math.prod(e for e in columns if isinstance(e, int)), self._word(columns)
            units = {"": 1} | {x: dim.multiple_of for x, dim in self.header.dims.items()}
            each = all(isinstance(e, int) for e in columns)
            if word is None and (not each or step(self.columns, units) % number):
                continue
            shape = self.renamed(entries, over_rows, self.row_names)
            shape = self.renamed(shape, over, self.column_names)
            axes = tuple(tuple(shape[j] for j in at) for at in (over_rows, over))
            return Read((r, word or number), axes, shape, table=i)
        return None

    def _word(self, over: Sequence[Entry]) -> str | None:
        """Write columns in terms of N, such as "N/2"."""
        share, n = product_of(over), self.dims[1]
        if share == self.total:
            return n
        if share is None or len(self.total) > 1 or share.keys() != self.total.keys():
            return None
        ratio = next(iter(share.values())) / next(iter(self.total.values()))
        factor = f"{ratio.numerator}*" if ratio.numerator > 1 else ""
        return f"{factor}{n}" + (f"/{ratio.denominator}" if ratio.denominator > 1 else "")

    def renamed(
        self, entries: Sequence[Entry], at: Sequence[int], names: Mapping[str, str]
    ) -> tuple[Entry, ...]:
        """Rename the dims of a shape at some places."""
        found = list(entries)
        for i in at:
            if isinstance(entry := found[i], str) and (dim := parts(entry)[1]) in names:
                found[i] = entry.replace(dim, names[dim])
        return tuple(found)

    def second_names(self) -> Iterator[tuple[str, str]]:
        """List dims with their other names; a square product's has two more."""
        yield from self.row_names.items()
        yield from self.column_names.items()
