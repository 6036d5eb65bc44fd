"""`fuse`: what a fused function, method or module is to its user."""

import copy
import gc
import logging
import pickle
import sys
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.utils._pytree import tree_leaves

from coda_agent.fuse import backend, choice, fused, kernels
from coda_agent.fuse.fused import Fused, fuse, mm
from coda_agent.primitives.errors import LaunchError
from tests.fuse.test_plan import FF, D, H, drawn, norms


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # that kernels are interpreted here
        yield


def plain(function: Any) -> Fused:
    return fuse(function)


def by_value(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(x, w) if x.sum() > 0 else F.relu(F.linear(x, w))


def drawing(x: Tensor, w: Tensor) -> Tensor:
    torch.manual_seed(0)
    return F.dropout(F.relu(F.linear(x, w)))


def leaving_torch(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)) * float(x.float().numpy().max())


def by_number(x: Tensor, w: Tensor) -> Tensor:
    return F.relu(F.linear(x, w)) * x.abs().max().item()


@pytest.mark.parametrize(
    ("function", "why"),
    [
        (drawing, "it draws random numbers"),
    ],
)
def test_what_cannot_be_planned_is_pytorchs_and_says_why(function: Any, why: str) -> None:
    args = [drawn(24, H), drawn(D, H)]
    fused = plain(function)
    assert torch.equal(fused(*args), function(*args))
    assert why in fused.why
    assert fused.plan(*args) is None


@pytest.mark.parametrize("function", [by_value, leaving_torch, by_number])
def test_where_a_value_is_asked_for_the_graph_ends(function: Any) -> None:
    """What comes before may be a kernel all the same."""
    x, w = drawn(24, H), drawn(D, H)
    fused = plain(function)
    for args in ([x, w], [-x, w]):
        assert torch.allclose(fused(*args), function(*args), atol=2e-2)
        line = function.__code__.co_firstlineno + 1
        assert f"Dynamo's graph ends at {__file__}:{line}, `return " in fused.why
    assert bool(fused.plan(x, w)) == (function is not by_value)


def test_float32_is_left_to_pytorch() -> None:
    fused = plain(lambda x, w: F.relu(F.linear(x, w)))
    x, w = drawn(24, H).float(), drawn(D, H).float()
    assert torch.equal(fused(x, w), F.relu(F.linear(x, w)))
    assert fused.why


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up, self.down = (
            nn.Linear(D, FF, False),
            nn.Linear(D, FF, False),
            nn.Linear(FF, D),
        )

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_a_module_is_fused_with_its_gradients_and_follows_its_weights() -> None:
    torch.manual_seed(0)
    mlp = MLP().bfloat16()
    fused = plain(mlp)
    x = drawn(24, D).requires_grad_()

    def gradients(call: Any) -> list[Tensor]:
        return [*torch.autograd.grad(call(x).float().square().sum(), [x, *mlp.parameters()])]

    for got, own in zip(gradients(fused), gradients(mlp), strict=True):
        assert norms(got, own.float()) < 0.01
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.mul_(-0.5)  # counted by autograd, so what was packed is packed again
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)
        mlp.up.weight = nn.Parameter(mlp.up.weight * 3)
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)
        mlp.gate.weight.data.mul_(-1)  # not counted
        fused.forget()
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)


def test_one_tensor_as_two_arguments_and_other_numbers_of_the_same_shapes() -> None:
    def function(x: Tensor, w: Tensor, r: Tensor, scale: float = 1.0) -> Tensor:
        return scale * F.silu(F.linear(x, w) + r)

    square = drawn(64, 64).requires_grad_()
    other = drawn(64, 64, seed=1).requires_grad_()
    fused = plain(function)
    calls: list[Any] = [(square, square, square), (square, other, square)]
    calls.append((other, square, square, 3.0))
    for args in calls:
        got, own = fused(*args), function(*args)
        assert torch.allclose(got, own, atol=2e-2)
    first, last = fused(square, other, square), fused(square, other, square, 3.0)
    one, three = (torch.autograd.grad(y.sum(), other)[0] for y in (first, last))
    assert norms(three, 3 * one.float()) < 0.01


