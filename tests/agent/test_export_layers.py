"""Layers of an export, run here by the kernels in place: numbers against float64, what they refuse,
and that `kernels` takes them."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from coda_agent import generated
from coda_agent.agent.export.loader import layers
from coda_agent.agent.export.loader.layers import LAYERS, layer

KERNELS = {kernel: getattr(generated, kernel) for kernel, _ in LAYERS.values()}


class Linear(nn.Linear):
    def __init__(self, act: Callable[[Tensor], Tensor], bias: bool = True) -> None:
        super().__init__(64, 32, bias=bias)
        self.act = act

    def forward(self, input: Tensor) -> Tensor:
        return self.act(super().forward(input))


class GeluTanhMLP(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.fc1, self.fc2 = nn.Linear(64, 48), nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        return self.fc2(gelu(self.fc1(x)))


class SwiGLUMLP(nn.Module):
    interleaved = True

    def __init__(self) -> None:
        super().__init__()
        self.gate_up_proj = nn.Linear(64, 96, bias=False)
        self.down_proj = nn.Linear(48, 32)

    def forward(self, x: Tensor) -> Tensor:
        gate, up = self.gate_up_proj(x).unflatten(-1, (-1, 2)).unbind(-1)
        return self.down_proj(F.silu(gate) * up)


class LinearCrossEntropyLoss(nn.Module):
    """What `torch.nn.LinearCrossEntropyLoss` has of a module, which torch 2.11 has not."""

    def __init__(self, reduction: str, **options: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(64, 80, bias=options.pop("bias", False))
        self.reduction, self.ignore_index, self.weight = reduction, None, None
        for name, value in options.items():
            setattr(self, name, value)

    def forward(self, input: Tensor, target: Tensor) -> Tensor:
        logits = self.linear(input)
        return F.cross_entropy(logits, target, reduction=self.reduction)


def gelu(x: Tensor) -> Tensor:
    return F.gelu(x, approximate="tanh")


CASES: dict[str, tuple[str, Callable[[], nn.Module]]] = {
    "gelu": ("LinearGeluTanh", lambda: Linear(gelu)),
    "relu": ("LinearRelu", lambda: Linear(F.relu)),
    "silu": ("LinearSilu", lambda: Linear(F.silu, bias=False)),
    "gelu mlp": ("GeluTanhMLP", GeluTanhMLP),
    "swiglu mlp": ("SwiGLUMLP", SwiGLUMLP),
    "mean": ("LinearCrossEntropyLoss", lambda: LinearCrossEntropyLoss("mean")),
    "sum": ("LinearCrossEntropyLoss", lambda: LinearCrossEntropyLoss("sum")),
}


def given(name: str, dtype: torch.dtype = torch.bfloat16) -> tuple[Tensor, ...]:
    if name != "LinearCrossEntropyLoss":
        return (torch.randn(3, 50, 64, dtype=dtype),)
    targets = torch.randint(0, 80, (300,))
    targets[[3, 250]] = -100
    return torch.randn(300, 64, dtype=dtype), targets


def results(
    run: Callable[..., Tensor], module: nn.Module, args: tuple[Tensor, ...]
) -> list[Tensor]:
    """The output, and the gradients of the input and of all parameters."""
    args = (args[0].detach().requires_grad_(), *args[1:])
    out = run(*args)
    slopes = torch.linspace(-1, 2, out.numel(), dtype=out.dtype).view(out.shape) if out.ndim else 3
    return [
        out.detach(),
        *torch.autograd.grad((out * slopes).sum(), (args[0], *module.parameters())),
    ]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("case", CASES)
def test_a_layer_computes_what_its_module_does(
    case: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(layers, "_LOGITS", 80 * 128)  # a loss in three parts, one of them ragged
    name, make = CASES[case]
    torch.manual_seed(0)
    module, found = make().to(dtype), layer(name, KERNELS)
    args = given(name, dtype)
    got = results(lambda *x: found.forward(module, *x), module, args)
    plain = results(module, module, args)
    exact = results(module.double(), module, (args[0].double(), *args[1:]))
    for ours, theirs, truth in zip(got, plain, exact, strict=True):
        error, allowed = ((t - truth).norm() / truth.norm() for t in (ours, theirs))
        assert error <= 1.5 * allowed + 1e-3, (error, allowed)


@pytest.mark.parametrize("case", CASES)
def test_under_the_compiler_of_torch_a_layer_gives_the_same(case: str) -> None:
    name, make = CASES[case]
    torch.manual_seed(1)
    module, found = make().bfloat16(), cast(Any, layer(name, KERNELS))
    args = given(name)
    eager = results(lambda *x: found.forward(module, *x), module, args)
    torch.compiler.reset()
    whole = found.can_torch_compile  # what is not runs between the graphs
    assert whole == (name != "LinearCrossEntropyLoss")
    run = lambda *x: found.forward(module, *x)
    call = torch.compile(run, fullgraph=whole, backend="aot_eager")
    for a, b in zip(eager, results(call, module, args), strict=True):
        torch.testing.assert_close(a, b, rtol=0.01, atol=1e-5)


def test_layers_import_no_compiler() -> None:
    """Which takes seconds, where a kernel's first call takes milliseconds."""
    code = """
import sys
from coda_agent.agent.export.loader.layers import LAYERS, layer
print([layer(name, dict.fromkeys([k for k, _ in LAYERS.values()])).__name__ for name in LAYERS])
print([m for m in ("torch._dynamo", "torch._inductor", "triton") if m in sys.modules])
"""
    command = [sys.executable, "-c", code]
    said = subprocess.run(command, capture_output=True, text=True, check=True).stdout
    assert said.splitlines() == [str([*LAYERS]), "[]"]


