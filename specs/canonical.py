"""From what a spec declares to the canonical form, and their layout.

- A is (…, M, K) or (K, M), B (N, K) or (K, N); several of one lie side by side along N or K.
- Every other tensor is over rows, over columns, over both, or a number; extents of 1 do not count.
- Where letters leave it open, position tells: rows stand before columns.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from fractions import Fraction
from typing import Any

from coda_agent.primitives.kinds import HALVES
from coda_agent.specs.format import Dim, Header, Output, Shape
from coda_agent.specs.gemm import Gemm, Sum, product_of, step, summed
from coda_agent.specs.layout import Entry, Layout, Part, Place, extent, factors, shown


def canonical(header: Header) -> tuple[dict[str, Any], Layout | None]:
    """Find the canonical declarations, and how the header's tensors lie in them.

    They are the fields that differ; nothing and None where the header's are canonical.

    Raises:
        ValueError: No view or packing makes the one of the other; names the tensor.
    """
    if not readable(header):
        return {}, None
    product = Gemm(header)
    made, places, unread = _tensors(product)
    a, b = "_".join(product.first), "_".join(product.second)
    moved = any(
        place.halves or place.packed or any(part.turned for part in place.parts)
        for place in (*places["inputs"], *places["outputs"])
    )
    if made["inputs"] == header.inputs and made["outputs"] == header.outputs and not moved:
        return {}, None
    if unread:
        raise _unread(product, unread[0])
    units = {"": 1} | {x: dim.multiple_of for x, dim in header.dims.items()}
    for several in (factors(e) for e in product.inner if isinstance(e, str)):
        units["*".join(several)] = math.prod(units.get(x, 1) for x in several)
    shapes = header.check_shapes, header.bench_shapes
    checks, benches = ([_all(product, sizes) for sizes in some] for some in shapes)
    layout = Layout(
        (a, b),
        product.dims,
        product.renamed(product.lead, range(len(product.lead)), product.row_names),
        product.renamed(product.columns, range(len(product.columns)), product.column_names),
        tuple(product.inner),
        {**units, **{new: units[old] for old, new in product.second_names()}},
        (*checks, *benches),
        tuple(places["inputs"]),
        tuple(places["outputs"]),
    )
    m, n, k = product.dims
    made["dims"] = {
        m: Dim(multiple_of=math.prod(step([e], units) for e in product.lead)),
        n: _dim(product.columns, header.dims, units),
        k: _dim(product.inner, header.dims, units),
    }
    made["check_shapes"], made["bench_shapes"] = (
        tuple(map(layout.extents, some)) for some in (checks, benches)
    )
    return {**made, "gemm": (a, b)}, layout


def readable(header: Header) -> bool:
    """Tell whether A and B are inputs of two dims or more."""
    names = [x for gemm in header.gemm for x in gemm.split()]
    shapes = [header.inputs[x].shape.cases.get("", ()) for x in names if x in header.inputs]
    return len(shapes) == len(names) and all(len(shape) > 1 for shape in shapes)


def _operand(product: Gemm, names: tuple[str, ...]) -> tuple[Shape, Place]:
    (m, n, k), first = product.dims, names == product.first
    own, at = (m, product.at) if first else (n, product.to)
    found = list[Part]()
    for x in names:
        shape = product.shape(x)
        outer = [i for i, e in enumerate(shape) if i != at % len(shape) and e != 1]
        shape = product.renamed(shape, outer, product.row_names if first else product.column_names)
        axes = tuple(shape[i] for i in outer), (shape[at],)
        units, scale = _units([shape]), product.header.scales.get(x, 1.0)
        several = product.header.inputs[x].shape.cases[""]
        flat = len(several) > len(shape)
        cases = {"": several if flat else shape}, {"": axes}
        found.append(Part(x, *cases, turned=at == 0, units=units, scale=scale, flat=flat))
    halves = product.halves and not first
    element = product.header.inputs[names[0]].dtype
    # The tensor core reads 8-bit operands along K only.
    narrow = "float8_e4m3fn" in product.header.types.get(element, (element,))
    packed = len(names) > 1 or halves or (narrow and at == 0)
    if packed and any(part.flat for part in found):
        some = ", ".join(names)
        raise ValueError(f"{some}: what is packed has one dim to sum over; give a matrix")
    axis = int(product.along_k)
    place = Place("_".join(names), tuple(found), axis, _shares(found, axis), halves, packed=packed)
    return Shape("", {"": (own, k)}), place


def _other(
    product: Gemm, group: tuple[str, ...], tensors: Mapping[str, Output], *, output: bool
) -> tuple[Shape, Place] | None:
    """Read a tensor beside A and B, if a program takes it."""
    found, shape = list[Part](), Shape("", {})
    for x in group:
        parameter, cases = tensors[x].shape
        reads = {case: product.read(entries, output=output) for case, entries in cases.items()}
        whole = {*product.dims[:2], f"2*{product.dims[1]}"}
        partly = any(not read or {*read.canonical} - whole for read in reads.values())
        if partly and not output and len(group) == 1 and not tensors[x].dtype.startswith("int"):
            reads = {case: product.table(entries) for case, entries in cases.items()}
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
    whole = (*product.dims[:axis], product.dims[1])
    if len(group) > 1:
        shape = Shape("", {"": whole})
    halves = product.halves and whole in shape.cases.values()
    if halves and (axis or output) and len(group) == 1:
        instead = "only a vector can be packed so"
        if output:
            instead = "declare and return its halves, and name them in `split`"
        raise ValueError(
            f"{group[0]}: with `pairs: halves` a kernel has columns j and j + N/2 together; "
            f"{instead}"
        )
    packed = not output and (halves or len(group) > 1 or found[0].turned)
    place = product.header.in_place
    added = {*group} & {place.input, place.output} if place else set[str]()
    if added and (packed or found[0].turned):
        raise ValueError(f"in_place: a kernel adds to {added.pop()} as [M, N] alone")
    axis = max(axis, 0)
    shares = _shares(found, axis)
    return shape, Place("_".join(group), tuple(found), axis, shares, halves, packed=packed)


def _groups(product: Gemm, tensors: Mapping[str, Output], *, output: bool) -> list[tuple[str, ...]]:
    """Group names in order, as they lie in one canonical tensor."""
    names, groups = list(tensors), list[tuple[str, ...]]()
    while names:
        x, count = names[0], 1
        gemm = next((g for g in (product.first, product.second) if not output and x in g), None)
        shapes = [tensors[y].shape.cases.get("") for y in names]
        if output and x in product.header.split:
            count = len(product.header.split)
        elif output:
            count = _filling(product, [tensors[y] for y in names])
        elif gemm is None and len(product.columns) > 1:
            vectors = [(entry,) for entry in product.columns]
            count = len(vectors) if shapes[: len(vectors)] == vectors else 1
        groups.append(gemm or tuple(names[:count]))
        names = [y for y in names if y not in groups[-1]]
    return groups


def _filling(product: Gemm, tensors: Sequence[Output]) -> int:
    """Count the tensors that have the product's columns together; 1 if none."""
    total, leading = Sum(), product.leading(tensors[0].shape.cases.get("", ()))
    for i, tensor in enumerate(tensors):
        shape = [e for e in tensor.shape.cases.get("", ()) if e != 1]
        rows = [e for e in shape if e in leading]
        share = product_of([e for e in shape if e not in rows]) if rows == leading else None
        if share is None or tensor.dtype != tensors[0].dtype:
            return 1
        for dim, some in share.items():
            total[dim] = total.get(dim, Fraction(0)) + some
        if total == product.total:
            # Two of half the columns are what two gates give, unless B is of two parts itself.
            gates = product.halves or product.columns[0] in product.dims
            halves = i == 1 and {dim: 2 * some for dim, some in share.items()} == total
            return 1 if halves and gates else i + 1
    return 1


