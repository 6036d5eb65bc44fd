"""Products in FP8: the option of the backend, and `_scaled_mm` as a graph has it."""

import copy
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from coda_agent.fuse import explain, fuse
from coda_agent.fuse.record import recorded
from coda_agent.fuse.show import products
from tests.fuse.test_joint import IDS, Model, graded, norms, run, watched
from tests.fuse.test_regions import FF, D, drawn

FP8: dict[str, Any] = {"fp8": "forward"}


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        yield


def held(x: Tensor) -> Tensor:
    """What e4m3 holds of rows, each scaled by its own maximum."""
    scale = x.abs().amax(-1, keepdim=True).clamp(min=1e-12) / 448
    return (x / scale).float().to(torch.float8_e4m3fn).to(x.dtype) * scale


class Product(torch.autograd.Function):
    """The product of what e4m3 holds; gradients are of the whole values."""

    @staticmethod
    def forward(ctx: Any, *inputs: Any) -> Tensor:
        ctx.save_for_backward(*inputs)
        x, w = inputs
        return held(x) @ held(w).mT

    @staticmethod
    def backward(ctx: Any, *grads: Any) -> Any:
        x, w = ctx.saved_tensors
        return grads[0] @ w, grads[0].flatten(0, -2).mT @ x.flatten(0, -2)


def gated(linear: Any, x: Tensor, wg: Tensor, wu: Tensor, wd: Tensor, b: Tensor) -> Tensor:
    return 0.001 * x + linear(F.silu(linear(x, wg) + b) * linear(x, wu), wd)


def test_products_of_weights_are_of_what_e4m3_holds() -> None:
    args = [drawn(2, 24, D), drawn(FF, D), drawn(FF, D, seed=2), drawn(D, FF), drawn(FF)]
    args = [x.requires_grad_() for x in args]
    wide = [x.detach().double().requires_grad_() for x in args]
    call = lambda *xs: gated(F.linear, *xs)
    with watched() as seen:
        y, truth = fuse(call, options=FP8)(*args), gated(Product.apply, *wide)
    (shown,) = seen
    assert sum("in FP8" in note for note in shown.notes) == 3 and len(shown.kernels) >= 2
    assert norms(y, truth) < 0.012 < norms(y, call(*wide))
    dy = drawn(2, 24, D, seed=5)
    y.backward(dy)
    truth.backward(dy.double())
    for own, true in zip(args, wide, strict=True):
        assert norms(own.grad, true.grad) < 0.012


def test_a_model_trains_in_fp8_but_for_its_head() -> None:
    model = Model(layers=1).bfloat16()
    wide = graded(run, copy.deepcopy(model).double(), IDS)
    with watched() as seen:
        got = graded(fuse(run, options=FP8), model, IDS)
    plain = graded(run, model, IDS)
    assert norms(got[0], wide[0]) < 0.01  # of one number, either may be nearer
    for x, y, true in zip(got[1:], plain[1:], wide[1:], strict=True):
        assert norms(y, true) < norms(x, true) < 0.1
    (shown,) = seen
    assert len([note for note in shown.notes if "in FP8" in note]) == 7


def test_without_gradients_products_stay() -> None:
    linear = nn.Linear(D, FF).bfloat16()
    call = lambda x: F.gelu(linear(x))
    with torch.no_grad():
        x = drawn(24, D)
        assert norms(fuse(call, options=FP8)(x), call(x).double()) < 1e-2


def test_a_scaled_product_of_the_user_is_a_kernel() -> None:
    a, b = (drawn(*shape).to(torch.float8_e4m3fn) for shape in ((48, D), (FF, D)))
    scales = torch.rand(48, 1) + 0.5, torch.rand(1, FF) + 0.5

    def call(a: Tensor, b: Tensor, one: Tensor, other: Tensor, fast: bool) -> Tensor:
        multiply: Any = torch._scaled_mm  # pyright: ignore[reportPrivateImportUsage]
        y = multiply(a, b.T, one, other, out_dtype=torch.bfloat16, use_fast_accum=fast)
        return F.silu(y)

    truth = F.silu(a.double() @ b.double().T * scales[0] * scales[1])
    with watched() as seen:
        assert norms(fuse(call)(a, b, *scales, True), truth) < 0.01
    assert len(seen[0].kernels) == 1
    (shown,) = explain(call, a, b, *scales, False)
    assert "exact sum" in shown.steps[0].what
    fast = lambda a, b, one, other: call(a, b, one, other, True)
    recorded_calls = [node.target for node in recorded(fast, [a, b, *scales]).graph.nodes]
    assert torch.ops.aten._scaled_mm.default in recorded_calls


def test_a_product_that_is_scaled_otherwise_is_pytorchs() -> None:
    a, b = (drawn(*shape).to(torch.float8_e4m3fn) for shape in ((48, D), (FF, D)))
    one, other, whole = torch.ones(48, 1), torch.ones(1, FF), torch.tensor(0.5)

    def call(a: Tensor, b: Tensor) -> Tensor:
        multiply: Any = torch.ops.aten._scaled_mm.default
        return F.silu(multiply(a, b.T, one, other, None, whole, torch.bfloat16, True))

    (shown,) = explain(call, a, b)
    assert not shown.kernels and "scales its result" in next(products(shown))[1]


def test_a_product_with_factors_of_its_own_stays_in_16_bits() -> None:
    x, w, b = drawn(48, D), drawn(D, FF).requires_grad_(), drawn(FF)
    call = lambda x, w, b: torch.addmm(b, x, w, beta=0.3, alpha=2.0)
    got, own = fuse(call, options={"fp8": "forward"})(x, w, b), call(x, w, b)
    assert norms(got.detach(), own.detach().double()) < 0.01


@pytest.mark.filterwarnings("error:.*left as it was")
def test_a_residual_that_a_product_reads() -> None:
    x, w = (drawn(*shape).requires_grad_() for shape in ((48, D), (D, D)))
    call = lambda x, w: F.relu(F.linear(x + F.linear(x, w), w))
    with watched() as seen:
        assert norms(fuse(call, options=FP8)(x, w).detach(), call(x, w).double().detach()) < 0.1
    assert len(seen[0].kernels) >= 2


def test_another_word_is_refused() -> None:
    with pytest.raises(Exception, match="fp8 is 'both', expected 'forward'"):
        fuse(lambda x: x + 1, options={"fp8": "both"})(drawn(4, 4))
