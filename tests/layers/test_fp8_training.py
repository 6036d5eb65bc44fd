"""Training in FP8: outputs and gradients against float64 of the same mathematics, on e4m3 numbers
that are rounded here anew; layers and models against PyTorch's own FP8 linears."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional as F

from coda_agent.evals.float8 import Float8Linear
from coda_agent.layers import apply_coda_kernels, linear_residual_norm, mlp, norm_linear, normed
from coda_agent.layers.modules import HUGGING_FACE, DecoderLayer
from tests.layers.llama import Config, Layer, positions
from tests.layers.test_fp8 import EPS, SHAPES, Sizes, drawn, e4m3
from tests.layers.test_functional import within
from tests.layers.test_patch import REPLACED, built, ran

pytestmark = [
    pytest.mark.filterwarnings("ignore:coda-agent. no Hopper"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # eval, reentrant
]


def worth(x: Tensor, *, all_in_one: bool = False) -> Tensor:
    """What a bfloat16 matrix is in e4m3, in float64: each row by its maximum, or all of it by one."""
    wide = x.detach().float()
    step = (wide.abs().amax() if all_in_one else wide.abs().amax(-1, keepdim=True)) / 448
    return e4m3(wide / step) * step.double()


def straight(y: Tensor, value: Tensor) -> Tensor:
    """`value`, with the gradients of y."""
    return y + (value - y).detach()


def through_norm(exact: list[Tensor], value: Tensor) -> Tensor:
    """`value` with the gradients of n weightᵀ, n being the norm of x by gamma. As the kernels have
    it, the norm's statistic is the inner product of the gradient with `value` itself."""
    x, gamma, weight = exact
    r = torch.rsqrt(x.square().mean(-1, keepdim=True) + EPS)
    y = (x * gamma * r.detach()) @ weight.T + r * (value / r).detach()
    return straight(y, value)


def holds(outs: Any, truth: Any, mine: list[Tensor], exact: list[Tensor]) -> None:
    """Hold outputs and gradients, by the same draws, to bfloat16's rounding."""
    made = torch.Generator().manual_seed(1)
    grads = [torch.randn(o.shape, generator=made).bfloat16() for o in outs]
    found = torch.autograd.grad(outs, mine, grads)
    wide = torch.autograd.grad(truth, exact, [g.double() for g in grads])
    for one, other in zip((*outs, *found), (*truth, *wide), strict=True):
        assert one.dtype == torch.bfloat16 and other.norm() > 0
        assert (one.double() - other).norm() <= 2**-7 * other.norm()


def inputs(s: Sizes, *names: str) -> tuple[list[Tensor], list[Tensor]]:
    """Some of what is drawn, and the same in float64, with gradients."""
    mine = [drawn(s)[name].requires_grad_() for name in names]
    return mine, [t.detach().double().requires_grad_() for t in mine]


@pytest.mark.parametrize("s", SHAPES)
def test_a_residual(s: Sizes) -> None:
    mine, exact = inputs(s, "a", "o", "x")
    a, o, x = mine
    gamma = drawn(s)["gamma"]
    out, given = linear_residual_norm(a, o, x, gamma, EPS, fp8=True)
    truth = exact[2] + straight(exact[0] @ exact[1].T, worth(a) @ worth(o).T)
    holds([out], [truth], mine, exact)
    assert (given.h.double() - truth * gamma.double()).norm() <= 2**-7 * truth.norm()
    r = torch.rsqrt(truth.square().mean(-1) + EPS)
    torch.testing.assert_close(given.r.double(), r, rtol=1e-3, atol=0)


