"""From what a spec declares to the canonical form, and the layout between the two.

- A is (…, M, K) or (K, M), B (N, K) or (K, N); several of one lie side by side along N or K.
- Every other tensor is over rows, over columns, over both, or a number; extents of 1 do not count.
- Where letters leave it open, position tells: rows stand before columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any, NamedTuple

from coda_agent.primitives.kinds import HALVES
from coda_agent.specs.format import Dim, Header, Output, Shape
from coda_agent.specs.layout import Axes, Entry, Layout, Part, Place, extent, factors, parts, shown

Sum = dict[str, Fraction]
"""An extent as a sum of dims; "" stands for 1."""


def canonical(header: Header) -> tuple[dict[str, Any], Layout | None]:
    """The fields of the canonical declarations that differ from the header's, and how the header's
    own tensors lie in them; nothing and None where they are canonical.

    Raises:
        ValueError: No view or packing makes the one of the other; names the tensor.
    """
    return Product(header).layout() if readable(header) else ({}, None)


def readable(header: Header) -> bool:
    """Whether A and B are inputs of two dims or more each; `faults` says it of the others."""
    names = [x for gemm in header.gemm for x in gemm.split()]
    shapes = [header.inputs[x].shape.cases.get("", ()) for x in names if x in header.inputs]
    return len(shapes) == len(names) and all(len(shape) > 1 for shape in shapes)


class _Read(NamedTuple):
    """A shape as it is understood."""

    canonical: tuple[Entry, ...]
    axes: Axes
    shape: tuple[Entry, ...]
    turned: bool = False
    tail: tuple[int, ...] = ()
    table: int | None = None
    order: tuple[int, ...] = ()
    flat: bool = False


def _sum(entries: Iterable[Entry]) -> Sum:
    total: Sum = {}
    for entry in entries:
        factor, dim, divisor = (entry, "", 1) if isinstance(entry, int) else parts(entry)
        if len(factors(str(entry))) > 1:
            dim = str(entry)
        total[dim] = total.get(dim, Fraction(0)) + Fraction(factor, divisor)
    return total


def _product(entries: Sequence[Entry]) -> Sum | None:
    """Of entries of which one at most is no number."""
    letters = [e for e in entries if isinstance(e, str)]
    number = math.prod(e for e in entries if isinstance(e, int))
    if len(letters) > 1 or not entries:
        return None
    return {dim: number * share for dim, share in _sum(letters or [1]).items()}


class Product:
    """The product of a header, and what else stands in terms of it.

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
        a, b = self._shape(self.first[0]), self._shape(self.second[0])
        ways = [(at, to) for at in ((-1,) if len(a) > 2 else (-1, 0)) for to in (1, 0)]
        joined = len(self.second) < len(self.first)  # before one weight
        sides = [self._shape(x) for x in (self.first if joined else self.first[:1])]
        found = next(
            (w for w in ways if len(b) == 2 and _sum(s[w[0]] for s in sides) == _sum([b[w[1]]])),
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
        self.inner = [self._shape(x)[self.at] for x in self.first]
        columns = [self._shape(x)[1 - self.to] for x in self.second]
        wanted = self.inner if self.along_k and not joined else [b[self.to]] * len(columns)
        alike = not self.along_k or len({*columns}) == 1
        if not alike or [self._shape(x)[self.to] for x in self.second] != wanted:
            raise ValueError(
                f"gemm: {', '.join(self.first)} and {', '.join(self.second)} do not fit; expected "
                "one A and several B of one K, or as many A as B, of one N"
            )
        self.columns = columns[:1] if self.along_k else columns
        self.total = _sum(self.columns)
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
        """Whether B is two alike and some output has the columns of one: so pairs are of one column
        of each. Two outputs that together have all columns are rather the two products."""
        if self.along_k or len(self.columns) != 2 or self.columns[0] != self.columns[1]:
            return False
        reads = [
            self.read(entries, output=True)
            for tensor in self.header.outputs.values()
            for entries in tensor.shape.cases.values()
        ]
        narrow = [read for read in reads if read and f"{self.dims[1]}/2" in read.canonical]
        return len(narrow) not in (0, 2)

    def _shape(self, operand: str) -> tuple[Entry, ...]:
        """An operand's shape; several dims that both have, and are summed, as one."""
        a, b = (self.header.inputs[side[0]].shape.cases[""] for side in (self.first, self.second))
        shape = self.header.inputs[operand].shape.cases[""]
        alike = len(a) == len(b) > 2 and a[:-1] == b[:-1]
        return ("*".join(map(str, shape[:-1])), shape[-1]) if alike else shape

    def _name_dims(self) -> None:
        """Name M, N and K. A letter that is two of them keeps its name as K, else as M."""
        taken, sides = set(self.header.dims), list[str]()
        for entries, name in ((self.inner, "K"), (self.lead, "M"), (self.columns, "N")):
            own = str(entries[0]) if len(entries) == 1 else ""
            if own in sides or not own.isidentifier():
                own = next(x for x in (name, f"{name}_all", 2 * name) if x not in taken)
            sides.append(own)
            taken.add(own)
        k, m, n = sides
        self.dims = m, n, k
        inner, lead = set(_sum(self.inner)), set(_sum(self.lead))
        self.row_names = {x: m for x in lead & inner if x}
        self.column_names = {x: n for x in self.total if x and x in inner | lead}
        for entries, names in ((self.lead, self.row_names), (self.columns, self.column_names)):
            if names and len(entries) > 1:
                raise ValueError(f"gemm: dim {next(iter(names))} stands twice; use another name")

    def read(self, entries: Sequence[Entry], *, output: bool) -> _Read | None:
        """What a shape is over; None where that is nothing a program takes."""
        core = [i for i, e in enumerate(entries) if e != 1]
        leading = self._leading(entries) if output else self.lead
        own, lead, order = [entries[i] for i in core], len(leading), ()
        rows, turned = own[:lead] == leading, False
        if not own:
            return _Read((), (), tuple(entries))
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
        shape = self._renamed(entries, of_rows, self.row_names)
        shape = self._renamed(shape, over, self.column_names)
        sides = [(self.dims[0], of_rows), (word or "", over)]
        sides = [(name, places) for name, places in sides if places]
        axes = tuple(tuple(shape[i] for i in places) for _, places in sides)
        last = axes[-1] if over and len(over) > 1 else ()
        tail = tuple(e if isinstance(e, int) else -1 for e in last)
        names = tuple(name for name, _ in sides)
        return _Read(names, axes, shape, turned, tail, order=order, flat=leading != self.lead)

    def _leading(self, entries: Sequence[Entry]) -> list[Entry]:
        """The rows' entries as an output has them: as A, or as their product."""
        joined = "*".join(map(str, self.lead))
        return [joined] if joined in entries else self.lead

    def _table(self, entries: Sequence[Entry]) -> _Read | None:
        """What an input is over that has some of the rows' dims, or is repeated over columns."""
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
            if word is None and (not each or _step(self.columns, units) % number):
                continue
            shape = self._renamed(entries, over_rows, self.row_names)
            shape = self._renamed(shape, over, self.column_names)
            axes = tuple(tuple(shape[j] for j in at) for at in (over_rows, over))
            return _Read((r, word or number), axes, shape, table=i)
        return None

    def _word(self, over: Sequence[Entry]) -> str | None:
        """Columns in terms of N, such as "N/2"."""
        share, n = _product(over), self.dims[1]
        if share == self.total:
            return n
        if share is None or len(self.total) > 1 or share.keys() != self.total.keys():
            return None
        ratio = next(iter(share.values())) / next(iter(self.total.values()))
        factor = f"{ratio.numerator}*" if ratio.numerator > 1 else ""
        return f"{factor}{n}" + (f"/{ratio.denominator}" if ratio.denominator > 1 else "")

    def _renamed(
        self, entries: Sequence[Entry], at: Sequence[int], names: Mapping[str, str]
    ) -> tuple[Entry, ...]:
        """A shape with the dims at some places by their names there."""
        found = list(entries)
        for i in at:
            if isinstance(entry := found[i], str) and (dim := parts(entry)[1]) in names:
                found[i] = entry.replace(dim, names[dim])
        return tuple(found)

    def _operand(self, names: tuple[str, ...]) -> tuple[Shape, Place]:
        """A or B."""
        (m, n, k), first = self.dims, names == self.first
        own, at = (m, self.at) if first else (n, self.to)
        found = list[Part]()
        for x in names:
            shape = self._shape(x)
            outer = [i for i, e in enumerate(shape) if i != at % len(shape) and e != 1]
            shape = self._renamed(shape, outer, self.row_names if first else self.column_names)
            axes = tuple(shape[i] for i in outer), (shape[at],)
            units, scale = _units([shape]), self.header.scales.get(x, 1.0)
            several = self.header.inputs[x].shape.cases[""]
            flat = len(several) > len(shape)
            cases = {"": several if flat else shape}, {"": axes}
            found.append(Part(x, *cases, turned=at == 0, units=units, scale=scale, flat=flat))
        halves = self.halves and not first
        element = self.header.inputs[names[0]].dtype
        # The tensor core reads 8-bit operands along K only.
        narrow = "float8_e4m3fn" in self.header.types.get(element, (element,))
        packed = len(names) > 1 or halves or (narrow and at == 0)
        if packed and any(part.flat for part in found):
            some = ", ".join(names)
            raise ValueError(f"{some}: what is packed has one dim to sum over; give a matrix")
        axis = int(self.along_k)
        place = Place(
            "_".join(names), tuple(found), axis, _shares(found, axis), halves, packed=packed
        )
        return Shape("", {"": (own, k)}), place

    def _other(
        self, group: tuple[str, ...], tensors: Mapping[str, Output], *, output: bool
    ) -> tuple[Shape, Place] | None:
        """A tensor that is neither A nor B; None where it is nothing a program takes."""
        found, shape = list[Part](), Shape("", {})
        for x in group:
            parameter, cases = tensors[x].shape
            reads = {case: self.read(entries, output=output) for case, entries in cases.items()}
            whole = {*self.dims[:2], f"2*{self.dims[1]}"}
            partly = any(not read or {*read.canonical} - whole for read in reads.values())
            if partly and not output and len(group) == 1 and not tensors[x].dtype.startswith("int"):
                reads = {case: self._table(entries) for case, entries in cases.items()}
            known = {case: read for case, read in reads.items() if read is not None}
            if known.keys() != reads.keys():
                return None
            turned = any(read.turned for read in known.values())
            shapes = {case: read.shape for case, read in known.items()}
            axes = {case: read.axes for case, read in known.items()}
            first = next(iter(known.values()))
            units = () if first.table is not None else _units(shapes.values())
            found.append(
                Part(
                    x, shapes, axes, parameter, turned, first.tail, units, first.table,
                    first.order, first.flat,
                )
            )  # fmt: skip
            shape = Shape(parameter, {case: read.canonical for case, read in known.items()})
        axis = max(map(len, shape.cases.values())) - 1
        whole = (*self.dims[:axis], self.dims[1])
        if len(group) > 1:
            shape = Shape("", {"": whole})
        halves = self.halves and whole in shape.cases.values()
        if halves and (axis or output) and len(group) == 1:
            instead = "only a vector can be packed so"
            if output:
                instead = "declare and return its halves, and name them in `split`"
            raise ValueError(
                f"{group[0]}: with `pairs: halves` a kernel has columns j and j + N/2 together; "
                f"{instead}"
            )
        packed = not output and (halves or len(group) > 1 or found[0].turned)
        place = self.header.in_place
        added = {*group} & {place.input, place.output} if place else set[str]()
        if added and (packed or found[0].turned):
            raise ValueError(f"in_place: a kernel adds to {added.pop()} as [M, N] alone")
        axis = max(axis, 0)
        shares = _shares(found, axis)
        return shape, Place("_".join(group), tuple(found), axis, shares, halves, packed=packed)

    def _groups(self, tensors: Mapping[str, Output], *, output: bool) -> list[tuple[str, ...]]:
        """Names in order, those that lie side by side in one canonical tensor together."""
        names, groups = list(tensors), list[tuple[str, ...]]()
        while names:
            x, count = names[0], 1
            gemm = next((g for g in (self.first, self.second) if not output and x in g), None)
            shapes = [tensors[y].shape.cases.get("") for y in names]
            if output and x in self.header.split:
                count = len(self.header.split)
            elif output:
                count = self._filling([tensors[y] for y in names])
            elif gemm is None and len(self.columns) > 1:
                vectors = [(entry,) for entry in self.columns]
                count = len(vectors) if shapes[: len(vectors)] == vectors else 1
            groups.append(gemm or tuple(names[:count]))
            names = [y for y in names if y not in groups[-1]]
        return groups

    def _filling(self, tensors: Sequence[Output]) -> int:
        """How many tensors, from the first on, have the product's columns together; 1 if none."""
        total, leading = Sum(), self._leading(tensors[0].shape.cases.get("", ()))
        for i, tensor in enumerate(tensors):
            shape = [e for e in tensor.shape.cases.get("", ()) if e != 1]
            rows = [e for e in shape if e in leading]
            share = _product([e for e in shape if e not in rows]) if rows == leading else None
            if share is None or tensor.dtype != tensors[0].dtype:
                return 1
            for dim, some in share.items():
                total[dim] = total.get(dim, Fraction(0)) + some
            if total == self.total:
                # Two of half the columns are what two gates give, unless B is of two parts itself.
                gates = self.halves or self.columns[0] in self.dims
                halves = i == 1 and {dim: 2 * some for dim, some in share.items()} == total
                return 1 if halves and gates else i + 1
        return 1

    def layout(self) -> tuple[dict[str, Any], Layout | None]:
        """What `canonical` gives."""
        header, unread = self.header, list[str]()
        made: dict[str, Any] = {"inputs": {}, "outputs": {}}
        places: dict[str, list[Place]] = {"inputs": [], "outputs": []}
        for key, tensors in (("inputs", header.inputs), ("outputs", header.outputs)):
            output = key == "outputs"
            for group in self._groups(tensors, output=output):
                first = tensors[group[0]]
                if any(
                    tensors[x].model_copy(update={"shape": first.shape}) != first for x in group
                ):
                    some = ", ".join(group)
                    raise ValueError(f"{some} are one tensor of the kernel; declare them alike")
                gemm = not output and group in (self.first, self.second)
                found = self._operand(group) if gemm else self._other(group, tensors, output=output)
                if found is None:
                    unread.append(group[0])
                    made[key][group[0]] = first
                    continue
                shape, place = found
                if not output and not gemm and shape.cases == {"": ()} and place.parts[0].units:
                    place = replace(place, dtype=first.dtype if first.dtype != "float32" else "")
                if output and self._reduced(first, shape):
                    place = replace(place, dtype=first.dtype)
                    first = first.model_copy(update={"dtype": "float32"})
                made[key][place.name] = first.model_copy(update={"shape": shape})
                places[key].append(place)
        a, b = "_".join(self.first), "_".join(self.second)
        moved = any(
            place.halves or place.packed or any(part.turned for part in place.parts)
            for place in (*places["inputs"], *places["outputs"])
        )
        if made["inputs"] == header.inputs and made["outputs"] == header.outputs and not moved:
            return {}, None
        if unread:
            shape = next(iter({**header.inputs, **header.outputs}[unread[0]].shape.cases.values()))
            lead = ", ".join(map(str, self.lead))
            whole = [*self.lead, *self.columns]
            within = {*shape} <= {1, *whole}
            step = "use it in the next kernel"
            if unread[0] in header.outputs:
                step = (
                    f"return {shown(whole)}, or what is reduced of it, and do the rest with torch"
                )
            elif within:
                step = f"expand it to {shown(whole)} in the call"
            raise ValueError(
                f"{unread[0]}: shape {shown(shape)} is not over rows [{lead}], over columns "
                f"{shown(self.columns)}, or over both; {step}"
            )
        units = {"": 1} | {x: dim.multiple_of for x, dim in header.dims.items()}
        for several in (factors(e) for e in self.inner if isinstance(e, str)):
            units["*".join(several)] = math.prod(units.get(x, 1) for x in several)
        shapes = header.check_shapes, header.bench_shapes
        checks, benches = ([self._all(sizes) for sizes in some] for some in shapes)
        layout = Layout(
            (a, b),
            self.dims,
            self._renamed(self.lead, range(len(self.lead)), self.row_names),
            self._renamed(self.columns, range(len(self.columns)), self.column_names),
            tuple(self.inner),
            {**units, **{new: units[old] for old, new in self._second_names()}},
            (*checks, *benches),
            tuple(places["inputs"]),
            tuple(places["outputs"]),
        )
        m, n, k = self.dims
        made["dims"] = {
            m: Dim(multiple_of=math.prod(_step([e], units) for e in self.lead)),
            n: _dim(self.columns, header.dims, units),
            k: _dim(self.inner, header.dims, units),
        }
        made["check_shapes"], made["bench_shapes"] = (
            tuple(map(layout.extents, some)) for some in (checks, benches)
        )
        return {**made, "gemm": (a, b)}, layout

    def _reduced(self, output: Output, shape: Shape) -> bool:
        """Whether an output is a reduction to 16 bits; what an index gathers may have them."""
        m, n, _ = self.dims
        gathers = any(
            x.dtype in ("int32", "int64")
            and [e for e in x.shape.cases.get("", ()) if e != 1] == self.lead
            for x in self.header.inputs.values()
        )
        vectors = {(n,)} if gathers else {(n,), (m,)}
        narrow = {*HALVES}.issuperset(self.header.types.get(output.dtype, (output.dtype,)))
        return narrow and vectors.issuperset(shape.cases.values())

    def _all(self, sizes: Mapping[str, int]) -> dict[str, int]:
        """Declared sizes, with those of dims that have two names."""
        declared = self.header.dims
        if sizes.keys() != declared.keys():
            got, known = ", ".join(sizes) or "none", ", ".join(declared)
            raise ValueError(f"sizes are given for {got}; expected {known}")
        return {**sizes, **{new: sizes[old] for old, new in self._second_names()}}

    def _second_names(self) -> Iterator[tuple[str, str]]:
        """List dims that have another name, with that; one of a square product has two more."""
        yield from self.row_names.items()
        yield from self.column_names.items()


def _units(shapes: Iterable[Sequence[Entry]]) -> tuple[int, ...]:
    """Dimensions of extent 1, from the last one, -1.

    Raises:
        ValueError: They are not the same in all shapes of a tensor.
    """
    found = {tuple(i - len(s) for i, e in enumerate(s) if e == 1) for s in shapes}
    if len(found) > 1:
        raise ValueError("a tensor's shapes by cases have different dims of 1; leave these out")
    return found.pop()


def _dim(entries: Sequence[Entry], dims: Mapping[str, Dim], units: Mapping[str, int]) -> Dim:
    """The dim of a sum of entries, which has one extent if each of them has."""
    known = {x: dim.only for x, dim in dims.items() if dim.only}
    fixed = known.keys() | {""} >= _sum(entries).keys()
    only = sum(extent(e, known) for e in entries) if fixed else None
    return Dim(multiple_of=_step(entries, units), only=only)


def _step(entries: Sequence[Entry], units: Mapping[str, int]) -> int:
    """What a sum of entries is a multiple of."""
    steps = (int(share * units.get(dim, 1)) for dim, share in _sum(entries).items())
    return math.gcd(*steps) or 1


def _shares(found: Sequence[Part], axis: int) -> tuple[int, ...]:
    """What each of several parts has of the axis they lie along; none where sizes alone tell."""
    if len(found) == 1:
        return (1,)
    sums = [_product(part.axes[""][axis]) or {} for part in found]
    if len({*map(tuple, sums)}) > 1 or len(sums[0]) != 1:
        return ()
    shares = [share for some in sums for share in some.values()]
    unit = Fraction(1, math.lcm(*(share.denominator for share in shares)))
    return tuple(int(share / unit) for share in shares)
