"""Liger's registry finds the kernel by name; numbers are held against Liger's contract in float64."""

from __future__ import annotations

import inspect
from typing import Any

import pytest
import torch
from torch.nn import functional as F

pytest.importorskip("liger_kernel.backends", reason="liger-kernel is not installed")
from liger_kernel import functional  # pyright: ignore[reportMissingImports]
from liger_kernel.backends import (  # pyright: ignore[reportMissingImports]
    Capability,
    available_impls,
    clear_available_cache,
)
from liger_kernel.backends.registry import (  # pyright: ignore[reportMissingImports]
    get_registered,
)

from coda_agent.integrations import liger
from coda_agent.integrations.liger import NAME, OP, register

run = functional.fused_linear_cross_entropy


@pytest.fixture(autouse=True)
def entered(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a machine without a GPU, where nothing would be available."""
    register()
    monkeypatch.setattr(Capability, "_evaluate", lambda *_: (True, None))


def given() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    torch.manual_seed(0)
    x, weight = torch.randn(300, 64).bfloat16(), torch.randn(80, 64).bfloat16() / 4
    targets = torch.randint(0, 80, (300,))
    targets[:5] = -100
    return x.requires_grad_(), weight.requires_grad_(), targets


@pytest.mark.parametrize("reduction", ["mean", "sum"])
def test_it_computes_the_loss_and_its_gradients(
    reduction: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(liger, "_LOGITS", 80 * 128)  # in three parts, one of them ragged
    x, weight, targets = given()
    loss, *rest = run(x, weight, targets, reduction=reduction, impl=NAME)
    assert rest == [None] * 3 and loss.dtype == torch.float32
    got = torch.autograd.grad(2 * loss, (x, weight))
    wide = [t.detach().double().requires_grad_() for t in (x, weight)]
    exact = F.cross_entropy(wide[0] @ wide[1].T, targets, reduction=reduction)
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    for ours, truth in zip(got, torch.autograd.grad(2 * exact, wide), strict=True):
        assert ours.dtype == torch.bfloat16
        assert (ours - truth).norm() < 0.005 * truth.norm()


def test_rows_that_do_not_count_may_have_any_logits() -> None:
    x, weight, targets = (t.detach() for t in given())
    x, weight = (t.half().requires_grad_() for t in (x, weight))
    with torch.no_grad():
        x[targets == -100] = 60000
    assert not F.linear(x, weight).isfinite().all()
    loss = run(x, weight, targets, impl=NAME)[0]
    dx, dweight = torch.autograd.grad(loss, (x, weight))
    counted = targets != -100
    wide = [t.detach().double().requires_grad_() for t in (x[counted], weight)]
    exact = F.cross_entropy(wide[0] @ wide[1].T, targets[counted])
    torch.testing.assert_close(loss.double(), exact, rtol=1e-5, atol=0)
    assert not dx[~counted].any()
    for ours, truth in zip((dx[counted], dweight), torch.autograd.grad(exact, wide), strict=True):
        assert (ours - truth).norm() < 0.005 * truth.norm()


def test_without_gradients_none_are_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(liger, "_logit_gradient", lambda *_: pytest.fail("a gradient was taken"))
    with torch.no_grad():
        assert run(*given(), impl=NAME)[0].isfinite()


def test_torch_compile_leaves_the_loss_between_its_graphs() -> None:
    x, weight, targets = given()
    call = lambda: 2 * run(x, weight, targets, impl=NAME)[0]
    eager = torch.autograd.grad(call(), (x, weight))
    compiled = torch.compile(call, backend="aot_eager")
    for a, b in zip(eager, torch.autograd.grad(compiled(), (x, weight)), strict=True):
        torch.testing.assert_close(a, b, rtol=0, atol=0)


def test_it_is_found_by_name_and_never_chosen_unasked(monkeypatch: pytest.MonkeyPatch) -> None:
    clear_available_cache()
    known = available_impls(OP)
    clear_available_cache()
    assert known[-1] == NAME and "nvidia-triton" in known
    x, weight, targets = given()
    monkeypatch.setenv("LIGER_KERNEL_IMPL_FUSED_LINEAR_CROSS_ENTROPY", NAME)
    by_environment = run(x, weight, targets)[0]
    assert torch.equal(by_environment, run(x, weight, targets, impl=NAME)[0])


def test_it_takes_what_ligers_own_take() -> None:
    known: list[Any] = [get_registered(OP, x) for x in (NAME, "nvidia-triton")]
    mine, theirs = (inspect.signature(x.forward).parameters for x in known)
    assert [(x.name, x.kind, x.default) for x in mine.values()] == [
        (x.name, x.kind, x.default) for x in theirs.values()
    ]


def test_options_that_it_has_no_form_for_are_refused() -> None:
    x, weight, targets = given()
    refused: dict[str, Any] = {"softcap": 30.0, "reduction": "none", "return_z_loss": True}
    for option, value in (refused | {"bias": weight[:, 0], "mode": "fast"}).items():
        with pytest.raises(ValueError, match=f"{OP} by {NAME} has {option} .*, expected"):
            run(x, weight, targets, impl=NAME, **{option: value})


@pytest.mark.parametrize(
    ("found", "said"), [((8, 0), "sm_80 < required sm_90"), ((10, 0), "sm_100 > supported sm_90")]
)
def test_another_gpu_is_refused(
    found: tuple[int, int], said: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.undo()
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: found)
    with pytest.raises(RuntimeError, match=said):
        run(*given(), impl=NAME)
