"""What changes between two calls of a fused function is followed: values and gradients are those
of the function itself, before and after."""

import copy
import random
import threading
import warnings
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from coda_agent.fuse.fused import fuse
from tests.fuse.test_regions import drawn

M, K, N = 24, 64, 96


@pytest.fixture(autouse=True)
def cache(
    monkeypatch: pytest.MonkeyPatch, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Path]:
    folder = tmp_path_factory.getbasetemp() / "mutations"
    monkeypatch.setenv("XDG_CACHE_HOME", str(folder))
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):  # that kernels are interpreted here
        yield folder


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
    """A product and what follows it, which goes by all kinds of things."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.fc = nn.Linear(K, N, dtype=torch.bfloat16)
        self.drop = Doubling()
        self.scale, self.power, self.kind, self.step = 2.0, 1, "relu", 0
        self.others: list[float] = []
        self.sizes = {"by": 1.0}
        self.register_buffer("shift", torch.zeros(N).bfloat16())
        self.shift: Tensor

    bound = 100.0

    def forward(self, x: Tensor) -> Tensor:
        y = self.drop(F.relu(self.fc(x)) if self.kind == "relu" else F.silu(self.fc(x)))
        for other in self.others:
            y = y + other
        return (y**self.power * self.scale * self.sizes["by"] + self.shift).clamp(max=self.bound)


class Doubling(nn.Module):
    """As a dropout goes by its mode, and draws nothing."""

    def forward(self, x: Tensor) -> Tensor:
        return x * 2 if self.training else x


class Lora(nn.Module):
    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base
        self.down = nn.Parameter(drawn(8, K))
        self.up = nn.Parameter(drawn(N, 8))

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + F.linear(F.linear(x, self.down), self.up)


class Negative(Layer):
    def forward(self, x: Tensor) -> Tensor:
        return -super().forward(x)


def _set(layer: Layer, **values: Any) -> None:
    for name, value in values.items():
        setattr(layer, name, value)


def _no_bias(layer: Layer) -> None:
    setattr(layer.fc, "bias", None)  # noqa: B010 - its type has none


def _written(layer: Layer) -> None:
    with torch.no_grad():
        layer.fc.weight.mul_(-2)


def _rebound(layer: Layer) -> None:
    layer.fc.weight = nn.Parameter(3 * weight(5))


def _frozen(layer: Layer) -> None:
    layer.requires_grad_(False)
    layer.scale = 0.5


def _unfrozen(layer: Layer) -> None:
    layer.fc.requires_grad_(True)
    layer.scale = -2.0


def _turned(layer: Layer) -> None:
    layer.fc.weight.data = 2 * layer.fc.weight.data.T.contiguous().T


def _forward(layer: Layer) -> None:
    layer.forward = lambda x: torch.tanh(F.linear(x, layer.fc.weight))


CHANGES: dict[str, Callable[[Layer], Any]] = {
    "a float": lambda m: _set(m, scale=4.0),
    "the sign of a zero": lambda m: _set(m, scale=-0.0),
    "an int": lambda m: _set(m, power=2),
    "a branch": lambda m: _set(m, kind="silu"),
    "a list that grew": lambda m: m.others.append(1.5),
    "a value in a dict": lambda m: m.sizes.update(by=-3.0),
    "an adapter in a linear's place": lambda m: _set(m, fc=Lora(m.fc)),
    "a subclass": lambda m: _set(m, __class__=Negative),
    "another forward": _forward,
    "a hook before": lambda m: m.register_forward_pre_hook(lambda mod, args: (args[0] * 2,)),
    "the mode of a submodule": lambda m: m.drop.eval(),
    "the mode": lambda m: m.eval(),
    "a weight": _rebound,
    "a weight written in place": _written,
    "a bias taken away": _no_bias,
    "a parametrisation": lambda m: parametrize.register_parametrization(m.fc, "weight", Doubling()),
    "a pruned weight": lambda m: prune.l1_unstructured(m.fc, "weight", 0.7),
    "what stands among its modules": lambda m: m._modules.update(drop=nn.Tanh()),
    "a class attribute": lambda m: setattr(Layer, "bound", 0.5),
    "a buffer": lambda m: _set(m, shift=torch.ones(N).bfloat16()),
    "a frozen module": _frozen,
    "another layout of a weight": _turned,
    "float32": lambda m: m.float(),
    "float16": lambda m: m.half(),
}


@pytest.mark.parametrize("change", CHANGES)
def test_a_change_of_a_module_is_followed(change: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Layer, "bound", 100.0)
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
        with torch.inference_mode():
            assert alike(fused(x), layer(x))
        assert alike(gradients(fused, x), gradients(layer, x))
        own = [p for p in layer.parameters() if p.requires_grad]
        if own:
            loss = lambda call, x=x: call(x).float().square().sum()
            calls = [loss(call) for call in (fused, layer)]
            got, want = (torch.autograd.grad(y, own, allow_unused=True) for y in calls)
            assert alike(got, want)


GLOBAL, TENSOR = 1.0, weight(1)


def helper(y: Tensor) -> Tensor:
    return y * GLOBAL


def test_values_tensors_and_functions_of_the_enclosing_scope_are_followed(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    scale, w, layer = 2.0, weight(2), Layer()
    settings = {"s": 1.0}

    def function(x: Tensor, by: float = 1.0) -> Tensor:
        y = F.linear(x, w) * scale * settings["s"] + F.linear(x, TENSOR) * by
        return helper(torch.tanh(y)) + 0.1 * layer(x)

    fused, x = fuse(function), drawn(M, K)
    met = list[Tensor]()

    def same() -> None:
        with torch.no_grad():
            want = function(x)
            assert all(not torch.equal(want, other) for other in met)
            assert alike(fused(x), want)
            met.append(want)
        assert alike(gradients(fused, x), gradients(function, x))

    same()
    scale = 5.0
    same()
    w = weight(3)
    same()
    settings["s"] = -1.0
    same()
    monkeypatch.setitem(globals(), "GLOBAL", 3.0)
    same()
    monkeypatch.setitem(globals(), "TENSOR", weight(4))
    same()
    monkeypatch.setitem(globals(), "helper", lambda y: -y)
    same()
    layer.scale = 9.0
    same()
    function.__defaults__ = (0.25,)
    same()


def test_numbers_and_words_as_arguments(monkeypatch: pytest.MonkeyPatch) -> None:
    def function(
        x: Tensor, w: Tensor, by: float, kind: str = "relu", twice: bool = False, k: int = 1
    ) -> Tensor:
        y = F.linear(x, w) * by
        y = F.relu(y) if kind == "relu" else torch.tanh(y)
        return (y + y if twice else y) + k

    x, w, fused = drawn(M, K), weight(1), fuse(function)
    calls: list[dict[str, Any]] = [{}, {"kind": "tanh"}, {"twice": True}, {"k": 2}, {"k": -1}]
    with torch.no_grad():
        for by in (1.0, -2.0, 0.0, 1, float("inf")):
            for named in calls:
                got, want = fused(x, w, by, **named), function(x, w, by, **named)
                assert torch.allclose(got, want, atol=2e-2, equal_nan=True), (by, named)
        for i in range(12):
            assert alike(fused(x, w, 1.0 + i / 3), function(x, w, 1.0 + i / 3))


class Counting(nn.Module):
    """Keeps a state of its own, and sees what it computes."""

    def __init__(self) -> None:
        super().__init__()
        self.step, self.last, self.sums = 0, None, list[Tensor]()
        self.w = nn.Parameter(weight(1))

    def forward(self, x: Tensor) -> Tensor:
        self.step += 1
        y = torch.tanh(F.linear(x, self.w)) * self.step
        self.last = y
        self.sums.append(y.sum())
        return y


def test_what_a_call_writes_down_is_written_each_time() -> None:
    own, ours = Counting(), Counting()
    fused, x = fuse(ours), drawn(M, K)
    for graded in (False, False, True, False, True):
        with torch.set_grad_enabled(graded):
            assert alike(fused(x), own(x))
        assert ours.step == own.step and type(ours.last) is Tensor
        assert alike(ours.last, own.last) and alike(ours.sums, own.sums)


def printing(x: Tensor, w: Tensor) -> Tensor:
    y = torch.tanh(F.linear(x, w))
    print("a line")
    return F.silu(F.linear(y, w.T))


def test_what_a_call_prints_is_printed_each_time(capsys: pytest.CaptureFixture[str]) -> None:
    x, w, fused = drawn(M, K), weight(1), fuse(printing)
    for count in range(1, 4):
        with torch.no_grad():
            assert alike(fused(x, w), printing(x, w))
        assert capsys.readouterr().out == 2 * "a line\n", count
    assert alike(gradients(fused, x, w), gradients(printing, x, w))


def layers_at_random(x: Tensor, w: Tensor) -> Tensor:
    for _ in range(6):
        if random.random() < 0.5:
            x = x + torch.tanh(F.linear(x, w))
    return x * random.random()


def test_random_numbers_of_python_are_those_of_the_function() -> None:
    x, w, fused = drawn(M, K), weight(1, rows=K), fuse(layers_at_random)

    def seen(call: Any) -> list[Tensor]:
        random.seed(3)
        return [call(x, w) for _ in range(5)]

    with torch.no_grad():
        own, ours = seen(layers_at_random), seen(fused)
    assert all(map(alike, ours, own)) and not torch.equal(own[0], own[1])
    random.seed(3)
    got = gradients(fused, x, w)
    random.seed(3)
    assert alike(got, gradients(layers_at_random, x, w))


def test_a_gradient_is_dropped_where_its_value_was() -> None:
    x, w = drawn(M, K), weight(1).requires_grad_()
    y = fuse(lambda x, w: F.dropout(torch.cos(F.linear(x, w)), 0.5))(x, w)
    (got,) = torch.autograd.grad(y.float().sum(), w)
    product = F.linear(x.double(), w.double())
    want = ((-2 * product.sin() * (y != 0)).T @ x.double()).detach()
    assert 0.4 < float((y != 0).float().mean()) < 0.6
    assert alike(got.double(), want)


class Cast(nn.Module):
    enabled = True

    def __init__(self) -> None:
        super().__init__()
        self.fc = nn.Linear(K, N)

    def forward(self, x: Tensor) -> Tensor:
        with torch.autocast("cpu", torch.bfloat16, enabled=self.enabled):
            return F.relu(self.fc(x))


def test_autocast_inside_and_outside() -> None:
    layer = Cast()
    fused, x = fuse(layer), drawn(M, K).float()
    for enabled in (True, False, True):
        layer.enabled = enabled
        assert layer(x).dtype == (torch.bfloat16 if enabled else torch.float32)
        assert alike(fused(x), layer(x)) and alike(gradients(fused, x), gradients(layer, x))
        with torch.no_grad():
            assert alike(fused(x), layer(x))
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


def with_gradients_inside(x: Tensor, w: Tensor) -> Tensor:
    with torch.enable_grad():
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
        without_gradients_inside, with_gradients_inside, by_the_grad_mode, detached,
        with_its_own_gradient, torch.no_grad()(detached), torch.inference_mode()(detached),
    ],
)  # fmt: skip
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


def test_threads_have_their_own_results_and_what_they_print(
    capsys: pytest.CaptureFixture[str],
) -> None:
    layers = [Layer() for _ in range(4)]
    for i, layer in enumerate(layers):
        layer.scale = 1.0 + i
    fused = [fuse(layer) for layer in layers]
    x, wrong, done = drawn(M, K), list[int](), threading.Event()

    compiled: Any = torch.compile(lambda x: x + 1, backend="eager")
    compiled(x)

    def prints() -> None:
        while not done.wait(0.001):
            print("here")
            try:
                compiled(x)
            except RuntimeError:
                wrong.append(-1)

    def calls(i: int) -> None:
        with torch.no_grad():
            for rows in (M, 5, M, 1, 7, M):
                wrong.extend([i] * (not alike(fused[i](x[:rows]), layers[i](x[:rows]))))

    printer = threading.Thread(target=prints)
    printer.start()
    workers = [threading.Thread(target=calls, args=(i,)) for i in range(4)]
    for worker in workers:
        worker.start()
    for worker in workers:
        worker.join()
    done.set()
    printer.join()
    print("and after")
    assert wrong == []
    said = capsys.readouterr().out
    assert "here\n" in said and said.endswith("and after\n")


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


def tripled(y: Tensor) -> Tensor:
    return y * 3


def test_what_dynamo_may_not_look_into_is_called() -> None:
    disabled: Any = torch.compiler.disable(tripled)
    function = lambda x, w: disabled(torch.tanh(F.linear(x, w))) + 1
    x, w, fused = drawn(M, K), weight(1), fuse(function)
    assert alike(fused(x, w), function(x, w))


class Method:
    def __init__(self, scale: float, seed: int) -> None:
        self.scale, self.w = scale, weight(seed)

    @fuse
    def run(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.w)) * self.scale

    def plain(self, x: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, self.w)) * self.scale


def test_a_method_is_its_objects() -> None:
    one, other, x = Method(1.0, 1), Method(2.0, 2), drawn(M, K)
    for _ in range(2):
        for it in (one, other, copy.deepcopy(one)):
            assert alike(it.run(x), it.plain(x))
        one.scale, other.w = one.scale + 1, other.w.neg()
    bound = fuse(one.plain)
    assert alike(bound(x), one.plain(x))
    one.scale = -4.0
    assert alike(bound(x), one.plain(x))


def test_under_an_outer_compile_and_transforms_it_is_the_function() -> None:
    layer = Layer()
    fused, x = fuse(layer), drawn(M, K)
    plain = lambda x, w: torch.tanh(F.linear(x, w)).view(M, 2, -1).transpose(0, 1)
    heads = fuse(plain)
    outer = torch.compile(lambda x: 2 * fused(x), backend="aot_eager", fullgraph=True)
    turned = torch.compile(lambda x, w: heads(x, w) + 1, backend="aot_eager", fullgraph=True)
    for scale in (2.0, 3.0):
        layer.scale = scale
        assert alike(outer(x), 2 * layer(x))
        assert alike(gradients(outer, x), gradients(lambda x: 2 * layer(x), x))
    w = weight(1)
    assert alike(turned(x, w), plain(x, w) + 1)
    assert turned(x, w).stride() == (plain(x, w) + 1).stride()
    nested = fuse(lambda x: fused(x) + 1)
    with torch.no_grad():
        assert alike(nested(x), layer(x) + 1)
    loss = lambda call: torch.func.grad(lambda x: call(x).float().sum())(x)
    assert alike(loss(fused), loss(layer))
    assert alike(torch.func.vmap(fused)(x[None]), layer(x)[None])