@pytest.mark.parametrize("rotated", [False, True])
@pytest.mark.parametrize("s", SHAPES)
def test_a_projection(s: Sizes, rotated: bool) -> None:
    mine, exact = inputs(s, "x", "gamma", "qkv")
    x, gamma, qkv = mine
    given, sizes = normed(x, gamma, EPS), (s.n - 32, 16, 16)
    turns = torch.randn(s.rows, s.n // 2)
    table = torch.stack((turns.cos(), -turns.sin()), -1).flatten(1).bfloat16()
    *outs, through = norm_linear(x, given, gamma, qkv, sizes, table if rotated else None, fp8=True)
    value = worth(given.h) * given.r.double()[:, None] @ worth(qkv, all_in_one=True).T
    y = through_norm(exact, value)
    if rotated:
        cos, sin = table[:, 0::2].double(), table[:, 1::2].double()
        left, right = y[:, 0::2], y[:, 1::2]
        y = torch.stack((left * cos + right * sin, right * cos - left * sin), -1).flatten(1)
    holds([*outs, through], [*y.split(sizes, 1), exact[0]], mine, exact)


@pytest.mark.parametrize("activation", ["silu", "relu"])
@pytest.mark.parametrize("s", SHAPES)
def test_an_mlp(s: Sizes, activation: str) -> None:
    mine, exact = inputs(s, "x", "gamma", "gate_up", "down")
    x, gamma, gate_up, down = mine
    given = normed(x, gamma, EPS)
    out, _ = mlp(x, given, gamma, gate_up, down, gamma, EPS, activation, fp8=True)
    value = worth(given.h) * given.r.double()[:, None] @ worth(gate_up, all_in_one=True).T
    z = through_norm(exact[:3], value)
    gated = lambda z: getattr(F, activation)(z[:, 0::2]) * z[:, 1::2]
    # SwiGLU is in the product's epilogue; what is a pass of its own reads rounded numbers.
    held = gated(z.detach() if activation == "silu" else z.detach().bfloat16().double())
    y = straight(gated(z) @ exact[3].T, worth(held.bfloat16()) @ worth(down).T)
    holds([out], [exact[0] + y], mine, exact)


KINDS = {
    "llama": Config(),
    "geglu": Config(hidden_act="gelu_tanh"),
    "head norms": Config(qk_norm=True),
}


@pytest.mark.parametrize("kind", KINDS)
def test_a_layer_is_as_near_to_float64_as_pytorch_s_fp8(kind: str) -> None:
    c = KINDS[kind]
    torch.manual_seed(0)
    layer = Layer(c).bfloat16()
    sizes = c.width, c.ffn, c.heads, c.kv_heads, c.head_dim, c.eps
    ours = DecoderLayer(*sizes, c.hidden_act, c.qk_norm, fp8=True, dtype=torch.bfloat16)
    ours.load_state_dict(layer.state_dict())
    x, g = (torch.randn(4, 40, c.width).bfloat16() for _ in range(2))
    cos, sin = positions(x[..., 0], c, x.dtype)

    def reference(layer: Any, x: Tensor) -> list[Any]:
        x = x.clone().requires_grad_()
        out = layer(x, position_embeddings=(cos.to(x.dtype), sin.to(x.dtype)))
        (out * g).sum().backward()
        return [out.detach(), x.grad, *(p.grad for p in layer.parameters())]

    truth, others = (
        reference(copy.deepcopy(layer).double(), x.double()),
        reference(by_pytorch(layer), x),
    )
    after = torch.nn.RMSNorm(c.width, c.eps, dtype=torch.bfloat16)
    start = x.clone().requires_grad_()
    out, _ = ours(start, None, ours.table(cos, sin), after)
    (out * g).sum().backward()
    for p in ours.parameters():
        p.data, p.grad = p.grad, None  # pyright: ignore[reportAttributeAccessIssue]
    grads = ours.state_dict_of(HUGGING_FACE)
    found = [out.detach(), start.grad, *(grads[n] for n, _ in layer.named_parameters())]
    as_near(found, others, truth)


def as_near(found: list[Any], theirs: list[Any], truth: list[Any], times: float = 1.05) -> None:
    """Hold that each is as near to float64 as PyTorch's FP8 is, and that all are nearer: forward
    both round to e4m3 alike, and backward ours does not."""
    ratios = []
    for mine, other, exact in zip(found, theirs, truth, strict=True):
        within(mine, other, exact, times=times)
        ratios.append(float((mine - exact).norm() / (other - exact).norm()))
    assert sum(ratios) / len(ratios) < 0.95


def by_pytorch(module: Any) -> Any:
    """A copy whose linears, all but the head, are PyTorch's in FP8."""
    copied = copy.deepcopy(module)
    for name, part in copied.named_modules():
        if isinstance(part, torch.nn.Linear) and name != "lm_head":
            part.__class__ = Float8Linear
    return copied


MODELS = {
    "llama": (Config(), f"{REPLACED}; FP8 in training"),
    "biased": (
        Config(qkv_bias=True, o_bias=True),
        f"{REPLACED}; FP8 in training, but not of query, key and value, which have biases",
    ),
    "sandwich": (
        Config(sandwich=True, hidden_act="gelu_tanh", qk_norm=True, tied=True),
        "norm + QKV, norm + gate and up; FP8 in training; by PyTorch: what else",
    ),
}


@pytest.mark.parametrize("kind", MODELS)
def test_a_model_is_as_near_to_float64_as_pytorch_s_fp8(kind: str) -> None:
    config, said = MODELS[kind]
    model, plain, size = built(config), built(config), (2, 24)
    apply_coda_kernels(plain)
    before, truth = ran(model, *size), ran(copy.deepcopy(model).double(), *size)
    theirs = ran(by_pytorch(model), *size)
    report = apply_coda_kernels(model, fp8=True)
    assert report.replaced["layers.1"] == said
    found, expected = ran(model, *size), ran(plain, *size)
    # Without gradients, in eval, nothing is in FP8.
    assert torch.equal(found.pop("logits"), expected["logits"])
    loss, exact = found.pop("loss"), float(truth["loss"])
    assert loss != expected["loss"] and float(loss) == pytest.approx(exact, rel=3e-3)
    as_near([*found.values()], *([t[n] for n in found] for t in (theirs, truth)), times=1.3)
    report.revert()
    for name, t in ran(model, *size).items():
        assert torch.equal(before[name], t), name


def test_losses_fall_as_in_bfloat16() -> None:
    courses = []
    for fp8 in (False, True):
        model = built(Config())
        apply_coda_kernels(model, fp8=fp8)
        optimizer, losses = torch.optim.AdamW(model.parameters(), lr=1e-2), []
        for _ in range(12):
            losses.append(ran(model)["loss"])
            optimizer.step()
        courses.append(torch.stack(losses))
    plain, ours = courses
    assert plain[-1] < plain[0] - 4 and not torch.equal(ours, plain)
    torch.testing.assert_close(ours, plain, rtol=0, atol=0.05)


@pytest.mark.parametrize("reentrant", [False, True])
def test_packed_and_checkpointed_it_is_the_same_model(reentrant: bool) -> None:
    plain, model = built(Config()), built(Config())
    apply_coda_kernels(plain, fp8=True)
    expected = ran(plain)
    report = apply_coda_kernels(model, pack=True, fp8=True)
    assert report.replaced["layers.0"] == f"{REPLACED}; weights packed; FP8 in training"
    found = ran(model)
    for name in ("logits", "loss", *(n for n, _ in model.named_parameters() if n in expected)):
        assert torch.equal(found[name], expected[name]), name
    model.model.checkpoint = reentrant
    for name, t in ran(model).items():
        # Between layers the statistic is computed again, of the rounded stream.
        torch.testing.assert_close(t.float(), found[name].float(), rtol=0.1, atol=0.03, msg=name)


def test_weight_gradients_are_added_to_main_grad() -> None:
    model = built(Config())
    apply_coda_kernels(model, pack=True, fp8=True)
    name = "model.layers.1.mlp.gate_up_weight"
    expected, weight = ran(model)[name], model.get_parameter(name)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    ids = torch.randint(0, 96, (2, 23), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    model.train()(ids, labels=ids).loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.bfloat16(), expected)


def test_a_compiled_model_is_one_graph() -> None:
    model, graphs = built(Config()), list[Any]()
    apply_coda_kernels(model, fp8=True)
    expected = ran(model)

    def backend(graph: Any, inputs: Any) -> Any:
        graphs.append(graph)
        return graph

    torch.compiler.reset()
    stack = torch.compile(model.model, backend=backend, fullgraph=True)
    ids = torch.randint(0, 96, (2, 23), generator=torch.Generator().manual_seed(2))
    model.zero_grad()
    logits = model.train().lm_head(stack(ids))
    F.cross_entropy(logits[:, :-1].flatten(0, 1).float(), ids[:, 1:].flatten()).backward()
    assert len(graphs) == 1
    for name, p in model.named_parameters():
        torch.testing.assert_close(p.grad, expected[name], rtol=0.2, atol=0.02, msg=name)


def test_what_fp8_does_not_take_is_refused_or_named() -> None:
    x, gamma, weight = torch.randn(4, 64), torch.ones(64), torch.randn(64, 64)
    with pytest.raises(ValueError, match=r"give bfloat16 and x is torch\.float16; leave fp8 out"):
        linear_residual_norm(x.half(), weight.half(), x.half(), gamma.half(), EPS, fp8=True)
    x, gamma, weight = (t.bfloat16() for t in (x, gamma, weight))
    given = normed(x, gamma, EPS)
    with pytest.raises(ValueError, match="of a norm take no bias; leave fp8 out"):
        norm_linear(x, given, gamma, weight, (64,), bias=gamma, fp8=True)
    odd = torch.randn(24, 64).bfloat16()
    with pytest.raises(ValueError, match=r"a weight is \(24, 64\), expected \(N, K\) in multiples"):
        norm_linear(x, given, gamma, odd, (24,), fp8=True)
    report = apply_coda_kernels(built(Config()).half(), fp8=True)
    assert report.left["layers.0"] == "q_proj is torch.float16, expected bfloat16"
    assert not report.replaced
