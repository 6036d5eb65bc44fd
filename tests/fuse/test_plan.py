"""Plans of whole functions: which kernels they have, and their numbers beside PyTorch's own."""

import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent import generated
from coda_agent.fuse.kernels import RegionKernel
from coda_agent.fuse.plan import Plan, planned
from coda_agent.primitives.resources import RowGather, RowLogSumExp

D, H, KV, FF = 192, 64, 96, 96  # a row of D is no group of columns in one tile


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    with warnings.catch_warnings(action="ignore"):  # that kernels are interpreted here
        yield


def drawn(*shape: int, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return (torch.randn(shape, generator=generator) * shape[-1] ** -0.5).bfloat16()


def norms(got: Any, expected: Any) -> float:
    return float((got.float() - expected).norm() / expected.norm())


def names(plan: Plan) -> list[str]:
    """The accepted kernels that compute the same as those of a plan, or ""."""
    return [kernel.accepted for kernel in plan.kernels]


def compared(function: Any, args: list[Tensor], worse: float = 1.0) -> Plan:
    """The plan of a function; its numbers are as near to float32 as PyTorch's own."""
    plan = planned(function, args)
    wide = [a.float() if a.is_floating_point() else a for a in args]
    flat = lambda y: [*y] if isinstance(y, tuple) else [y]
    own, truth = flat(function(*args)), flat(function(*wide))
    for got, mine, true in zip(plan.module(*args), own, truth, strict=True):
        assert (got.shape, got.dtype, got.stride()) == (mine.shape, mine.dtype, mine.stride())
        assert norms(got, true) <= worse * norms(mine, true) + 1e-6
    return plan


def attention_output(
    x: Tensor, res: Tensor, wo: Tensor, g: Tensor, wg: Tensor, wu: Tensor, wd: Tensor
) -> Tensor:
    h = res + F.linear(x, wo)
    n = F.rms_norm(h, (h.shape[-1],), g, 1e-5)
    return h + F.linear(F.silu(F.linear(n, wg)) * F.linear(n, wu), wd)


def next_projections(
    x: Tensor, wd: Tensor, res: Tensor, g: Tensor, wq: Tensor, wk: Tensor, wv: Tensor
) -> Any:
    """A norm that is spelled out."""
    h = res + F.linear(x, wd)
    wide = h.float()
    n = (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(h.dtype) * g
    return h, F.linear(n, wq), F.linear(n, wk), F.linear(n, wv)


def head(x: Tensor, wd: Tensor, res: Tensor, g: Tensor, w: Tensor, t: Tensor) -> Tensor:
    n = F.rms_norm(res + F.linear(x, wd), (D,), g, 1e-5)
    return F.cross_entropy(F.linear(n, w).flatten(0, 1).float(), t.flatten())


def test_a_llama_layer_has_the_papers_cuts() -> None:
    """Section 3.2.1: the output projection carries residual, the norm's weight and the statistic;
    gate and up are one product, scaled after it; the rest is one number a row."""
    args = [drawn(2, 24, H), drawn(2, 24, D, seed=1), drawn(D, H), drawn(D).abs() + 0.5]
    args += [drawn(FF, D), drawn(FF, D, seed=2), drawn(D, FF)]
    plan = compared(attention_output, args)
    assert names(plan) == ["gemm_residual_partial_rmsnorm", "", ""]
    assert plan.kernels[1].like == "gemm_rmsnorm_swiglu" and plan.why == {}
    assert len(plan.notes) == 2 and "carried past" in plan.notes[0]


def test_projections_of_several_widths_are_one_kernel_behind_a_spelled_norm() -> None:
    args = [drawn(2, 24, FF), drawn(D, FF), drawn(2, 24, D), drawn(D).abs() + 0.5]
    args += [drawn(D, D), drawn(KV, D), drawn(KV, D, seed=3)]
    plan = compared(next_projections, args)
    assert names(plan) == ["gemm_residual_partial_rmsnorm", "gemm_rmsnorm"]
    assert [len(region.outputs) for region in plan.regions] == [3, 3]


def normed_heads(x: Tensor, w: Tensor, g: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    y = F.linear(x, w).view(x.shape[0], -1, g.shape[0])
    n = F.rms_norm(y, (g.shape[0],), g, 1e-6)
    a, b = n.chunk(2, -1)
    return n * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def transposed_heads(x: Tensor, w: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """As transformers rotates them."""
    q = F.linear(x, w).view(x.shape[0], x.shape[1], -1, 64).transpose(1, 2)
    a, b = q.chunk(2, -1)
    return q * cos[:, None] + torch.cat((-b, a), -1) * sin[:, None]


def test_heads_are_normed_and_rotated_in_the_kernel() -> None:
    angle = torch.rand(48, 64, generator=torch.Generator().manual_seed(0)) * 6
    tables = [angle.cos().bfloat16(), angle.sin().bfloat16()]
    norm = [drawn(48, D), drawn(128, D), drawn(64).abs() + 0.5]
    assert len(compared(normed_heads, [*norm, *tables]).kernels) == 1
    tables = [t.view(2, 24, 64) for t in tables]
    assert len(compared(transposed_heads, [drawn(2, 24, D), drawn(128, D), *tables]).kernels) == 1


def test_a_loss_leaves_a_number_a_row() -> None:
    args = [drawn(2, 24, FF), drawn(D, FF), drawn(2, 24, D), drawn(D).abs() + 0.5, drawn(160, D)]
    index = torch.randint(0, 160, (2, 24), generator=torch.Generator().manual_seed(0))
    index[0, :5] = -100
    plan = compared(head, [*args, index], worse=5)
    assert plan.kernels[1].like == "gemm_rmsnorm_partial_cross_entropy"
    stored = plan.kernels[1].region.composition.program.outputs.values()
    assert {*stored} == {RowLogSumExp, RowGather}


def test_log_probabilities_of_some_words_store_no_logits() -> None:
    def wide(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.log_softmax(F.linear(x, w).float(), dim=-1).gather(dim=-1, index=t)

    def narrow(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
        return F.linear(x, w).log_softmax(1).gather(1, t)

    args = [drawn(24, H) * 8, drawn(D, H), torch.arange(24)[:, None] * 7]
    for function in (wide, narrow):
        (region,) = compared(function, args, worse=1.5).regions
        stored = region.composition.program.outputs.values()
        assert {*stored} == {RowLogSumExp, RowGather}


def test_a_norm_that_is_needed_itself_is_left_whole() -> None:
    def both(x: Tensor, w: Tensor, v: Tensor) -> Any:
        n = F.rms_norm(F.linear(x, w), (D,), None, 1e-5)
        return n, F.silu(F.linear(n, v))

    plan = compared(both, [drawn(24, H), drawn(D, H), drawn(FF, D)])
    assert plan.notes == [] and len(plan.kernels) == 2


def test_what_computes_less_than_an_accepted_kernel_has_its_tiles() -> None:
    def gated(x: Tensor, gate: Tensor, up: Tensor) -> Tensor:
        return F.silu(F.linear(x, gate)) * F.linear(x, up)

    (kernel,) = compared(gated, [drawn(40, D), drawn(FF, D), drawn(FF, D, seed=2)]).kernels
    assert (kernel.like, kernel.accepted) == ("gemm_swiglu", "")
    less = generated.gemm_swiglu.without("D").programs["gemm_swiglu"]
    assert kernel.region.composition.program.digest == less.digest


def test_a_product_of_other_types_is_pytorchs_with_its_reason() -> None:
    function = lambda x, w: F.relu(F.linear(x, w))
    args = [drawn(24, H).float(), drawn(D, H).float()]
    plan = planned(function, args)
    assert plan.kernels == [] and plan.reasons == "mm: multiplies float32 with float32"
    assert torch.equal(plan.module(*args)[0], function(*args))
    plan = planned(F.linear, [drawn(24, H), drawn(D, H)])
    assert plan.reasons == "mm: nothing follows it that a kernel could take along"


def test_what_a_kernel_is_made_of_is_asked_for_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that are packed are packed again where they were written to."""
    function = lambda x, gate, up: F.silu(F.linear(x, gate)) * F.linear(x, up)
    args = [drawn(24, D), drawn(FF, D), drawn(FF, D, seed=2)]
    plan = planned(function, args)
    (kernel,) = plan.kernels
    assert isinstance(kernel, RegionKernel)
    first = plan.module(*args)[0]
    assert torch.equal(plan.module(*args)[0], first)
    args[1].mul_(-1)
    assert norms(plan.module(*args)[0], function(*args).float()) < 0.02