def _tensors(product: Gemm) -> tuple[dict[str, Any], dict[str, list[Place]], list[str]]:
    """Give canonical tensors, how the header's lie there, and the unread."""
    header, unread = product.header, list[str]()
    made: dict[str, Any] = {"inputs": {}, "outputs": {}}
    places: dict[str, list[Place]] = {"inputs": [], "outputs": []}
    for key, tensors in (("inputs", header.inputs), ("outputs", header.outputs)):
        output = key == "outputs"
        for group in _groups(product, tensors, output=output):
            first = tensors[group[0]]
            if any(tensors[x].model_copy(update={"shape": first.shape}) != first for x in group):
                some = ", ".join(group)
                raise ValueError(f"{some} are one tensor of the kernel; declare them alike")
            gemm = not output and group in (product.first, product.second)
            found = (
                _operand(product, group) if gemm else _other(product, group, tensors, output=output)
            )
            if found is None:
                unread.append(group[0])
                made[key][group[0]] = first
                continue
            shape, place = found
            if not output and not gemm and shape.cases == {"": ()} and place.parts[0].units:
                place = replace(place, dtype=first.dtype if first.dtype != "float32" else "")
            if output and _reduced(product, first, shape):
                place = replace(place, dtype=first.dtype)
                first = first.model_copy(update={"dtype": "float32"})
            made[key][place.name] = first.model_copy(update={"shape": shape})
            places[key].append(place)
    return made, places, unread


