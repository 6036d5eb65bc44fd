"""Rules that change a function before it is differentiated, so that both passes get the paper's
kernels.

- Products of one matrix become one product, whose weights are packed in each call. So their
  gradients are one product each, too. Two that are multiplied with each other, such as gate and up,
  lie in turn, as an epilogue takes them.
- A norm's backward needs a mean of each row. It is the inner product of what the next product gives
  with the gradient of that (paper, section 3.2.4). So it is known before the product that brings
  the norm's gradient, and that product's epilogue ends the norm's backward.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import lru_cache
from operator import getitem
from typing import TYPE_CHECKING, Any, NamedTuple

from coda_agent.agent.plans.rules import CASTS, above, as_called, product, users
from coda_agent.agent.plans.trace import Graph, Value, mapped

if TYPE_CHECKING:
    from torch import Tensor

_TIMES = ("mul", "rmul", "multiply")


class _Norm(NamedTuple):
    """x (M, N) times r (M, 1), the reciprocal root mean squares of its rows, and gamma (N,)."""

    x: Value
    r: Value
    gamma: Value | None


def for_training(graph: Graph) -> Graph:
    """A graph of the same function, whose gradients are those of merged products and of norms
    together with the product behind them. What it adds has no `meta`."""
    graph = graph.copy()
    by = users(graph)
    groups: dict[Value, list[Value]] = {}
    for v in graph.values:
        if v.called == "linear" and product(v):
            groups.setdefault(v.inputs[0], []).append(v)
    instead: dict[Value, Value] = {}
    values: list[Value] = []

    def replaced(x: Any) -> Any:
        return instead.get(x, x) if isinstance(x, Value) else x

    for v in graph.values:
        v.args, v.kwargs = mapped(v.args, replaced), mapped(v.kwargs, replaced)
        if v.whole:
            v.whole = v.whole[0], mapped(v.whole[1], replaced), mapped(v.whole[2], replaced)
        if v in instead:
            continue
        some = groups.get(v.inputs[0], []) if v.inputs else []
        if v not in some or not _alike(some):
            values.append(v)
            continue
        only = by[a := some[0].inputs[0]] == some and a not in graph.results
        norm = _norm(a) if only else None
        if norm:
            a.whole = None  # the same parts are taken for its backward
        new, parts = _merged(some, norm, by) if norm or len(some) > 1 else ([v], [v])
        instead |= dict(zip(some, parts, strict=True))
        values += new
    results = [replaced(v) for v in graph.results]
    return as_called(replace(graph, values=values, results=results))


def _given(linear: Value) -> tuple[Any, Any, Any]:
    """A linear's input, weight and bias."""
    known = dict(zip(("input", "weight", "bias"), linear.args, strict=False)) | linear.kwargs
    return known["input"], known["weight"], known.get("bias")


def _alike(products: Sequence[Value]) -> bool:
    """Whether they can be one: all have a bias or none has, and weights are there beforehand."""
    biased = {_given(p)[2] is None for p in products}
    return len(biased) == 1 and all(x.func is None for p in products for x in p.inputs[1:])


def _merged(
    products: Sequence[Value], norm: _Norm | None, by: dict[Value, list[Value]]
) -> tuple[list[Value], list[Value]]:
    """New values in the place of products of one matrix; and those that are the products'."""
    first, made = products[0], list[Value]()

    def new(func: Callable[..., Any], *args: Any) -> Value:
        made.append(Value(f"{first.name}_{len(made)}", func, args))
        return made[-1]

    a, weights, biases = _given(first)[0], *zip(*(_given(p)[1:] for p in products), strict=True)
    in_turn = len(products) == 2 and _meet(products[0], products[1], by)
    pack = _in_turn if in_turn else _below
    weight, bias = weights[0], biases[0]
    if len(products) > 1:
        weight = new(pack, weights)
        bias = None if bias is None else new(pack, biases)
    norm_args = (*norm, in_turn) if norm else ()
    y = new(_behind_norm if norm else _linear, a, weight, bias, *norm_args)
    if len(products) == 1:
        return made, [y]
    parts = new(_halves, y) if in_turn else new(_parts, y, tuple(p.shape[-1] for p in products))
    return made, [new(getitem, parts, i) for i in range(len(products))]