def test_layers_of_one_code_have_one_plan_and_their_own_packed_weights(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    layers, x = [MLP().bfloat16() for _ in range(3)], drawn(24, D)
    fused = [plain(layer) for layer in layers]
    packed, planned, chosen = kernels.PACKED, [], choice.chosen
    packed.clear()
    noted_plan = lambda *args, **named: planned.append(1) or chosen(*args, **named)
    monkeypatch.setattr(backend, "chosen", noted_plan)
    with torch.no_grad():
        for rows in (24, 24, 24, 7):
            for call, layer in zip(fused, layers, strict=True):
                assert torch.allclose(call(x[:rows]), layer(x[:rows]), atol=2e-2)
        assert len(packed) == 6 and len(planned) <= 2  # of each number of rows
        layers[0].gate.weight.data.mul_(-1)
        fused[1].forget()
        assert torch.allclose(fused[0](x), layers[0](x), atol=2e-2)
    assert len(kernels.PACKED) == 1  # what was forgotten is packed when it is needed
    call = layer = None
    del layers[:], fused[:]
    gc.collect()
    assert not kernels.PACKED


def test_calls_of_one_layout_have_one_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    x, w = drawn(24, H), nn.Linear(H, D, dtype=torch.bfloat16)
    call = fuse(lambda x: F.relu(w(x)))
    planned, chosen = [], choice.chosen
    noted = lambda *args, **named: planned.append(1) or chosen(*args, **named)
    monkeypatch.setattr(backend, "chosen", noted)

    def plans(*args: Any, **named: Any) -> bool:
        planned.clear()
        found = call(*args, **named)
        assert torch.allclose(found, F.relu(w(*args, *named.values())), atol=2e-2)
        return bool(planned)

    with torch.no_grad():
        assert [plans(x), plans(x), plans(drawn(24, H, seed=1)), plans(x=x)] == [True] + 3 * [False]
        assert plans(x.mT.contiguous().mT) and plans(drawn(33, H)) and not plans(x)
        w.weight = nn.Parameter(2 * w.weight)
        assert not plans(x)  # it is an input
    assert not plans(x) and "gradients" in call.why  # of its weight
    with torch.no_grad(), torch.autocast("cpu", torch.bfloat16):
        assert call(x).dtype == torch.bfloat16 and call.why == "autocast is on"
    mapped = torch.func.vmap(call)(x.detach()[None])
    assert "transform" in call.why and mapped.shape == (1, 24, D)


def test_the_module_is_the_function() -> None:
    from coda_agent import fuse as module

    x, w = torch.ones(4, 16).bfloat16(), torch.ones(16, 16).bfloat16()
    assert isinstance(module()(lambda x, w: F.relu(x @ w)), Fused)
    package: Any = module  # to a type checker it is the function
    assert package.fuse is fuse
    assert torch.equal(package.mm(torch.mm, (x, w), F.relu), x @ w)


def test_the_call_of_flexgemm(monkeypatch: pytest.MonkeyPatch) -> None:
    """Epilogues take tensors of the enclosing function; another closure is no other kernel."""
    x, w, call = drawn(24, H), drawn(D, H).T, fused._applied()
    tile, row = drawn(24, D), torch.rand(24, 1)
    planned, chosen = [], choice.chosen
    noted = lambda *args, **named: planned.append(1) or chosen(*args, **named)
    monkeypatch.setattr(backend, "chosen", noted)
    assert torch.allclose(mm(torch.mm, (x, w), F.relu), F.relu(torch.mm(x, w)), atol=1e-2)
    for seed in range(3):
        planned.clear()
        bias = drawn(D, seed=seed)
        epilogues: list[Any] = [
            lambda acc, b=bias: F.gelu(acc + b), lambda acc: acc * row + tile,
            lambda acc, b=bias: (acc + b, F.logsigmoid(acc + b)),
        ]  # fmt: skip
        for epilogue in epilogues:
            got, want = mm(torch.mm, (x, w), epilogue), epilogue(torch.mm(x, w))
            for one, own in zip(tree_leaves(got), tree_leaves(want), strict=True):
                assert torch.allclose(one, own, atol=2e-2)
            assert (call.way, call.why) == ("the plan", "")
        assert len(planned) == (0 if seed else 3)


def test_what_a_kernel_refuses_at_its_launch_is_pytorchs(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise LaunchError("it has no such tile")

    x, w, call = drawn(24, H), drawn(D, H), plain(lambda x, w: torch.erf(F.linear(x, w)))
    monkeypatch.setattr(kernels.RegionKernel, "__call__", refuse)
    for _ in range(2):
        assert torch.equal(call(x, w), torch.erf(F.linear(x, w)))
        assert call.why == "it has no such tile"


def test_composing_leaves_the_process_as_it_was(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    seen = lambda: (torch.get_rng_state().tolist(), sys.stdout, logging.getLogger("torch").level)
    torch.manual_seed(7)
    before = seen()
    assert plain(lambda x, w: torch.sin(F.linear(x, w))).plan(drawn(24, H), drawn(D, H))
    assert seen() == before


def test_as_a_decorator() -> None:
    @fuse
    def named(x: Tensor, w: Tensor) -> Tensor:
        """Its words."""
        return torch.tanh(F.linear(x, w))

    assert named.__name__ == "named"
    assert named.__doc__ == "Its words."
    x, w = drawn(24, H), drawn(D, H)
    assert torch.allclose(named(x=x, w=w), torch.tanh(F.linear(x, w)), atol=1e-2)


class Gated(nn.Module):
    def __init__(self, scale: float) -> None:
        super().__init__()
        self.up, self.scale = nn.Linear(H, FF, False, dtype=torch.bfloat16), scale

    @fuse
    def forward(self, x: Tensor) -> Tensor:
        return self.scale * F.relu(self.up(x))


class Doubly(Gated):
    @fuse
    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x) + 1


def test_a_decorated_method_is_each_objects_own() -> None:
    one, other, x = Gated(1.0), Gated(-3.0), drawn(24, H)
    copied = copy.deepcopy(one)
    for module in (one, other, one, copied):
        expected = module.scale * F.relu(x @ module.up.weight.T)
        assert torch.allclose(module(x), expected, atol=1e-2)
        assert "gradients" in module.forward.why
        with torch.no_grad():
            assert torch.allclose(module(x), expected, atol=1e-2)
        assert module.forward.why == "" and len(module.forward.plan(x).kernels) == 1
    assert isinstance(Gated.forward, Fused) and copied.forward is not one.forward
    with torch.no_grad():
        copied.up.weight.zero_()
    assert torch.equal(copied(x), torch.zeros(24, FF).bfloat16()) and one(x).any()
    both = Doubly(2.0)
    assert torch.allclose(both(x), 1 + 2 * F.relu(x @ both.up.weight.T), atol=2e-2)
    loaded = pickle.loads(pickle.dumps(both))
    assert torch.equal(loaded(x), both(x))


def test_a_copy_of_what_was_called_has_modules_of_its_own() -> None:
    torch.manual_seed(0)
    fused, x = plain(MLP().bfloat16()), drawn(24, D)
    before = fused(x)
    copied = copy.deepcopy(fused)
    own: Any = copied.function
    with torch.no_grad():
        own.down.weight.zero_()
        own.down.bias.zero_()
    assert torch.equal(copied(x), x) and torch.equal(fused(x), before)


def test_a_fused_module_is_used_as_the_module() -> None:
    mlp = MLP().bfloat16()
    fused, x = plain(mlp), drawn(24, D)
    assert [*fused.parameters()] == [*mlp.parameters()] and fused.up is mlp.up
    assert fused.eval() is fused and not mlp.training and not fused.training
    fused.load_state_dict({name: 0.5 * t for name, t in MLP().bfloat16().state_dict().items()})
    with torch.no_grad():
        assert torch.allclose(fused(x), mlp(x), atol=2e-2)
        fused.up = nn.Linear(D, FF, dtype=torch.bfloat16)
        assert fused.up is mlp.up and torch.allclose(fused(x), mlp(x), atol=2e-2)
        assert fused.to(torch.float64) is fused and fused(x.double()).dtype == torch.float64
    with pytest.raises(AttributeError, match="no attribute 'parameters'"):
        plain(by_value).parameters()


@fuse
def pickled_by_name(x: Tensor) -> Tensor:
    return x + 1


def test_a_fused_function_is_pickled_as_what_it_is_of() -> None:
    again = lambda fused: pickle.loads(pickle.dumps(fused))
    assert again(pickled_by_name) is pickled_by_name
    x, w, mlp, gated = drawn(24, D), drawn(FF, D), plain(MLP().bfloat16()), Gated(2.0)
    assert torch.equal(again(mlp)(x), mlp.function(x))
    loaded = again(plain(drawing))
    assert type(loaded) is Fused and loaded.function is drawing
    method, some = again(gated.forward), drawn(24, H)
    assert torch.equal(method(some), gated.forward(some))
    with pytest.raises(Exception, match=r"^Can't (pickle|get local object)[^\n]*$"):
        pickle.dumps(plain(lambda x: x + w))


def test_with_gradients_a_gpu_has_what_torch_compile_gives_inductor(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def inductor(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        compiled.append(all(isinstance(x, Tensor) for x in inputs))
        return module.forward

    def function(x: Tensor, w: Tensor) -> Tensor:
        return F.silu(F.linear(x, w)).view(x.shape[0], 2, -1)

    compiled = list[bool]()
    monkeypatch.setattr(backend, "_on_gpu", lambda _: True)
    known = torch._dynamo.lookup_backend
    found = lambda name: inductor if name == "inductor" else known(name)
    monkeypatch.setattr(torch._dynamo, "lookup_backend", found)
    x, w, call = drawn(24, H), drawn(D, H).requires_grad_(), plain(function)
    for rows in (24, 24, 9, 7):
        given = x[:rows]
        (got,), (own,) = (torch.autograd.grad(f(given, w).sum(), w) for f in (call, function))
        assert torch.equal(got, own) and call.way == "torch.compile", call.why
        assert call.why == "gradients are asked for, and torch.compile has them"
    assert compiled == [True, False]  # sizes are symbols where they have changed
    with torch.no_grad():
        assert torch.allclose(call(x, w), function(x, w), atol=2e-2) and call.way == "the plan"


def test_second_derivatives_are_pytorchs() -> None:
    """Also where one argument is made of another, and where a factor is a gradient's alone."""

    def function(x: Tensor, y: Tensor, w: Tensor) -> Tensor:
        return torch.tanh(F.linear(x, w)) * F.linear(y, w)

    args = [drawn(24, 64).requires_grad_(), drawn(FF, 64).requires_grad_()]

    def seconds(call: Any) -> tuple[Tensor, ...]:
        x, w = args
        factor = torch.ones(24, FF).bfloat16().requires_grad_()
        first = torch.autograd.grad(call(x, x.square() + x, w), [x, w], factor, create_graph=True)
        total = torch.stack([g.float().square().sum() for g in first]).sum()
        return torch.autograd.grad(total, [*args, factor])

    fused = plain(function)
    for got, own in zip(seconds(fused), seconds(function), strict=True):
        assert own.any() and norms(got, own.float()) < 0.01


def test_an_error_is_the_functions_own(capfd: pytest.CaptureFixture[str]) -> None:
    def function(x: Tensor, w: Tensor) -> Tensor:
        return torch.relu(F.linear(x + 1, w))

    fused, x = plain(function), drawn(24, 64)
    for w in (drawn(FF, 32), drawn(FF, 64, 1)):
        with pytest.raises(RuntimeError) as own:
            function(x, w)
        with pytest.raises(RuntimeError) as caught:
            fused(x, w)
        assert type(caught.value) is RuntimeError and str(caught.value) == str(own.value)
    assert "fake_tensor" not in capfd.readouterr().err  # where torch logs a traceback
    w = drawn(FF, 64)
    assert torch.allclose(fused(x, w), function(x, w), atol=2e-2)
    assert fused.way == "the plan"


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a function or a module, not str"):
        fuse("layer")  # pyright: ignore[reportArgumentType]
