"""Rules that change a graph before it is cut into kernels, and the notes that all rules leave.

A rule is a function of the graph. It says of each place that it looks at whether it fired, and why.
"""

from __future__ import annotations

import operator
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

from coda_agent.fuse.trace import Graph, Value, mapped
from coda_agent.specs.tracing import folded

PRODUCTS = frozenset({"linear", "mm", "matmul", "rmatmul", "addmm"})
_REDUCTIONS = """
sum mean amax amin max min logsumexp norm vector_norm var std var_mean std_mean argmax argmin prod
any all gather take_along_dim softmax log_softmax cumsum aminmax nansum median
"""
REDUCTIONS = frozenset(_REDUCTIONS.split())
CASTS = frozenset({"to", "float", "bfloat16", "half", "type_as", "type", "contiguous"})
OPAQUE = PRODUCTS | {"bmm", "einsum", "scaled_dot_product_attention", "baddbmm", "tensordot"}
"""What looks further than along a row."""
VIEWS = frozenset({"flatten", "view", "reshape"})


@dataclass(frozen=True)
class Note:
    """What a rule did at one place.

    Attributes:
        rule: Its name.
        fired: Whether it changed something.
        where: The value that it looked at.
        why: One line.
    """

    rule: str
    fired: bool
    where: str
    why: str


def product(value: Value) -> tuple[Value, Value] | None:
    """A and B of a product with a matrix, in 16 bits; None of what is no such product."""
    if value.called not in PRODUCTS or not value.tensor:
        return None
    sides = value.args[1:3] if value.called == "addmm" else value.args[:2]
    if len(sides) != 2 or not all(isinstance(x, Value) and x.tensor for x in sides):
        return None
    a, b = sides[::-1] if value.called == "rmatmul" else sides
    if b.meta.ndim != 2 or a.meta.ndim < 2 or value.meta.ndim < 2:
        return None
    return (a, b) if all(map(_short, (a, b))) else None


def _short(x: Value) -> bool:
    """Whether it has 16 bits, or is a view or a cast of what has."""
    while x.meta.itemsize != 2 and (x.view or x.called in CASTS) and x.inputs[0].tensor:
        x = x.inputs[0]
    return x.meta.itemsize == 2


def users(graph: Graph) -> dict[Value, list[Value]]:
    """Who takes each value, the results left out."""
    found: dict[Value, list[Value]] = {v: [] for v in (*graph.inputs, *graph.values)}
    for value in graph.values:
        for taken in value.inputs:
            found[taken].append(value)
    return found


def alive(graph: Graph) -> Graph:
    """The graph without what no result needs."""
    needed, pending = set[Value](), [*graph.results]
    while pending:
        if (value := pending.pop()) not in needed:
            needed.add(value)
            pending += value.inputs
    return replace(graph, values=[v for v in graph.values if v in needed])


def as_called(graph: Graph) -> Graph:
    """The graph as the function called it: nothing is taken apart."""
    graph = graph.copy()
    for value in graph.values:
        if value.whole:
            (value.func, value.args, value.kwargs), value.whole = value.whole, None
    return alive(graph)


def above(values: Iterable[Value], wanted: Callable[[Value], bool]) -> bool:
    """Whether one of these is `wanted`, or of what they are made of since the last products."""
    pending, seen = [*values], set[Value]()
    while pending:
        if (value := pending.pop()) in seen:
            continue
        if wanted(value):
            return True
        seen.add(value)
        pending += value.inputs if value.called not in OPAQUE else []
    return False


CARRY = "carry a row's factor past the product"


