"""What changes between two calls of a fused function is followed by its kernels: values and gradients
are those of the function itself, before and after. What else Dynamo guards, it guards in any backend."""

import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_agent.fuse.fused import fuse
from tests.fuse.test_regions import drawn

M, K, N = 24, 64, 96


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):  # that kernels are interpreted here
        yield


def weight(seed: int, rows: int = N) -> Tensor:
    return drawn(rows, K, seed=seed)


def alike(got: Any, want: Any) -> bool:
    """Whether results are the same but for a kernel's rounding."""
    if isinstance(want, tuple | list):
        return len(got) == len(want) and all(map(alike, got, want))
    if not isinstance(want, Tensor):
        return got == want
    if (got.shape, got.dtype, got.requires_grad) != (want.shape, want.dtype, want.requires_grad):
        return False
    off = (got.double() - want.double()).norm()
    return bool(off <= 0.01 * want.double().norm())


def gradients(call: Callable[..., Any], *args: Tensor) -> tuple[Tensor, ...]:
    """Of a call's result by its arguments."""
    given = [a.detach().requires_grad_() for a in args]
    return torch.autograd.grad(call(*given).float().square().sum(), given, allow_unused=True)


class Layer(nn.Module):
    """A product and what follows it."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(K, N, dtype=torch.bfloat16)
        self.scale = 2.0

    def forward(self, x: Tensor) -> Tensor:
        return F.silu(self.fc(x)) * self.scale


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(drawn(8, K))
        self.up = nn.Parameter(drawn(N, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


def _set(layer: Layer, **values: Any) -> None:
    for name, value in values.items():
        setattr(layer, name, value)


def _no_bias(layer: Layer) -> None:
    setattr(layer.fc, "bias", None)  # noqa: B010 - its type has none


def _frozen(layer: Layer) -> None:
    layer.requires_grad_(False)
    layer.scale = 0.5


def _turned(layer: Layer) -> None:
    layer.fc.weight.data = 2 * layer.fc.weight.data.T.contiguous().T


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a float": lambda m: _set(m, scale=4.0),
    "an adapter in a linear's place": lambda m: _set(m, fc=Lora(m.fc)),
    "a bias taken away": _no_bias,
    "a frozen module": _frozen,
    "another layout of a weight": _turned,
    "float32": lambda m: m.float(),
    "float16": lambda m: m.half(),
}


@pytest.mark.parametrize("change", CHANGES)
@pytest.mark.one_in(2)
def test_a_change_of_a_module_is_followed(change: str) -> None:
    layer = Layer()
    fused, x = fuse(layer), drawn(M, K)
    before = layer(x)
    for changed in (False, True):
        if changed:
            CHANGES[change](layer)
            x = x.to(next(layer.parameters()).dtype)
            assert change in ("float32", "float16") or not torch.equal(before, layer(x))
        with torch.no_grad():
            assert alike(fused(x), layer(x)) and alike(fused(x), layer(x))
        given = x.detach().requires_grad_()
        wanted = [given, *(p for p in layer.parameters() if p.requires_grad)]
        losses = [call(given).float().square().sum() for call in (fused, layer)]
        got, want = (torch.autograd.grad(y, wanted, allow_unused=True) for y in losses)
        assert alike(got, want)


def test_numbers_as_arguments() -> None:
    def function(x: Tensor, w: Tensor, by: float, k: int = 1) -> Tensor:
        return F.relu(F.linear(x, w) * by) + k

    x, w, fused = drawn(M, K), weight(1), fuse(function)
    with torch.no_grad():
        for by in (1.0, -2.0, 0.0, 1, float("inf")):
            for k in (1, 2, -1):
                got, want = fused(x, w, by, k), function(x, w, by, k)
                assert torch.allclose(got, want, atol=2e-2, equal_nan=True), (by, k)
        for i in range(12):
            assert alike(fused(x, w, 1.0 + i / 3), function(x, w, 1.0 + i / 3))


def test_a_gradient_is_dropped_where_its_value_was() -> None:
    x, w = drawn(M, K), weight(1).requires_grad_()
    y = fuse(lambda x, w: F.dropout(torch.cos(F.linear(x, w)), 0.5))(x, w)
    (got,) = torch.autograd.grad(y.float().sum(), w)
    product = F.linear(x.double(), w.double())
    want = ((-2 * product.sin() * (y != 0)).T @ x.double()).detach()
    assert 0.4 < float((y != 0).float().mean()) < 0.6
    assert alike(got.double(), want)


def test_autocast_and_mixed_types() -> None:
    product = lambda x, w: F.relu(F.linear(x, w)) + 1
    x, w, fused = drawn(M, K), weight(1).float(), fuse(product)
    for dtype in (torch.bfloat16, torch.float16, torch.bfloat16):
        with torch.no_grad(), torch.autocast("cpu", dtype):
            assert alike(fused(x, w), product(x, w)) and fused(x, w).dtype == dtype
    w = w.bfloat16()
    with torch.no_grad():
        assert alike(fused(x, w), product(x, w))
        with torch.autocast("cpu", torch.float16):
            assert alike(fused(x, w), product(x, w)) and fused(x, w).dtype == torch.float16
        assert alike(fused(x, w), product(x, w))


def without_gradients_inside(x: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        y = torch.tanh(F.linear(x, w))
    return y + F.relu(F.linear(x, w))


def by_the_grad_mode(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    return torch.relu(y) if torch.is_grad_enabled() else torch.tanh(y)


def detached(x: Tensor, w: Tensor) -> Tensor:
    return torch.relu(F.linear(x, w)) * torch.tanh(F.linear(x, w)).detach()


class Square(torch.autograd.Function):
    """relu², with a gradient of its own."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        ctx.save_for_backward(x)
        return x.relu().square()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:  # pyright: ignore[reportIncompatibleMethodOverride]
        return -7 * grad * ctx.saved_tensors[0]


