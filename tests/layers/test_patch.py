"""Models run by the kernels: the same logits, losses and gradients, and the same model afterwards."""

from __future__ import annotations

import copy
import inspect
from typing import Any

import pytest
import torch
from torch import Tensor

from coda_agent.layers import apply_coda_kernels
from tests.layers.llama import Config, Llama
from tests.layers.test_functional import within

pytestmark = [
    pytest.mark.filterwarnings("ignore:coda-agent. no Hopper"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),  # eval, reentrant
]
KINDS = {
    "llama": Config(),
    "tied": Config(tied=True, kv_heads=4),
    "biased": Config(qkv_bias=True, o_bias=True),
    "head norms": Config(qk_norm=True),
    "geglu": Config(hidden_act="gelu_tanh"),
    "reglu": Config(hidden_act="relu"),
    "sandwich": Config(sandwich=True, hidden_act="gelu_tanh", qk_norm=True, tied=True),
}
SAID = {
    "head norms": "norm + QKV, QK norms + RoPE by PyTorch, o + residual, norm + SwiGLU, down + residual",
    "geglu": "norm + QKV + RoPE, o + residual, norm + gate and up, gelu_tanh by PyTorch, down + residual",
    "reglu": "norm + QKV + RoPE, o + residual, norm + gate and up, relu by PyTorch, down + residual",
}
SAID["sandwich"] = "norm + QKV, norm + gate and up; by PyTorch: what else"
REPLACED = "norm + QKV + RoPE, o + residual, norm + SwiGLU, down + residual"


def built(config: Config) -> Any:
    torch.manual_seed(0)
    model = Llama(config)
    for name, p in model.named_parameters():
        if "proj.weight" in name:
            p.data.mul_(2)
        if "bias" in name:
            p.data.uniform_(-0.5, 0.5)
    return model.bfloat16()


def ran(model: Any, batch: int = 2, width: int = 23) -> dict[str, Tensor]:
    """Logits in eval, the loss and all gradients in training."""
    ids = torch.randint(0, 96, (batch, width), generator=torch.Generator().manual_seed(batch))
    model.zero_grad()
    loss = model.train()(ids, labels=ids).loss
    loss.backward()
    found = {n: p.grad.clone() for n, p in model.named_parameters()}
    with torch.no_grad():
        logits = model.eval()(ids).logits
    return {"logits": logits, "loss": loss.detach(), **found}


def as_near(model: Any, batch: int = 2, times: float = 1.0, said: str = "") -> None:
    """Hold that the kernels are as near to float64 as PyTorch is: over all tensors, and in each of
    them up to `times` as far. A tensor of few elements is one draw of roundings."""
    truth, theirs = ran(copy.deepcopy(model).double(), batch), ran(model, batch)
    report = apply_coda_kernels(model)
    assert report.replaced["layers.1"] == (said or REPLACED)
    ours = ran(model, batch)
    ratios = []
    for name, exact in ((n, t.double()) for n, t in truth.items()):
        if name == "loss":
            torch.testing.assert_close(ours[name].double(), exact, rtol=2e-3, atol=0)
            continue
        within(ours[name], theirs[name], exact, times=times)
        error, bound = ((t.double() - exact).norm() for t in (ours[name], theirs[name]))
        ratios.append(error / bound)
    assert sum(ratios) / len(ratios) < 1
    report.revert()
    for name, before in theirs.items():
        assert torch.equal(before, ran(model, batch)[name]), name


@pytest.mark.parametrize("kind", KINDS)
def test_a_model_is_as_near_to_float64(kind: str) -> None:
    times, said = 1.0 if kind == "llama" else 1.5, SAID.get(kind, "")
    as_near(built(KINDS[kind]), 8 if kind == "sandwich" else 2, times, said)


@pytest.mark.parametrize("batch", [1, 3])
def test_batches(batch: int) -> None:
    as_near(built(KINDS["llama"]), batch)


