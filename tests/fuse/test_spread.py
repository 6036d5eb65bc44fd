"""Weights whose rows a kernel pairs, read where they lie, or packed."""

from collections.abc import Callable

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.fuse.kernels import chosen
from coda_agent.fuse.record import recorded
from coda_agent.primitives.program import Program
from tests.fuse.test_regions import D, H, drawn

aten = torch.ops.aten


def two(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def halves(x: Tensor, w: Tensor) -> Tensor:
    gate, up = F.linear(x, w).chunk(2, -1)
    return F.silu(gate) * up


def turned(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
    return F.silu(x @ gate) * (x @ up)


def parts(x: Tensor, w: Tensor) -> Tensor:
    gate, up = w[:, :H], w[:, H:]
    return F.silu(F.linear(x, gate)) * F.linear(x, up)


def program_of(function: Callable[..., Tensor], *given: Tensor) -> Program:
    (region,) = chosen(recorded(function, [*given]).graph)[0].regions
    return region.composition.program


@pytest.mark.parametrize(
    ("function", "weights"),
    [(two, [(D, H), (D, H)]), (halves, [(2 * D, H)])],
    ids=["two weights", "halves of one"],
)
def test_weights_whose_rows_alternate_are_read_where_they_lie(
    function: Callable[..., Tensor], weights: list[tuple[int, int]]
) -> None:
    x, *given = (drawn(*shape) for shape in ((24, H), *weights))
    assert program_of(function, x, *given).spread
    torch._dynamo.reset()
    compiled = torch.compile(function, backend="coda")
    tensors = [t.requires_grad_() for t in (x, *given)]
    got = compiled(*tensors)
    grads = torch.autograd.grad(got.float().sum(), tensors)
    exact = [t.detach().double().requires_grad_() for t in tensors]
    expected = function(*exact)
    torch.testing.assert_close(got.double(), expected, atol=2e-2, rtol=2e-2)
    wanted = torch.autograd.grad(expected.sum(), exact)
    for one, other in zip(grads, wanted, strict=True):
        torch.testing.assert_close(one.double(), other, atol=6e-2, rtol=5e-2)


@pytest.mark.parametrize(
    ("function", "weights"),
    [(turned, [(H, D), (H, D)]), (parts, [(D, 2 * H)])],
    ids=["columns are dense", "rows are cut"],
)
def test_weights_that_are_not_dense_are_packed(
    function: Callable[..., Tensor], weights: list[tuple[int, int]]
) -> None:
    x, *given = (drawn(*shape) for shape in ((24, H), *weights))
    assert not program_of(function, x, *given).spread