def carry_row_factors(
    graph: Graph, notes: list[Note], barred: frozenset[str] = frozenset()
) -> Graph:
    """(r ⊙ x) Bᵀ is r ⊙ (x Bᵀ), where r has one number for each row.

    A norm's r is known only after all of x. Carried past the next product, it no longer stands
    between what makes x and that product: x is stored unscaled, and r scales the next epilogue (the
    paper's section 3.2.1). Nothing is done for the matrices that are `barred`, by name.
    """
    import torch

    by = users(graph)
    rests: dict[Value, tuple[Value, list[tuple[Value, bool]]] | None] = {}
    made: list[Value] = []
    instead: dict[Value, Value] = {}
    was: dict[Value, Value] = {}

    def new(func: Callable[..., Any], *args: Any, **kwargs: Any) -> Value:
        metas, kept = mapped((args, kwargs), lambda x: x.meta if isinstance(x, Value) else x)
        meta = folded(func, metas, kept)(*metas, **kept)
        value = Value(f"c{len(made) + 1}", func, args, kwargs, meta)
        made.append(value)
        return value

    def replaced(x: Any) -> Any:
        return instead.get(x, x) if isinstance(x, Value) else x

    for value in graph.values:
        value.args = mapped(value.args, replaced)
        value.kwargs = mapped(value.kwargs, replaced)
        if value.whole:
            func, args, kwargs = value.whole
            value.whole = func, mapped(args, replaced), mapped(kwargs, replaced)
        sides = product(value) if value.called != "addmm" else None
        if sides is None:
            made.append(value)
            continue
        a = sides[0]
        if a not in rests:
            start = len(made)
            rests[a], why = (
                (None, "no kernel takes the product with it")
                if a.name in barred
                else _carried(a, was.get(a, a), by, graph, new)
            )
            if rests[a] is None:
                del made[start:]
            if why:
                notes.append(Note(CARRY, rests[a] is not None, a.name, why))
        if (found := rests[a]) is None:
            made.append(value)
            continue
        rest, factors = found
        plain, bias = _without_bias(value)
        bare = new(value.func or operator.matmul, *(rest if x is a else x for x in plain))
        bare.of = a.name
        last = new(torch.Tensor.float, bare)
        for factor, divides in factors:
            scale = operator.truediv if divides else operator.mul
            last = new(scale, last, factor)
        if bias is not None:
            last = new(operator.add, last, bias)
        instead[value] = new(torch.Tensor.to, last, value.meta.dtype)
        was[instead[value]], by[instead[value]] = value, by[value]
    results = [replaced(x) for x in graph.results]
    return alive(replace(graph, values=made, results=results))


FLATTEN = "flatten rows before the product"


def flatten_rows(graph: Graph, notes: list[Note]) -> Graph:
    """flatten(x Bᵀ) is flatten(x) Bᵀ, which costs nothing: a kernel has one dim of rows then."""
    import torch

    by = users(graph)
    for v in graph.values:
        if v.called not in VIEWS or not v.tensor or v.meta.ndim != 2 or not v.inputs:
            continue
        source = v.inputs[0]
        sides = product(source)
        if sides is None or source.meta.ndim < 3 or source.shape[-1] != v.shape[-1]:
            continue
        if by[source] != [v] or source in graph.results:
            notes.append(Note(FLATTEN, False, source.name, "its dims of rows are needed too"))
            continue
        a, name = sides[0], f"{source.name}_a"
        rows = Value(name, torch.Tensor.flatten, (a, 0, -2), {}, a.meta.flatten(0, -2))
        args = tuple(rows if x is a else x for x in source.args)
        at = graph.values.index(source)
        graph.values.insert(at, rows)
        v.func, v.args, v.kwargs = source.func, args, source.kwargs
        graph.values.remove(v)
        graph.values[at + 1] = v
        notes.append(Note(FLATTEN, True, source.name, "a row is a row of all its leading dims"))
    return alive(graph)


GATHER = "gather before logarithms of shares"


def gather_first(graph: Graph, notes: list[Note]) -> Graph:
    """gather(log_softmax(x), i) is gather(x, i) - logsumexp(x): of these a row has one number each,
    so that no kernel has to store the matrix."""
    import torch

    by = users(graph)
    values: list[Value] = []
    for v in graph.values:
        source, dim, index = _given(v, "input", "dim", "index")
        if v.called == "gather" and isinstance(source, Value) and source.called == "log_softmax":
            x, along = _given(source, "input", "dim")
            rows = {dim, along} <= {-1, source.meta.ndim - 1}
            rows &= index.shape[:-1] == source.shape[:-1]
            wide = x.meta.itemsize <= source.meta.itemsize <= 4
            if rows and wide and by[source] == [v] and source not in graph.results:
                meta = x.meta.float()
                picked, whole = meta.gather(-1, index.meta), torch.logsumexp(meta, -1, True)
                x = Value(f"{v.name}_x", torch.Tensor.float, (x,), {}, meta)
                at = Value(f"{v.name}_at", torch.gather, (x, -1, index), {}, picked)
                total = Value(f"{v.name}_sum", torch.logsumexp, (x, -1, True), {}, whole)
                less = Value(f"{v.name}_less", operator.sub, (at, total), {}, picked)
                values += [x, at, total, less]
                v.func, v.args, v.kwargs = torch.Tensor.to, (less, v.meta.dtype), {}
                notes.append(Note(GATHER, True, source.name, "only a number of each row is taken"))
        values.append(v)
    return alive(replace(graph, values=values))