@pytest.mark.parametrize("reentrant", [False, True])
def test_gradient_checkpointing(reentrant: bool) -> None:
    model = built(KINDS["llama"])
    model.model.embed_tokens.requires_grad_(True)
    plain = copy.deepcopy(model)
    apply_coda_kernels(plain)
    expected = ran(plain)
    model.model.checkpoint = reentrant
    apply_coda_kernels(model)
    for name, t in ran(model).items():
        # Between layers the statistic is computed again, of the rounded stream.
        torch.testing.assert_close(t.float(), expected[name].float(), rtol=0.1, atol=0.02, msg=name)


def test_parameters_stay_the_optimizer_s_and_keep_their_names() -> None:
    model = built(KINDS["llama"])
    names = [n for n, _ in model.named_parameters()]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    apply_coda_kernels(model)
    assert [n for n, _ in model.named_parameters()] == names
    before = after = ran(model)
    for _ in range(3):
        optimizer.step()
        after = ran(model)
    assert after["loss"] < before["loss"] - 0.1
    # What was packed for eval follows the parameters.
    assert not torch.equal(before["logits"], after["logits"])


def test_packed_weights_are_kept_in_eval_until_they_change() -> None:
    model = built(KINDS["llama"]).eval()
    report = apply_coda_kernels(model)
    ids = torch.arange(8)[None]
    with torch.inference_mode():
        first = model(ids).logits
        kept = report._layers[0].kept
        assert torch.equal(first, model(ids).logits)
        assert report._layers[0].kept is kept
    model.model.layers[0].mlp.up_proj.weight.data.zero_()
    report.forget()
    with torch.no_grad():
        assert not torch.equal(first, model(ids).logits)


@pytest.mark.parametrize("kind", ["llama", "biased", "head norms", "geglu", "sandwich"])
def test_packed_parameters_are_the_same_model(kind: str) -> None:
    model = built(KINDS[kind])
    plain, before = copy.deepcopy(model), copy.deepcopy(model.state_dict())
    apply_coda_kernels(plain)
    expected, own = ran(plain), [*model.parameters()]
    report = apply_coda_kernels(model, pack=True)
    assert "; weights packed" in report.replaced["layers.1"]
    weights = dict(model.named_parameters())
    assert weights["model.layers.0.mlp.gate_up_weight"].shape == (160, 64)
    assert "model.layers.0.mlp.up_proj.weight" not in weights
    state = model.state_dict()
    assert state.keys() == before.keys() and len(weights) == len(own) - 3 * 2
    assert all(torch.equal(state[n], t) for n, t in before.items())
    found = ran(model)
    for name in ("logits", "loss", *(n for n in expected if n in weights)):
        assert torch.equal(found[name], expected[name]), name
    with torch.autocast("cpu", torch.bfloat16):  # by the model's own code, on parts of the weights
        out, other = (m.eval()(torch.arange(8)[None]).logits for m in (model, plain))
    assert torch.equal(out, other)

    optimizer, theirs = (torch.optim.SGD(m.parameters(), lr=0.1) for m in (model, plain))
    for one, its in ((model, optimizer), (plain, theirs)):
        ran(one)
        its.step()
    trained = model.state_dict()
    for name, t in plain.state_dict().items():
        assert torch.equal(trained[name], t), name
        assert "proj.weight" not in name or not torch.equal(t, before[name]), name

    model.load_state_dict(before)
    assert torch.equal(ran(model)["logits"], expected["logits"])
    model.load_state_dict(trained)
    report.revert()
    assert {*map(id, model.parameters())} == {*map(id, own)}
    state = model.state_dict()
    assert state.keys() == before.keys()
    assert all(torch.equal(state[n], t) for n, t in trained.items())
    ran(model)


def test_half_frozen_weights_are_not_packed() -> None:
    model = built(KINDS["llama"])
    model.model.layers[0].mlp.up_proj.weight.requires_grad_(False)
    report = apply_coda_kernels(model, pack=True)
    assert report.left["layers.0"] == "only some of mlp.gate_proj, mlp.up_proj are trained"
    assert [*report.replaced] == ["layers.1"]


def test_packed_parameters_accumulate_in_main_grad() -> None:
    model = built(KINDS["llama"])
    apply_coda_kernels(model, pack=True)
    expected = ran(model)
    name = "model.layers.1.mlp.gate_up_weight"
    weight: Any = model.get_parameter(name)
    weight.main_grad = torch.zeros_like(weight, dtype=torch.float32)
    model.zero_grad()
    ids = torch.randint(0, 96, (2, 23), generator=torch.Generator().manual_seed(2))
    model.train()(ids, labels=ids).loss.backward()
    assert weight.grad is None
    torch.testing.assert_close(weight.main_grad.bfloat16(), expected[name])