def test_rows_that_do_not_count_may_have_any_logits() -> None:
    module, found = LinearCrossEntropyLoss("mean").half(), layer("LinearCrossEntropyLoss", KERNELS)
    x, targets = given("LinearCrossEntropyLoss", torch.float16)
    x[targets == -100] = 60000
    assert not module.linear(x).isfinite().all()
    got = results(lambda *x: found.forward(module, *x), module, (x, targets))
    kept = targets != -100
    exact = results(module.double(), module, (x[kept].double(), targets[kept]))
    assert not got[1][~kept].any()
    for ours, truth in zip((got[0], got[1][kept], got[2]), exact, strict=True):
        assert (ours - truth).norm() < 0.005 * truth.norm()


def test_without_gradients_none_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    module, found = (
        LinearCrossEntropyLoss("mean").bfloat16(),
        layer("LinearCrossEntropyLoss", KERNELS),
    )
    monkeypatch.setattr(layers, "_added", lambda *_: pytest.fail("a gradient was taken"))
    with torch.no_grad():
        assert found.forward(module, *given("LinearCrossEntropyLoss")).isfinite()


@pytest.mark.parametrize(
    ("name", "module", "said"),
    [
        ("SwiGLUMLP", nn.Module(), "rows of gate_up_proj must be gate's and up's in turn"),
        (
            "LinearCrossEntropyLoss",
            LinearCrossEntropyLoss("none"),
            "has reduction 'none', expected mean or sum",
        ),
        (
            "LinearCrossEntropyLoss",
            LinearCrossEntropyLoss("mean", label_smoothing=0.1),
            "has label_smoothing 0.1, expected none",
        ),
        (
            "LinearCrossEntropyLoss",
            LinearCrossEntropyLoss("mean", bias=True),
            "LinearCrossEntropyLoss has bias of a tensor, expected none",
        ),
    ],
)
def test_what_a_layer_has_no_form_for_is_one_line(name: str, module: nn.Module, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        layer(name, KERNELS).forward(module, *given(name))


def test_kernels_takes_every_layer_for_what_it_says_it_is_for() -> None:
    hub = pytest.importorskip("kernels", reason="Hugging Face kernels is not installed")

    class InPlace:
        def __init__(self, name: str) -> None:
            self.load = lambda: layer(name, KERNELS)

    for name, make in CASES.values():
        module: Any = make().bfloat16()
        args, kind, found = given(name), type(module), cast(Any, layer(name, KERNELS))
        assert found.has_backward
        hub.replace_kernel_forward_from_hub(kind, name)
        with hub.use_kernel_mapping({name: {"cpu": InPlace(name)}}, inherit_mapping=False):
            mode = hub.Mode.TRAINING
            if found.can_torch_compile:
                mode |= hub.Mode.TORCH_COMPILE
            hub.kernelize(module, mode=mode, device="cpu", use_fallback=False)
        assert module.forward.__func__.__module__ == layers.__name__
        expected = kind.forward(module, *args).to(module(*args).dtype)
        torch.testing.assert_close(module(*args), expected, rtol=0.02, atol=0.02)
