"""`fuse`: a thin name for torch.compile by the backend `coda`."""

import functools
import warnings
from collections.abc import Iterator
from importlib.metadata import entry_points
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_agent.fuse import explain, fuse, joint, mm
from coda_agent.fuse.backend import coda
from coda_agent.fuse.show import Shown
from tests.fuse.test_joint import norms
from tests.fuse.test_regions import FF, D, H, drawn


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        yield


class MLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.gate, self.up = nn.Linear(D, FF, False), nn.Linear(D, FF, False)
        self.down = nn.Linear(FF, D)

    def forward(self, x: Tensor) -> Tensor:
        return x + self.down(F.silu(self.gate(x)) * self.up(x))


def test_torch_compile_finds_the_backend_by_its_name() -> None:
    (entry,) = entry_points(group="torch_dynamo_backends", name="coda")
    assert entry.load() is coda
    x, w = drawn(24, H), drawn(D, H)
    function = lambda x, w: torch.tanh(F.linear(x, w))
    assert norms(torch.compile(function, backend="coda")(x, w), function(x, w).double()) < 0.01


def test_a_module_is_fused_with_its_gradients_and_follows_its_weights() -> None:
    torch.manual_seed(0)
    mlp = MLP().bfloat16()
    fused = fuse(mlp)
    x = drawn(24, D).requires_grad_()

    def gradients(call: Any) -> list[Tensor]:
        return [*torch.autograd.grad(call(x).float().square().sum(), [x, *mlp.parameters()])]

    for got, own in zip(gradients(fused), gradients(mlp), strict=True):
        assert norms(got, own.double()) < 0.01
    with torch.no_grad():
        for weight in mlp.parameters():
            weight.mul_(-0.5)
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)
        mlp.gate.weight.data.mul_(-1)
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)
        mlp.up.weight = nn.Parameter(mlp.up.weight * 3)
        assert torch.allclose(fused(x), mlp(x), atol=1e-2)
    assert [*fused.parameters()] == [*mlp.parameters()]


def test_as_a_decorator_of_functions_and_methods() -> None:
    @fuse
    def named(x: Tensor, w: Tensor) -> Tensor:
        """Its words."""
        return torch.tanh(F.linear(x, w))

    class Gated(nn.Module):
        def __init__(self, scale: float) -> None:
            super().__init__()
            self.up, self.scale = nn.Linear(H, FF, False, dtype=torch.bfloat16), scale

        @fuse(dynamic=False)
        def forward(self, x: Tensor) -> Tensor:
            return self.scale * F.relu(self.up(x))

    assert (named.__name__, named.__doc__) == ("named", "Its words.")
    x, w = drawn(24, H), drawn(D, H)
    assert torch.allclose(named(x=x, w=w), torch.tanh(F.linear(x, w)), atol=1e-2)
    for module in (Gated(1.0), Gated(-3.0)):
        expected = module.scale * F.relu(x @ module.up.weight.T)
        assert torch.allclose(module(x), expected, atol=1e-2)


def test_explain_says_for_each_product_why_it_is_or_is_not_a_piece() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor) -> Tensor:
        return F.linear(torch.tanh(F.linear(x, w)), v)

    args = [drawn(24, H), drawn(D, H), drawn(FF, D)]
    for given in (function, fuse(function)):
        (shown,) = explain(given, *args)
        what = [step.what.split(":")[0] for step in shown.steps]
        assert what == ["composed", "PyTorch"]
        why = "PyTorch: nothing follows it that a kernel could take along"
        assert shown.steps[1].what == why
        assert repr(shown).splitlines() == [
            f"{shown.steps[0].step}: {shown.steps[0].what}",
            f"{shown.steps[1].step}: {why}",
            "0 more calls are PyTorch's",
        ]
        assert str(shown) == repr(shown)
    (both,) = explain(function, args[0], args[1].requires_grad_(), args[2])
    assert len(both.kernels) == 2  # the gradient of tanh is one

    def printing(x: Tensor, w: Tensor) -> Tensor:
        y = torch.tanh(F.linear(x, w))
        torch._dynamo.graph_break()
        return torch.sin(F.linear(y, w.T))

    assert [len(s.kernels) for s in explain(printing, args[0], args[1].detach())] == [1, 1]


@torch._dynamo.config.patch(recompile_limit=1)  # pyright: ignore[reportUntypedFunctionDecorator]
def test_the_call_of_flexgemm() -> None:
    """Epilogues take tensors of the enclosing function; another closure is no other kernel.

    Another epilogue is no recompilation of the last one.
    """
    x, w = drawn(24, H), drawn(D, H).T
    tile, row, seen = drawn(24, D), torch.rand(24, 1), list[Shown]()
    token = joint.SEEN.set(seen)
    try:
        for seed in range(3):
            bias = drawn(D, seed=seed)
            epilogues: list[Any] = [
                lambda acc, b=bias: F.gelu(acc + b), lambda acc: acc * row + tile,
                lambda acc, b=bias: (acc + b, F.logsigmoid(acc + b)),
            ]  # fmt: skip
            for epilogue in epilogues:
                got, want = mm(torch.mm, (x, w), epilogue), epilogue(torch.mm(x, w))
                pairs = zip(got, want, strict=True) if isinstance(want, tuple) else [(got, want)]
                assert all(torch.allclose(one, own, atol=2e-2) for one, own in pairs)
    finally:
        joint.SEEN.reset(token)
    assert [len(shown.kernels) for shown in seen] == [1, 1, 1]


def test_an_epilogue_that_is_made_anew_is_no_other_one() -> None:
    x, w, bias, seen = drawn(24, H), drawn(D, H).T, drawn(D), list[Shown]()
    token = joint.SEEN.set(seen)
    try:
        for _ in range(3):
            got = mm(
                torch.mm, (x, w), functools.partial(torch.nn.functional.leaky_relu, inplace=False)
            )
            assert torch.allclose(got, F.leaky_relu(x @ w), atol=2e-2)
            got = mm(torch.mm, (x, w), functools.partial(torch.add, bias))
            assert torch.allclose(got, x @ w + bias, atol=2e-2)
    finally:
        joint.SEEN.reset(token)
    assert len(seen) == 2


def test_what_cannot_be_called_is_refused() -> None:
    with pytest.raises(TypeError, match="takes a function or a module, not str"):
        fuse("layer")  # pyright: ignore[reportCallIssue, reportArgumentType]


def test_the_module_is_the_function() -> None:
    from coda_agent import fuse as module

    package: Any = module  # to a type checker it is the function
    assert package.fuse is fuse and package.explain is explain
    x = torch.ones(4, 16).bfloat16()
    assert torch.equal(module()(lambda x: x + 1)(x), x + 1)


def test_second_derivatives_are_refused_as_by_torch_compile() -> None:
    x, w = drawn(24, H).requires_grad_(), drawn(D, H)
    y = fuse(lambda x, w: torch.tanh(F.linear(x, w)))(x, w)
    (first,) = torch.autograd.grad(y.float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="does not currently support double backward"):
        first.float().sum().backward()


def test_a_model_runs_without_a_compiler_for_c(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nonexistent")
    monkeypatch.setenv("CXX", "/nonexistent/g++")
    mlp, x = MLP().bfloat16(), drawn(24, D)
    assert norms(fuse(mlp)(x), mlp(x).double()) < 0.01