def test_what_does_not_fit_is_named() -> None:
    model = built(Config(layers=4))
    first, second, _, fourth = model.model.layers
    first.mlp.act_fn = torch.nn.Mish()
    second.self_attn.v_proj = torch.nn.Sequential(second.self_attn.v_proj)
    fourth.mlp.down_proj.register_forward_hook(lambda module, given, out: 2 * out)
    expected = ran(model)["logits"]
    report = apply_coda_kernels(model)
    assert report.left == {
        "layers.0": "its activation is Mish, expected SiLU, GELU or ReLU",
        "layers.1": "v_proj is Sequential, not a plain nn.Linear",
        "layers.3": "down_proj has a hook (test_what_does_not_fit_is_named.<locals>.<lambda>), which "
        "kernels would skip",
        "lm_head": "the model has no loss_function of transformers' kind",
    }
    assert report.replaced == {"layers.2": REPLACED}
    assert "layers.1: left as it is: v_proj is Sequential" in str(report)
    torch.testing.assert_close(ran(model)["logits"], expected, rtol=0.1, atol=0.05)


def test_what_does_not_fit_at_all_is_refused() -> None:
    with pytest.raises(TypeError, match=r"Linear has no model\.layers"):
        apply_coda_kernels(torch.nn.Linear(2, 2))
    report = apply_coda_kernels(Llama(Config()))
    assert report.left["layers.0"] == "q_proj is torch.float32, expected bfloat16 or float16"
    assert not report.replaced


def test_a_model_is_patched_once() -> None:
    model = built(KINDS["llama"])
    report = apply_coda_kernels(model)
    assert apply_coda_kernels(model).left["layers.0"] == "the layer has been patched already"
    report.revert()


def test_a_patched_model_is_not_copied() -> None:
    """The copy's modules would run the first one's weights."""
    model = built(KINDS["llama"])
    signature = inspect.signature(model.model.layers[0].forward)
    report = apply_coda_kernels(model)
    assert inspect.signature(model.model.layers[0].forward) == signature
    with pytest.raises(TypeError, match="copy it before apply_coda_kernels, or after revert"):
        copy.deepcopy(model)
    report.revert()
    copy.deepcopy(model)


def test_a_layer_with_another_forward_is_left() -> None:
    model = built(KINDS["llama"])
    layer = model.model.layers[0]
    layer.forward = other = layer.forward  # as libraries that place layers on devices do
    report = apply_coda_kernels(model)
    assert report.left["layers.0"] == "the layer has another forward than its class's"
    report.revert()
    assert vars(layer)["forward"] is other
    assert all("forward" not in vars(m) for m in model.modules() if m is not layer)


TRANSFORMERS = {
    "Llama": {},
    "Mistral": {"sliding_window": 8},
    "Qwen2": {},
    "Qwen3": {},
    "Gemma3": {},
}


@pytest.mark.parametrize("family", TRANSFORMERS)
def test_models_of_transformers(family: str) -> None:
    import transformers

    text = "Text" if family == "Gemma3" else ""
    config = getattr(transformers, f"{family}{text}Config")(
        vocab_size=96,
        hidden_size=64,
        intermediate_size=80,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=16,
        **TRANSFORMERS[family],
    )
    torch.manual_seed(0)
    model = getattr(transformers, f"{family}ForCausalLM")(config).bfloat16()
    as_near(
        model,
        times=1.5,
        said=SAID.get({"Qwen3": "head norms", "Gemma3": "sandwich"}.get(family, ""), ""),
    )
    report = apply_coda_kernels(model)
    assert report.replaced["lm_head"] == "norm + cross-entropy, in training with labels"
    ids = torch.randint(0, 96, (2, 9))
    assert model.train()(ids, labels=ids).logits is None
    said = model.eval().generate(ids, max_new_tokens=5, do_sample=False)
    report.revert()
    assert torch.equal(said, model.generate(ids, max_new_tokens=5, do_sample=False))