def _given(v: Value, *names: str) -> list[Any]:
    """Arguments of a call by their names, None of what is not given."""
    known = dict(zip(names, v.args, strict=False)) | v.kwargs
    return [known.get(name) for name in names]


def _carried(
    a: Value, was: Value, by: dict[Value, list[Value]], graph: Graph, new: Callable[..., Value]
) -> tuple[tuple[Value, list[tuple[Value, bool]]] | None, str]:
    """What is left of A without its rows' factors, and these with whether they divide; or None, and
    why not. Nothing is said of what has no norm about it."""
    import torch

    rest, factors = _parted(a, new)
    row = f"{', '.join(f.name for f, _ in factors)}: one number a row"
    if not factors:
        late = a.shape and above([a], lambda v: _whole_row(v, a.shape[-1]))
        if not late or a.func is None or not _ours(a):
            return None, ""
        return None, "what its own row gave is added to it, or is no factor of it"
    if not above([f for f, _ in factors], lambda v: _whole_row(v, a.shape[-1])):
        return None, ""  # known beforehand, so the composer may do with it as it likes
    if above([rest], lambda v: _whole_row(v, a.shape[-1])):
        return None, f"{row}, but so is something else in it that is no factor"
    if others := [u for u in by[a] if (product(u) or (None,))[0] not in (a, was)]:
        return None, f"{row}, but {others[0].called} needs the scaled matrix too"
    if was in graph.results:
        return None, f"{row}, but the scaled matrix is a result"
    if not above([rest], lambda v: product(v) is not None) and rest.func is not None:
        return None, f"{row}, but no product makes it: the norm would write a matrix as before"
    if rest.meta.dtype != a.meta.dtype:
        rest = new(torch.Tensor.to, rest, a.meta.dtype)
    return (rest, factors), row


def _parted(v: Value, new: Callable[..., Value]) -> tuple[Value, list[tuple[Value, bool]]]:
    """A matrix without its rows' factors, and these."""
    import torch

    tensors = [x for x in v.args if isinstance(x, Value)]
    if v.called in ("mul", "rmul", "multiply", "div", "truediv", "true_divide") and v.tensor:
        if len(v.args) != 2 or v.kwargs or len(tensors) != len(v.args):
            return v, []
        x, y = tensors
        divides = "mul" not in v.called
        if _row(y, v):
            rest, factors = _parted(x, new)
            return rest, [*factors, (y, divides)]
        if divides:
            rest, factors = _parted(x, new)
            return (new(v.func, rest, y), factors) if factors else (v, [])
        if _row(x, v):
            rest, factors = _parted(y, new)
            return rest, [(x, False), *factors]
        (one, some), (two, more) = _parted(x, new), _parted(y, new)
        if some or more:
            return new(v.func, one, two), [*some, *more]
    if v.called in VIEWS and len(tensors) == 1 and v.shape[-1:] == tensors[0].shape[-1:]:
        rest, factors = _parted(tensors[0], new)
        if factors:
            column = (*v.meta.shape[:-1], 1)
            flat = [(new(torch.Tensor.reshape, f, column), divides) for f, divides in factors]
            return new(v.func, rest, *v.args[1:], **v.kwargs), flat
    if v.called in CASTS and len(tensors) == 1 and v.tensor and v.meta.is_floating_point():
        rest, factors = _parted(tensors[0], new)
        if factors and rest.meta.shape == v.meta.shape:
            return new(v.func, rest, *v.args[1:], **v.kwargs), factors
    return v, []


def _row(x: Value, of: Value) -> bool:
    """Whether it has one number for each row of a matrix."""
    return x.tensor and x.meta.ndim == of.meta.ndim and x.shape[-1:] == (1,) != of.shape[-1:]


def _whole_row(v: Value, extent: int) -> bool:
    """Whether it reduces rows of that many elements."""
    if v.called not in REDUCTIONS or not v.tensor or not v.inputs:
        return False
    source = v.inputs[0]
    return source.shape[-1:] == (extent,) and v.count * extent == source.count


def _ours(a: Value) -> bool:
    return above([a], lambda v: product(v) is not None)


def _without_bias(value: Value) -> tuple[tuple[Any, ...], Value | None]:
    """A product's arguments alone, and its bias."""
    if value.called == "linear":
        bias = value.kwargs.get("bias") or (value.args[2] if len(value.args) > 2 else None)
        return value.args[:2], bias
    return value.args, None