def _unread(product: Gemm, name: str) -> ValueError:
    """Say over what a tensor's shape is not, and what to do."""
    header = product.header
    shape = next(iter({**header.inputs, **header.outputs}[name].shape.cases.values()))
    whole = [*product.lead, *product.columns]
    do = "use it in the next kernel"
    if name in header.outputs:
        do = f"return {shown(whole)}, or what is reduced of it, and do the rest with torch"
    elif {*shape} <= {1, *whole}:
        do = f"expand it to {shown(whole)} in the call"
    return ValueError(
        f"{name}: shape {shown(shape)} is not over rows [{', '.join(map(str, product.lead))}], over"
        f" columns {shown(product.columns)}, or over both; {do}"
    )


def _reduced(product: Gemm, output: Output, shape: Shape) -> bool:
    """Tell whether an output is a reduction to 16 bits."""
    m, n, _ = product.dims
    gathers = any(
        x.dtype in ("int32", "int64")
        and [e for e in x.shape.cases.get("", ()) if e != 1] == product.lead
        for x in product.header.inputs.values()
    )
    vectors = {(n,)} if gathers else {(n,), (m,)}
    narrow = {*HALVES}.issuperset(product.header.types.get(output.dtype, (output.dtype,)))
    return narrow and vectors.issuperset(shape.cases.values())


def _all(product: Gemm, sizes: Mapping[str, int]) -> dict[str, int]:
    """Add sizes of dims under their second names."""
    declared = product.header.dims
    if sizes.keys() != declared.keys():
        got, known = ", ".join(sizes) or "none", ", ".join(declared)
        raise ValueError(f"sizes are given for {got}; expected {known}")
    return {**sizes, **{new: sizes[old] for old, new in product.second_names()}}


def _units(shapes: Iterable[Sequence[Entry]]) -> tuple[int, ...]:
    """List dimensions of extent 1, from the last one, -1.

    Raises:
        ValueError: They are not the same in all shapes of a tensor.
    """
    found = {tuple(i - len(s) for i, e in enumerate(s) if e == 1) for s in shapes}
    if len(found) > 1:
        raise ValueError("a tensor's shapes by cases have different dims of 1; leave these out")
    return found.pop()


def _dim(entries: Sequence[Entry], dims: Mapping[str, Dim], units: Mapping[str, int]) -> Dim:
    """Make the dim of a sum, of one extent if all are."""
    known = {x: dim.only for x, dim in dims.items() if dim.only}
    fixed = known.keys() | {""} >= summed(entries).keys()
    only = sum(extent(e, known) for e in entries) if fixed else None
    return Dim(multiple_of=step(entries, units), only=only)


def _shares(found: Sequence[Part], axis: int) -> tuple[int, ...]:
    """Find each part's share of their axis; none where sizes tell."""
    if len(found) == 1:
        return (1,)
    sums = [product_of(part.axes[""][axis]) or {} for part in found]
    if len({*map(tuple, sums)}) > 1 or len(sums[0]) != 1:
        return ()
    shares = [share for some in sums for share in some.values()]
    unit = Fraction(1, math.lcm(*(share.denominator for share in shares)))
    return tuple(int(share / unit) for share in shares)
