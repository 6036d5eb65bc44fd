"""One decoder layer by the kernels: outputs and gradients no further from float64 than PyTorch's own."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from coda_agent.generated import gemm_rmsnorm_partial_cross_entropy
from coda_agent.layers import functional, packing
from coda_agent.layers.functional import norm_linear, normed
from coda_agent.layers.head import head_loss
from coda_agent.layers.modules import HUGGING_FACE, TORCHTITAN, DecoderLayer, Names
from tests.layers.llama import Config, Layer, RMSNorm, positions

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper")
CONFIG = Config()
KINDS = {
    "llama": CONFIG,
    "geglu": Config(hidden_act="gelu"),
    "geglu by tanh": Config(hidden_act="gelu_tanh"),
    "reglu": Config(hidden_act="relu"),
    "head norms": Config(qk_norm=True),
}


def within(ours: Tensor, theirs: Tensor, truth: Tensor, *, times: float = 1.0) -> None:
    """Hold that `ours` is as near to `truth` as `theirs`, in norm."""
    assert ours.shape == truth.shape
    error, bound = ((t.double() - truth).norm() for t in (ours, theirs))
    assert truth.norm() > 0
    assert error <= times * bound, f"error {error:.3e}, PyTorch's {bound:.3e}"


def built(c: Config = CONFIG) -> tuple[Layer, RMSNorm, DecoderLayer]:
    torch.manual_seed(0)
    layer, norm = Layer(c).bfloat16(), RMSNorm(c.width, c.eps).bfloat16()
    sizes = c.width, c.ffn, c.heads, c.kv_heads, c.head_dim, c.eps
    ours = DecoderLayer(*sizes, c.hidden_act, c.qk_norm, dtype=torch.bfloat16)
    ours.load_state_dict(layer.state_dict())
    return layer, norm, ours


@pytest.mark.parametrize(("kind", "batch"), [("llama", 1), *((kind, 3) for kind in KINDS)])
def test_a_layer_and_all_its_gradients(kind: str, batch: int) -> None:
    layer, norm, ours = built(KINDS[kind])
    after = torch.nn.RMSNorm(CONFIG.width, eps=CONFIG.eps, dtype=torch.bfloat16)
    after.weight.data.copy_(norm.weight)
    x = torch.randn(batch, 37, CONFIG.width).bfloat16()
    g, gn = torch.randn_like(x), torch.randn_like(x)
    cos, sin = positions(x[..., 0], CONFIG, x.dtype)

    def reference(layer: Layer, norm: RMSNorm, x: Tensor) -> tuple[list[Any], list[str]]:
        x = x.clone().requires_grad_()
        places = cos.to(x.dtype), sin.to(x.dtype)
        out = layer(x, position_embeddings=places)
        ((out * g).sum() + (norm(out) * gn).sum()).backward()
        grads = {n: p.grad for n, p in layer.named_parameters()}
        return [out.detach(), x.grad, *grads.values(), norm.weight.grad], list(grads)

    truth, names = reference(
        copy.deepcopy(layer).double(), copy.deepcopy(norm).double(), x.double()
    )
    theirs, _ = reference(layer, norm, x)

    start = x.clone().requires_grad_()
    out, given = ours(start, None, ours.table(cos, sin), after)
    ((out * g).sum() + (after(out) * gn).sum()).backward()
    # Gradients are packed as the weights are: take them apart by the same way.
    for p in ours.parameters():
        p.data, p.grad = p.grad, None  # pyright: ignore[reportAttributeAccessIssue]
    grads = ours.state_dict_of(HUGGING_FACE)
    found = [out.detach(), start.grad, *[grads[n] for n in names], after.weight.grad]
    for mine, other, exact in zip(found, theirs, truth, strict=True):
        within(mine, other, exact)
    h = (out.double() * norm.weight).flatten(0, 1)
    torch.testing.assert_close(given.h.double(), h, atol=0.05, rtol=0.02)


@pytest.mark.parametrize("kind", ["llama", "head norms"])
@pytest.mark.parametrize("names", [HUGGING_FACE, TORCHTITAN], ids=["hugging face", "torchtitan"])
def test_state_dicts_load_either_way(names: Names, kind: str) -> None:
    _, _, ours = built(KINDS[kind])
    other = built(KINDS[kind])[2]
    for p in other.parameters():
        p.data.zero_()
    given = ours.state_dict_of(names)
    other.load_state_dict(given)
    again = other.state_dict_of(names)
    assert len(given) == (11 if kind == "head norms" else 9)
    for name, t in given.items():
        assert torch.equal(t, again[name])
    for name, t in ours.state_dict().items():
        assert torch.equal(t, other.state_dict()[name])


def test_the_names_of_hugging_face_are_its_own() -> None:
    layer, _, ours = built()
    given = ours.state_dict_of(HUGGING_FACE)
    assert given.keys() == layer.state_dict().keys()
    for name, t in layer.state_dict().items():
        assert torch.equal(t, given[name])


@pytest.mark.parametrize("step", [128, 96 * 131, 1 << 20], ids=["pieces", "131 rows", "whole"])
def test_the_head_s_loss_and_gradients(step: int, monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(1)
    width, vocabulary, rows = 64, 96, 300
    monkeypatch.setattr("coda_agent.layers.head._LOGITS", step)
    x, gamma = torch.randn(rows, width).bfloat16(), torch.rand(width).bfloat16() + 0.5
    weight = (torch.randn(vocabulary, width) / 4).bfloat16()
    y = torch.randint(0, vocabulary, (rows,))
    name = "coda_agent.layers.head.gemm_rmsnorm_partial_cross_entropy"

    def aligned(*tensors: Tensor) -> Any:
        assert all(t.storage_offset() * t.element_size() % 32 == 0 for t in tensors)
        return gemm_rmsnorm_partial_cross_entropy(*tensors)

    monkeypatch.setattr(name, aligned)
    y[::7] = -100

    def reference(kind: torch.dtype) -> list[Any]:
        inputs = [t.to(kind).requires_grad_() for t in (x, gamma, weight)]
        wide = inputs[0].to(torch.promote_types(kind, torch.float32))
        scale = torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5)
        logits = torch.nn.functional.linear((wide * scale).to(kind) * inputs[1], inputs[2])
        logits = logits.to(torch.promote_types(kind, torch.float32))
        loss = torch.nn.functional.cross_entropy(logits, y)
        loss.backward()
        return [loss.detach(), *[t.grad for t in inputs]]

    inputs = [t.clone().requires_grad_() for t in (x, gamma, weight)]
    loss = head_loss(inputs[0], normed(x, gamma, 1e-5), inputs[1], inputs[2], y)
    loss.backward()
    truth = reference(torch.float64)
    torch.testing.assert_close(loss.double(), truth[0], rtol=2e-4, atol=0)
    theirs = reference(torch.bfloat16)
    for mine, other, exact in zip(inputs, theirs[1:], truth[1:], strict=True):
        assert mine.grad is not None
        within(mine.grad, other, exact)


@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16])
def test_weight_gradients_are_added_to_main_grad(kind: torch.dtype) -> None:
    """Two passes against those of plain autograd, in a layer and its head."""
    c, plain, ours = CONFIG, built()[2], built()[2]
    after = torch.nn.RMSNorm(c.width, eps=c.eps, dtype=torch.bfloat16)
    words = (torch.randn(c.vocab, c.width) / 4).bfloat16()
    heads = [torch.nn.Parameter(words.clone()) for _ in range(2)]
    draws = [torch.randn(1, 9, c.width).bfloat16() for _ in range(2)]
    y = torch.randint(0, c.vocab, (9,))

    def passed(layer: DecoderLayer, head: Tensor, x: Tensor) -> None:
        out, given = layer(x, None, None, after)
        head_loss(out.flatten(0, 1), given, after.weight, head, y).backward()

    products: dict[str, Any] = {n: getattr(ours, n).weight for n in ("qkv", "o", "gate_up", "down")}
    products["head"] = heads[1]
    start = {n: torch.randn_like(w, dtype=kind) / 8 for n, w in products.items()}
    for name, weight in products.items():
        weight.main_grad = start[name].clone()
    if kind == torch.bfloat16:
        products["o"].grad = products["o"].main_grad
    hooked = list[bool]()
    flagged: Any = products["down"]
    flagged.grad_added_to_main_grad = False
    flagged.register_post_accumulate_grad_hook(
        lambda w: hooked.append(w.grad_added_to_main_grad and not w.grad.any())
    )
    truth: dict[str, Tensor] = {}
    for x in draws:
        plain.zero_grad()
        heads[0].grad = None
        passed(plain, heads[0], x)
        passed(ours, heads[1], x)
        for name in products:
            grad = heads[0].grad if name == "head" else getattr(plain, name).weight.grad
            assert grad is not None
            truth[name] = truth.get(name, start[name].double()) + grad.double()
    assert hooked == [True, True]
    for name, weight in products.items():
        assert name == "down" or weight.grad is (
            weight.main_grad if name == "o" and kind == torch.bfloat16 else None
        )
        found, moved = weight.main_grad, (truth[name] - start[name].double()).norm()
        assert found.dtype == kind and moved > 0
        # The reference rounds each gradient to bfloat16, and bfloat16 sums are rounded twice.
        bound = 0.004 * moved + (0 if kind == torch.float32 else 0.006 * truth[name].norm())
        assert (found.double() - truth[name]).norm() <= bound, name
    norm = ours.mlp_norm.weight
    assert norm.grad is not None  # is not a product's
    flagged.main_grad = torch.zeros(3, dtype=kind)
    with pytest.raises(
        TypeError, match=r"main_grad is \(3,\) torch.*, expected \(64, 80\) float32"
    ):
        passed(ours, heads[1], draws[0])


def test_an_unknown_activation_is_refused() -> None:
    layer = DecoderLayer(16, 16, 1, 1, 16, activation="swish", dtype=torch.bfloat16)
    with pytest.raises(ValueError, match="no activation 'swish', expected one of silu, gelu,"):
        layer(torch.ones(1, 2, 16).bfloat16(), None, None, layer.mlp_norm)


def test_the_last_pass_alone_writes_over_what_was_saved(monkeypatch: pytest.MonkeyPatch) -> None:
    """A graph that is kept gives the same gradients again; else SwiGLU's backward takes no memory
    for its widest gradient."""
    layer, x = built()[2], torch.randn(1, 5, CONFIG.width).bfloat16()
    after = torch.nn.RMSNorm(CONFIG.width, eps=CONFIG.eps, dtype=torch.bfloat16)
    kernel, given = functional.gemm_partial_swiglu_bwd, list[Any]()

    def spied(*args: Any, out: Any) -> Any:
        given.append(out)
        return kernel(*args, out=out)

    monkeypatch.setattr(functional, "gemm_partial_swiglu_bwd", spied)
    found = list[list[Tensor]]()
    for passes in (["kept", "kept", "last"], ["last"]):
        out, _ = layer(x, None, None, after)
        for which in passes:
            layer.zero_grad()
            out.float().square().sum().backward(retain_graph=which == "kept")
            found.append([w.grad.clone() for w in layer.parameters() if w.grad is not None])
    assert [x is None for x in given] == [True, True, False, False]
    assert all(
        torch.equal(a, b) for other in found[1:] for a, b in zip(found[0], other, strict=True)
    )


def test_a_second_derivative_is_refused() -> None:
    ours = built()[2]
    x = torch.randn(1, 5, CONFIG.width).bfloat16().requires_grad_()
    after = torch.nn.RMSNorm(CONFIG.width, eps=CONFIG.eps, dtype=torch.bfloat16)
    out, _ = ours(x, None, None, after)
    (grad,) = torch.autograd.grad(out.float().sum(), x, create_graph=True)
    with pytest.raises(RuntimeError, match="once_differentiable"):
        grad.float().sum().backward()


def test_a_norm_without_eps_is_pytorch_s() -> None:
    layer = DecoderLayer(16, 16, 1, 1, 16, dtype=torch.bfloat16)
    after = torch.nn.RMSNorm(16, dtype=torch.bfloat16)  # eps=None
    with torch.no_grad():
        layer.o.weight.zero_()
        layer.down.weight.zero_()  # so that the stream comes out as it goes in
        x = torch.tensor([0.0, 1e-4, 1.0])[None, :, None].expand(1, 3, 16).bfloat16()
        _, (h, r) = layer(x, None, None, after)
        torch.testing.assert_close(h * r[:, None].to(h), after(x[0]), rtol=0.01, atol=0.0)


def test_part_of_a_state_dict_is_told_by_pytorch_and_loads_where_that_is_asked_for() -> None:
    layer, _, ours = built()
    state = layer.state_dict()
    del state["self_attn.q_proj.weight"]
    fresh = DecoderLayer(64, 80, 4, 2, 16, dtype=torch.bfloat16)
    with pytest.raises(RuntimeError, match=r'Missing key.*"qkv\.weight"'):
        fresh.load_state_dict(dict(state))
    found = fresh.load_state_dict(dict(state), strict=False)
    assert found.missing_keys == ["qkv.weight"]
    assert found.unexpected_keys == ["self_attn.k_proj.weight", "self_attn.v_proj.weight"]
    assert torch.equal(fresh.gate_up.weight, ours.gate_up.weight)


def test_targets_and_biases_that_do_not_fit_are_refused() -> None:
    x, gamma, weight = torch.randn(4, 16).bfloat16(), torch.ones(16), torch.randn(32, 16).bfloat16()
    given = normed(x, gamma.bfloat16(), 1e-5)
    for wrong in (-1, 32):
        targets = torch.tensor([0, 31, -100, wrong])
        with pytest.raises(RuntimeError, match="none of 32 columns, nor ignore_index -100"):
            head_loss(x, given, gamma.bfloat16(), weight, targets)
    with pytest.raises(ValueError, match=r"bias is \(1,\), expected \(32,\)"):
        norm_linear(x, given, gamma.bfloat16(), weight, (32,), None, torch.ones(1).bfloat16())
    table = torch.ones(4, 32).bfloat16()
    for rotated in ((3, 16), (2, 15)):
        with pytest.raises(ValueError, match=r"rotated is .*, expected heads .* the 32 rows of"):
            norm_linear(x, given, gamma.bfloat16(), weight, (32,), table, rotated=rotated)


def test_without_gradients_nothing_is_stored_for_them(monkeypatch: pytest.MonkeyPatch) -> None:
    torch.manual_seed(2)
    rows, width, ffn, words = 48, 64, 96, 160
    x, gamma = torch.randn(rows, width).bfloat16(), torch.rand(width).bfloat16() + 0.5
    gate_up, down, head = (
        (torch.randn(shape) / shape[1] ** 0.5).bfloat16().requires_grad_()
        for shape in ((2 * ffn, width), (width, ffn), (words, width))
    )
    given, targets = normed(x, gamma, 1e-5), torch.randint(0, words, (rows,))
    targets[::5] = -100

    def run() -> list[Tensor]:
        out, carried = functional.mlp(x, given, gamma, gate_up, down, gamma, 1e-5)
        fp8, _ = functional.mlp(x, given, gamma, gate_up, down, gamma, 1e-5, fp8=True)
        return [out, fp8, *carried, head_loss(x, given, gamma, head, targets)]

    plain = run()
    assert plain[0].requires_grad and plain[-1].requires_grad

    def refused(*_: Any) -> Any:
        raise AssertionError("it stores what a backward pass reads")

    monkeypatch.setattr("coda_agent.layers.head.gemm_rmsnorm_partial_cross_entropy", refused)
    for name in ("_PLAIN", "FP8"):
        by = getattr(functional, name)._replace(norm_swiglu=refused)
        monkeypatch.setattr(functional, name, by)
    with torch.no_grad():
        for mine, theirs in zip(run(), plain, strict=True):
            assert torch.equal(mine, theirs) and not mine.requires_grad
    for weight in (gate_up, down, head):
        weight.requires_grad_(False)
    assert all(map(torch.equal, run(), plain))


def test_a_large_packed_weight_is_kept_as_what_it_was_packed_of(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(packing, "_large", lambda _: True)
    torch.manual_seed(3)
    rows, width, ffn, heads = 40, 64, 96, (3, 1)
    x, gamma = torch.randn(rows, width).bfloat16(), torch.rand(width).bfloat16() + 0.5
    gate, up, down, q, k, v = (
        (torch.randn(shape) / shape[1] ** 0.5).bfloat16().requires_grad_()
        for shape in (
            (ffn, width),
            (ffn, width),
            (width, ffn),
            (48, width),
            (16, width),
            (16, width),
        )
    )
    given, table = normed(x, gamma, 1e-5), torch.randn(rows, 80).bfloat16()
    found = []
    for named in (False, True):
        packed = packing.interleave(gate, up), packing.pack_qkv(q, k, v, heads)
        for t in packed if not named else ():
            del t._coda_packed  # pyright: ignore[reportAttributeAccessIssue]
        out, carried = functional.mlp(x, given, gamma, packed[0], down, gamma, 1e-5)
        *projected, _ = functional.norm_linear(out, carried, gamma, packed[1], (48, 16, 16), table)
        nodes: list[Any] = [out.grad_fn, projected[0].grad_fn]
        held = {t.data_ptr() for node in nodes for t in node.saved_tensors if t is not None}
        assert named != any(t.data_ptr() in held for t in packed)
        assert named == all(t.data_ptr() in held for t in (gate, up))
        loss: Any = sum((y.float() ** 2).sum() for y in (out, *projected))
        found.append(torch.autograd.grad(loss, (gate, up, down, q, k, v)))
    for mine, theirs in zip(*found, strict=True):
        torch.testing.assert_close(mine, theirs, rtol=2**-7, atol=2**-7)
