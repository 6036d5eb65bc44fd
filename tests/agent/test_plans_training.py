"""Plans of both passes: what is merged before a function is differentiated, and what a kernel
computes beside its product."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.agent.plans import fused, passes, run
from coda_agent.agent.plans.cut import BESIDE, Plan
from coda_agent.agent.plans.fused import fuse
from coda_agent.agent.plans.trace import Value, record
from coda_agent.agent.plans.training import for_training
from tests.agent.test_plans import cache as cache
from tests.agent.test_plans import drawn

M, D, FF, KV = 24, 64, 96, 32


def off(x: Tensor, truth: Tensor) -> float:
    return ((x.double() - truth.double()).norm() / truth.double().norm()).item()


def passed(function: Callable[..., Any], args: list[Tensor]) -> list[Tensor]:
    """Results and gradients."""
    given = [a.detach().requires_grad_() for a in args]
    outs = function(*given)
    outs = [outs] if isinstance(outs, Tensor) else [*outs]
    return [*outs, *torch.autograd.grad(outs, given, [y.detach().sin() for y in outs])]


def normed(x: Tensor, g: Tensor) -> Tensor:
    wide = x.float()
    return (wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + 1e-5)).to(x.dtype) * g


def layer(
    a: Tensor, x: Tensor, wo: Tensor, g: Tensor, gate: Tensor, up: Tensor, down: Tensor,
    last: Tensor, q: Tensor, k: Tensor, v: Tensor,
) -> tuple[Tensor, ...]:  # fmt: skip
    h = x + F.linear(a, wo)
    n = normed(h, g)
    h = h + F.linear(F.silu(F.linear(n, gate)) * F.linear(n, up), down)
    n = normed(h, last)
    return h, *(F.linear(n, w) for w in (q, k, v))


@pytest.mark.sampled(0.5)
def test_a_layers_passes_are_the_papers_kernels() -> None:
    args = [
        drawn(M, D), drawn(M, D, seed=1), drawn(D, D), drawn(D).abs() + 0.5, drawn(FF, D),
        drawn(FF, D, seed=1), drawn(D, FF), drawn(D, seed=1).abs() + 0.5, drawn(D, D, seed=1),
        drawn(KV, D), drawn(KV, D, seed=1),
    ]  # fmt: skip
    plans, chosen = list[Plan](), fused.chosen

    def seen(graph: Any, tensors: Any, **options: Any) -> Any:
        found = chosen(graph, tensors, **options)
        plans.append(found[0])
        return found

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(passes, "chosen", seen)
        got = passed(passes.by_passes(layer, judged=False), args)
    truth, own = passed(layer, [a.double() for a in args]), passed(layer, args)
    for one, other, true in zip(got, own, truth, strict=True):
        assert one.dtype == other.dtype and one.shape == other.shape
        assert off(one, true) <= 1.1 * off(other, true)
    forward, backward = ([k.made.about.accepted for k in p.kernels] for p in plans)  # type: ignore[attr-defined]
    assert forward == [
        "gemm_residual_partial_rmsnorm", "gemm_rmsnorm_swiglu", "gemm_residual_partial_rmsnorm",
        "gemm_rmsnorm",
    ]  # fmt: skip
    assert backward == [
        "gemm_residual_partial_rmsnorm_bwd", "gemm_partial_swiglu_bwd",
        "gemm_residual_partial_rmsnorm_bwd",
    ]  # fmt: skip
    # Gradients of weights are products; else no matrix is left but that of the last gradients.
    left = [s for s in plans[1].steps if isinstance(s, Value) and not s.view]
    wide = [s.called for s in left if s.tensor and s.count >= M * D and s.called != "mm"]
    assert set(wide) <= {"cat", "to", "mul"}
    assert all(
        s.shape[-1] == D + 2 * KV for s in left if s.called in ("cat", "mul") and s.count > M
    )


def gelu_behind(x: Tensor, g: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.gelu(F.linear(normed(x, g), w, b))


def two_biases(x: Tensor, w: Tensor, b: Tensor, v: Tensor, c: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, w, b), F.linear(x, v, c)


def one_bias(x: Tensor, w: Tensor, b: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, w, b), F.linear(x, v)


def norm_is_a_result(x: Tensor, g: Tensor, w: Tensor) -> tuple[Tensor, Tensor]:
    n = normed(x, g)
    return n, F.linear(n, w)


def norm_of_the_shared(x: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.rms_norm(x, (D,), None, 1e-5), w)


def layer_norm(x: Tensor, g: Tensor, b: Tensor, w: Tensor) -> Tensor:
    return F.linear(F.layer_norm(x, (D,), g, b), w)


def computed_weights(x: Tensor, w: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    return F.linear(x, w), F.linear(x, 2 * v)


def other_factor(x: Tensor, g: Tensor, w: Tensor) -> Tensor:
    wide = x.float()
    return F.linear((wide * torch.rsqrt(wide.abs().mean(-1, keepdim=True) + 1)).bfloat16() * g, w)


@pytest.mark.parametrize(
    ("function", "added"),
    [
        (gelu_behind, {"behind_norm"}),
        (two_biases, {"below", "linear", "parts"}),
        (one_bias, set[str]()),
        (norm_is_a_result, set[str]()),
        (norm_of_the_shared, {"behind_norm"}),
        (layer_norm, set[str]()),
        (computed_weights, set[str]()),
        (other_factor, set[str]()),
    ],
)
def test_products_of_one_matrix_and_norms_before_them_are_one_call(
    function: Callable[..., Any], added: set[str]
) -> None:
    shapes = {"x": (M, D), "g": (D,), "w": (FF, D), "v": (KV, D), "c": (KV,)}
    names = function.__code__.co_varnames[: function.__code__.co_argcount]
    shapes["b"] = (D,) if "g" in names and function is layer_norm else (FF,)
    args = [drawn(*shapes[name], seed=i) for i, name in enumerate(names)]
    graph = record(function, tuple(args), {}, names)
    changed = for_training(graph)
    ours = {v.called for v in changed.values} - {v.called for v in graph.values}
    assert ours & {"behind_norm", "below", "in_turn", "parts", "halves"} == added - {"linear"}
    by = run.Runner(changed, changed.values)
    single = graph.structure.is_leaf()
    got = passed(lambda *given: by(given)[0] if single else tuple(by(given)), args)
    truth, own = passed(function, [a.double() for a in args]), passed(function, args)
    for one, other, true in zip(got, own, truth, strict=True):
        assert off(one, true) <= 1.1 * off(other, true) + 1e-6


def beside(x: Tensor, w: Tensor, t: Tensor, v: Tensor) -> tuple[Tensor, Tensor]:
    h = F.silu(t)
    return F.linear(x, w) * h + t, F.linear(h, v)


def before(t: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = F.silu(t)
    return F.linear(F.linear(h, w).tanh(), v) * h


def wider(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w) * (a.float() * b.float() + b.float().exp()).bfloat16()


@pytest.mark.parametrize(
    ("function", "shapes", "inside", "stored"),
    [
        # The other product reads what the kernel stores.
        (beside, [(M, D), (D, D), (M, D), (FF, D)], ["silu"], ["silu", "add"]),
        (before, [(M, D), (FF, D), (D, FF)], [], ["mul"]),  # a product before it reads it
        (wider, [(M, D), (D, D), (M, D), (M, D)], [], ["mul"]),  # two matrices in the place of one
    ],
)
def test_what_is_made_of_tiles_that_a_kernel_reads_is_computed_in_it(
    function: Callable[..., Any],
    shapes: list[tuple[int, ...]],
    inside: list[str],
    stored: list[str],
) -> None:
    args = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    call = fuse(function, judged=False)
    plan = call.plan(*args)
    assert plan is not None
    kernel = plan.kernels[-1]
    own = [v.called for v in kernel.members if v.called in ("silu", "exp")]
    assert own == inside and [v.called for v in kernel.outputs] == stored
    fired = [n.why for n in plan.notes if n.rule == BESIDE and n.fired]
    assert bool(fired) == bool(inside)
    flat = lambda y: y if isinstance(y, tuple) else (y,)
    for got, want in zip(flat(call(*args)), flat(function(*args)), strict=True):
        assert torch.allclose(got, want, atol=2e-2)


def test_a_large_weight_is_turned_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run, "_LARGE_BYTES", 2 * D * FF)
    b = drawn(D, FF).mT  # (N, K), its columns contiguous
    turned = run.along_k(b, run._MANY_ROWS)
    assert torch.equal(turned, b) and turned.is_contiguous()
    assert run.along_k(b, run._MANY_ROWS - 1) is b
    assert run.along_k(kept := b.contiguous(), run._MANY_ROWS) is kept
    assert run.along_k(small := b[:, :-8], run._MANY_ROWS) is small
