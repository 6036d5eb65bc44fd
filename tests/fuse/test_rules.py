"""What changes in a graph of both passes: which calls are left, and that the numbers stay."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx

from coda_agent.agent.authors.composer.calls import ancestors
from coda_agent.fuse import backend, fuse, joint
from coda_agent.fuse.show import Shown
from tests.fuse.test_joint import norms, watched
from tests.fuse.test_regions import D, H, drawn

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")


def both(function: Callable[..., Tensor], args: list[Tensor], worse: float = 1.1) -> Shown:
    """How both passes are cut; their results are as near to float64 as PyTorch's."""

    def results(call: Callable[..., Tensor], wide: bool) -> list[Tensor]:
        given = [a.double() if wide and a.is_floating_point() else a.clone() for a in args]
        for a in given:
            a.requires_grad_(a.is_floating_point())
        y = call(*given)
        weight = torch.linspace(-1, 1, y.numel(), dtype=y.dtype).view_as(y)
        (y * weight).sum().backward()
        return [y.detach(), *(a.grad for a in given if a.grad is not None)]

    with watched() as seen:
        got = results(fuse(function), False)
    own, truth = results(function, False), results(function, True)
    for mine, pytorch, true in zip(got, own, truth, strict=True):
        assert norms(mine, true) <= worse * norms(pytorch, true) + 1e-3
    (shown,) = seen
    return shown


def calls(shown: Shown, name: str) -> int:
    return sum(f"aten.{name}." in line for line in shown.graph)


@pytest.mark.parametrize("options", [{}, {"ignore_index": 3}, {"reduction": "none"}])
def test_the_gradient_of_a_loss_sums_no_row_of_zeros(options: Any) -> None:
    targets = torch.arange(24) % 7
    loss = lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets, **options)
    shown = both(loss, [drawn(24, H) * 4, drawn(160, H) * 4])
    assert any("sums rows of one number" in note for note in shown.notes)
    assert not any("aten.sum.dim_IntList" in line and ", 160]" in line for line in shown.graph)


def test_a_row_of_several_numbers_is_summed() -> None:
    targets = torch.arange(24) % 7
    loss = lambda x, w: F.cross_entropy(F.linear(x, w).float(), targets, label_smoothing=0.1)
    both(loss, [drawn(24, H) * 4, drawn(160, H) * 4])
    hot = lambda x, w: (
        F.linear(x, w).float()
        * (torch.arange(160) == targets[:, None]).float().sum(-1, keepdim=True)
    )
    both(hot, [drawn(24, H), drawn(160, H)])


def attended(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor) -> Tensor:
    """Queries are scaled by place, so that gradients are made pointwise."""
    q, k, v = (F.linear(x, w)[None, None] for w in (wq, wk, wv))
    return F.scaled_dot_product_attention(q * cos, k * cos, v)[0, 0]


def test_gradients_of_weights_of_one_operand_are_one_product() -> None:
    args = [drawn(24, H), *(drawn(D, H, seed=i) for i in range(3)), drawn(24, 1)]
    shown = both(attended, args)
    assert sum("has gradients of other weights" in note for note in shown.notes) == 1
    assert calls(shown, "mm") == 3 + 1 + 1  # for q, k and v; of x; of the three weights
    only = lambda wq, wk, wv: attended(args[0].to(wq.dtype), wq, wk, wv, args[4].to(wq.dtype))
    assert calls(both(only, args[1:4]), "mm") == 3 + 1


def test_gradients_that_a_bias_sums_stay_apart() -> None:
    def biased(x: Tensor, wq: Tensor, wk: Tensor, wv: Tensor, cos: Tensor, b: Tensor) -> Tensor:
        q, k, v = (F.linear(x, w, b)[None, None] for w in (wq, wk, wv))
        return F.scaled_dot_product_attention(q * cos, k * cos, v)[0, 0]

    args = [drawn(24, H), *(drawn(D, H, seed=i) for i in range(3)), drawn(24, 1), drawn(D)]
    assert not any("other weights" in note for note in both(biased, args, worse=1.3).notes)