def with_its_own_gradient(x: Tensor, w: Tensor) -> Any:
    return Square.apply(F.linear(x, w))


@pytest.mark.parametrize(
    "function",
    [
        without_gradients_inside,
        by_the_grad_mode,
        detached,
        with_its_own_gradient,
        torch.inference_mode()(detached),
    ],
)
def test_modes_of_gradients_in_any_order(function: Any) -> None:
    x, w, fused = drawn(M, K), weight(1), fuse(function)
    wanted = x.clone().requires_grad_()
    for _ in range(2):
        for given in (x, wanted):
            assert alike(fused(given, w), function(given, w))
            with torch.no_grad():
                assert alike(fused(given, w), function(given, w))
            with torch.inference_mode():
                assert alike(fused(given, w), function(given, w))
        if function(wanted, w).requires_grad:
            assert alike(gradients(fused, x, w), gradients(function, x, w))


def in_place(x: Tensor, w: Tensor) -> Tensor:
    y = F.linear(x, w)
    y += 1
    x[0] = 0
    return y.relu_()


def test_what_is_written_in_place_is_written() -> None:
    (x, own), w, fused = [drawn(M, K) for _ in "ab"], weight(1), fuse(in_place)
    with torch.no_grad():
        for _ in range(3):
            assert alike(fused(x, w), in_place(own, w)) and torch.equal(x, own)
            x[0], own[0] = 1, 1


def rows(x: Tensor, w: Tensor) -> Tensor:
    return torch.tanh(F.linear(x, w)).view(x.shape[0], -1, 32).flatten(1)


def test_other_layouts_are_no_other_function() -> None:
    x, w, fused = drawn(M, K), weight(1), fuse(rows)
    wide = torch.cat([x, x], 1)
    given = [x, x[:7], x[:1], x.mT.contiguous().mT, wide[:, :K], wide[:, ::2], x.flip(0)]
    given += [x[1:], x.flatten()[1 : 1 + 8 * K].view(8, K), x.half().bfloat16()]
    with torch.no_grad():
        for _ in range(2):
            for some in given:
                assert alike(fused(some, w), rows(some, w))
        empty = fuse(lambda x, w: torch.tanh(F.linear(x, w)))
        assert empty(x[:0], w).shape == (0, N) and alike(empty(x, w), torch.tanh(F.linear(x, w)))


def test_transforms_of_functions_are_those_of_the_function() -> None:
    layer = Layer()
    fused, x = fuse(layer), drawn(M, K)
    loss = lambda call: torch.func.grad(lambda x: call(x).float().sum())(x)
    assert alike(loss(fused), loss(layer))
    assert alike(torch.func.vmap(fused)(x[None]), layer(x)[None])