def _meet(one: Value, other: Value, by: dict[Value, list[Value]]) -> bool:
    """Whether what becomes of two products element by element is multiplied with each other."""
    times = (
        v for some in by.values() for v in some
        if v.called in _TIMES and v.tensor and v.shape == one.shape == other.shape
    )  # fmt: skip
    sides = (v.inputs for v in times if len(v.inputs) == 2)
    return any(
        above([x], lambda v: v is one) and above([y], lambda v: v is other)
        for x, y in ((s[i], s[1 - i]) for s in sides for i in (0, 1))
    )


def _norm(a: Value) -> _Norm | None:
    """The norm that gives a matrix, however it is spelled."""
    r = gamma = None
    rest = _uncast(a)
    while rest.called in _TIMES and len(rest.inputs) == 2:
        small = min(rest.inputs, key=lambda x: x.count)
        row = small.shape == (*a.shape[:-1], 1)
        if row and r is None:
            r = small
        elif small.shape == a.shape[-1:] and gamma is None:
            gamma = small
        else:
            return None
        rest = _uncast(next(x for x in rest.inputs if x is not small))
    if r is None or a.meta.ndim != 2 or rest.shape != a.shape or rest.meta.dtype != a.meta.dtype:
        return None
    path = [r]
    while path[-1].inputs and len(path) < 4:
        path.append(path[-1].inputs[0])
    rsqrt, plus, mean, square = [x.called for x in path] + [""] * (4 - len(path))
    squared = square in ("square", *_TIMES) or (square == "pow" and path[3].args[1] == 2)
    if (rsqrt, plus, mean, squared) != ("rsqrt", "add", "mean", True):
        return None
    same = len(path[3].inputs) == 1 and _uncast(path[3].inputs[0]) is rest
    whole = path[2].shape == r.shape and path[3].shape == a.shape
    return _Norm(rest, r, gamma) if same and whole else None


def _uncast(v: Value) -> Value:
    while v.called in CASTS and v.inputs:
        v = v.inputs[0]
    return v


def _in_turn(weights: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.stack([*weights], 1).flatten(0, 1)


def _below(weights: Sequence[Tensor]) -> Tensor:
    import torch

    return torch.cat([*weights])


def _parts(y: Tensor, sizes: Sequence[int]) -> Sequence[Tensor]:
    return y.split([*sizes], -1)


def _halves(y: Tensor) -> Sequence[Tensor]:
    return _functions()[0].apply(y)


def _linear(a: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    import torch.nn.functional as F

    return F.linear(a, weight, bias)


def _behind_norm(
    a: Tensor,
    weight: Tensor,
    bias: Tensor | None,
    x: Tensor,
    r: Tensor,
    gamma: Tensor | None,
    in_turn: bool,
) -> Tensor:
    """a weightᵀ + bias, of a = x · r · gamma."""
    return _functions()[1].apply(a.detach(), weight, bias, x, r.detach(), gamma, in_turn)


@lru_cache(maxsize=1)
def _functions() -> tuple[Any, Any]:
    """Halves of columns that lie in turn, and the product behind a norm, with the gradients that
    kernels have."""
    import torch
    import torch.nn.functional as F

    class Halves(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, y: Tensor) -> tuple[Tensor, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
            return y[..., 0::2], y[..., 1::2]

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            return torch.stack([*grads], -1).flatten(-2)

    class BehindNorm(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, *given: Any) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
            *tensors, ctx.in_turn = given
            y = F.linear(*tensors[:3])
            ctx.save_for_backward(*tensors, y)
            return y

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> tuple[Tensor | None, ...]:  # pyright: ignore[reportIncompatibleMethodOverride]
            a, weight, bias, x, r, gamma, y = ctx.saved_tensors
            (dy,) = grads
            given = y.float() if bias is None else y.float() - bias.float()
            inner, width = dy.float() * given, y.shape[-1]
            if ctx.in_turn:  # as the kernel that gives both halves' gradients sums them
                inner, width = inner[..., 0::2] + inner[..., 1::2], width // 2
            mean = inner.mean(-1, keepdim=True) * (width / x.shape[-1])
            d = (dy @ weight).float()
            normed = x.float() * r
            scaled = d if gamma is None else d * gamma.float()
            dx = ((scaled - normed * mean) * r).to(x.dtype)
            dgamma = None if gamma is None else (d * normed).sum(0).to(gamma.dtype)
            dbias = None if bias is None else dy.sum(0)
            return None, dy.T @ a, dbias, dx, None, dgamma, None

    return Halves, BehindNorm