def test_what_products_give_is_not_laid_side_by_side() -> None:
    function = lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)
    shown = both(function, [drawn(24, H), drawn(D, H), drawn(D, H, seed=1), drawn(H, D)])
    assert not any("other weights" in note for note in shown.notes)


def test_a_gradient_reads_what_was_stored_and_stores_what_a_product_reads() -> None:
    """The gate's gradient reads gate and up as they are, and gives both gradients and the value
    that the weight behind them needs."""
    function = lambda x, g, u, d: F.linear(F.silu(F.linear(x, g)) * F.linear(x, u), d)
    shown = both(function, [drawn(24, H), drawn(D, H), drawn(D, H, seed=1), drawn(H, D)])
    programs = [program for _, program in shown.kernels if len(program["operands"]) == 2]
    assert [len(program["outputs"]) for program in programs] == [3]
    assert "derivative(silu" in shown.kernels[1][0]
    step = next(step for step in shown.steps if step.step.count(" + ") == 2 and "sub" in step.what)
    matrix = 2 * 24 * D
    assert step.bytes == 2 * 24 * H + 2 * D * H + 5 * matrix  # A, B; two read, three written


def test_what_a_gradient_reads_is_stored_where_what_it_is_made_of_has_as_many_bytes() -> None:
    """Made of the bare product, it took a kernel more, a fifth of both passes at K = 160 (H200)."""
    shown = both(
        lambda x, w, b: F.softplus(F.linear(x, w) + b), [drawn(24, H), drawn(D, H), drawn(D)]
    )
    ((text, program),) = shown.kernels
    assert "add = acc + " in text and len(program["outputs"]) == 2


def test_what_is_read_wide_elsewhere_is_made_again_in_the_kernel() -> None:
    def function(x: Tensor, w: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        wide = t.float().exp()
        return (F.linear(x, w) * wide).bfloat16(), wide.cumsum(0)

    args = [drawn(24, H), drawn(D, H), drawn(24, D)]
    with torch.no_grad(), watched() as seen:
        for got, own in zip(fuse(function)(*args), function(*args), strict=True):
            assert torch.allclose(got, own, atol=1e-2, rtol=1e-2)
    (shown,) = seen
    assert len(shown.kernels) == 1 and "exp(" in shown.kernels[0][0]


@pytest.mark.parametrize("refused", ["both", "second", "neither"])
def test_a_factor_is_carried_back_where_no_kernel_gains_by_it(
    refused: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the first product stores its row without the factor, it stays behind the second."""
    graphs, called, judged = [], backend._called, joint._judged

    def seen(module: fx.GraphModule, *rest: Any, **options: Any) -> Any:
        graphs.append(module.graph)
        return called(module, *rest, **options)

    def some(place: Any, kernel: Any, device: torch.device) -> Any:
        first = "tanh" not in str(place.region.part)
        return (
            "no"
            if refused in ("both", "" if first else "second")
            else judged(place, kernel, device)
        )

    monkeypatch.setattr(backend, "_called", seen)
    monkeypatch.setattr(joint, "_judged", some)

    def function(x: Tensor, w: Tensor, r: Tensor, g: Tensor, v: Tensor) -> Tensor:
        h = F.rms_norm(F.linear(x, w) + r, (D,), g, eps=1e-5)
        return F.gelu(F.linear(h, v), approximate="tanh")

    args = [drawn(24, H) * 8, drawn(D, H), drawn(24, D) * 14, drawn(D) * 14, drawn(H, D)]
    with torch.no_grad(), watched() as shown:
        found = fuse(function)(*args)
    exact = function(*(x.double() for x in args))
    assert norms(found, exact) < 1.1 * norms(function(*args), exact) + 1e-3
    carried = ["carried" in note for note in shown[0].notes]
    assert carried == [True] * (refused != "both")
    products = [n for n in graphs[0].nodes if n.target is torch.ops.aten.mm.default]
    assert len(products) == {"both": 2, "second": 1, "neither": 0}[refused]
    for product in products:
        before = {n.target for n in ancestors([product.args[0]])}
        assert (torch.ops.aten.rsqrt.default in before) == (
            refused == "both" and product is products[-1]
        )
