"""`apply_coda_kernels`: models of transformers that train by the backend in place."""

import copy
import inspect
import io
import pickle
import types
import warnings
from collections.abc import Iterator
from typing import Any, NamedTuple

import peft
import pytest
import torch
from torch import nn
from transformers import GPT2Config, GPT2LMHeadModel, LlamaConfig, LlamaForCausalLM

from coda_agent.fuse import apply_coda_kernels
from coda_agent.fuse.model import apply_coda_kernels_to_llama
from tests.fuse.test_joint import norms

SIZES: dict[str, Any] = {
    "hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 1, "num_attention_heads": 4,
    "num_key_value_heads": 2, "vocab_size": 96, "use_cache": False,
}  # fmt: skip
IDS = torch.randint(96, (2, 24), generator=torch.Generator().manual_seed(0))


@pytest.fixture(autouse=True)
def quiet() -> Iterator[None]:
    torch._dynamo.reset()
    with warnings.catch_warnings(action="ignore"):
        yield


def llama() -> Any:
    torch.manual_seed(0)
    return LlamaForCausalLM(LlamaConfig(**SIZES)).bfloat16().train()


def gpt2() -> Any:
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=96,
        n_embd=64,
        n_layer=1,
        n_head=4,
        resid_pdrop=0.0,
        embd_pdrop=0.0,
        attn_pdrop=0.0,
    )
    model: Any = GPT2LMHeadModel(config).bfloat16().train()
    model.loss_type = "ForCausalLM"
    return model


def gradients(model: Any) -> tuple[Any, list[torch.Tensor]]:
    model.zero_grad()
    out = model(input_ids=IDS, labels=IDS)
    out.loss.backward()
    return out, [p.grad.clone() for p in model.parameters()]


@pytest.mark.parametrize("make", [llama, gpt2])
@pytest.mark.one_in(2)
def test_it_trains_as_near_to_float64_as_pytorch(make: Any) -> None:
    model, truth = make(), make().double()
    (own, before), (_, exact) = gradients(model), gradients(truth)
    report = apply_coda_kernels(model)
    assert "first called with gradients" in str(report)
    out, got = gradients(model)
    assert type(out) is type(own) and out.logits is None and own.logits is not None
    # Nor are they an item, which the graph would have to return.
    assert [*out] == [name for name in own if name != "logits"]
    assert abs(out.loss - own.loss) < 1e-3
    for x, y, true in zip(got, before, exact, strict=True):
        assert norms(x, true) <= 1.3 * norms(y, true) + 1e-3
    assert sum(len(graph.kernels) for graph in report.graphs) >= 6
    assert "kernels; left to PyTorch: " in str(report)


def test_a_call_without_gradients_is_the_models_own() -> None:
    model, plain = llama(), llama()
    apply_coda_kernels(model)
    with torch.no_grad():
        assert torch.equal(model(IDS).logits, plain(IDS).logits)
        assert model(IDS, labels=IDS).logits is not None
    assert model.training and isinstance(model, LlamaForCausalLM)
    assert type(model).__name__ == "LlamaForCausalLM"
    assert inspect.signature(model.forward) == inspect.signature(plain.forward)


def test_a_mode_is_torch_compiles() -> None:
    model, plain = llama(), llama()
    apply_coda_kernels(model, mode="reduce-overhead")
    assert abs(gradients(model)[0].loss - gradients(plain)[0].loss) < 1e-3


@torch._dynamo.config.patch(recompile_limit=1)  # pyright: ignore[reportUntypedFunctionDecorator]
def test_models_do_not_share_the_limit_of_recompilations() -> None:
    class Plain(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.eye(64, dtype=torch.bfloat16))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return nn.functional.gelu(x @ self.weight).float().square().mean()

    reports = list[Any]()
    for rows in (16, 24, 32):
        model = Plain()
        reports.append(apply_coda_kernels(model))
        model(torch.ones(rows, 64, dtype=torch.bfloat16)).backward()
    assert [len(report.graphs) for report in reports] == [1, 1, 1]


def test_fp8_is_another_result_and_the_head_stays() -> None:
    model, plain = llama(), llama()
    report = apply_coda_kernels_to_llama(model, fp8=True, mode="max-autotune-no-cudagraphs")
    (out, got), (own, before) = gradients(model), gradients(plain)
    assert 0 < abs(float(out.loss - own.loss)) < 0.01
    assert all(0 < norms(x, y.double()) < 0.15 for x, y in zip(got, before, strict=True))
    assert sum("FP8" in note for graph in report.graphs for note in graph.notes) == 7


def test_revert_copies_and_pickles_are_the_model_as_it_was() -> None:
    model = llama()
    report = apply_coda_kernels(model)
    with pytest.raises(ValueError, match="compiled already"):
        apply_coda_kernels(model)
    held = io.BytesIO()
    torch.save(model, held)
    held.seek(0)
    kept = torch.load(held, weights_only=False)
    for other in (copy.deepcopy(model), kept, pickle.loads(pickle.dumps(model))):
        assert type(other) is LlamaForCausalLM
        assert all(map(torch.equal, other.parameters(), model.parameters()))
    report.revert()
    assert type(model) is LlamaForCausalLM and model(IDS).logits is not None
    with pytest.raises(ValueError, match="the model is LlamaForCausalLM now"):
        report.revert()


class Scored(NamedTuple):
    loss: torch.Tensor
    logits: torch.Tensor


class Scorer(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.up, self.down = nn.Linear(64, 128), nn.Linear(128, 64)

    def forward(self, x: torch.Tensor) -> Scored:
        logits = self.down(nn.functional.gelu(self.up(x)))
        return Scored(logits.square().mean(), logits)


def test_a_result_that_is_no_dict_is_returned_as_it_is() -> None:
    model, x = Scorer(), torch.randn(32, 64, generator=torch.Generator().manual_seed(0))
    own = model(x)
    apply_coda_kernels(model)
    out = model(x)
    assert type(out) is Scored
    assert all(torch.allclose(*pair, atol=1e-5) for pair in zip(out, own, strict=True))


def test_a_model_whose_calls_pass_its_class_by_is_refused() -> None:
    """As accelerate, other patches and torch.compile leave it; nothing would be compiled."""
    model, compiled = Scorer(), Scorer()
    report = apply_coda_kernels(model)
    for each in (model, other := Scorer()):
        each.forward = types.MethodType(type(each).forward, each)
    with pytest.raises(
        ValueError, match=r"has a forward of its own.*: call revert\(\) before that"
    ):
        report.revert()
    compiled.compile(backend="eager")
    wrapped: Any = torch.compile(Scorer(), backend="eager")
    for each in (other, wrapped):
        with pytest.raises(ValueError, match=r"own, as accelerate's prepare.*before that"):
            apply_coda_kernels(each)
    with pytest.raises(ValueError, match=r"compiled by Module.compile\(\)"):
        apply_coda_kernels(compiled)
    with pytest.raises(TypeError, match=r"function is no torch.nn.Module; coda_agent.fuse takes"):
        apply_coda_kernels(llama)  # pyright: ignore[reportArgumentType]


@pytest.mark.slow  # test_mutations.py changes modules, too
def test_a_change_after_the_first_call_is_followed() -> None:
    """Weights, hooks and adapters: what Dynamo guards."""
    model, plain = llama(), llama()
    apply_coda_kernels(model)
    gradients(model)
    for each in (model, plain):
        with torch.no_grad():
            each.model.layers[0].mlp.up_proj.weight.mul_(-2)
        each.model.layers[0].mlp.register_forward_hook(lambda module, given, out: out * 0.5)
        each.model.layers[0].self_attn.q_proj = nn.Sequential(
            each.model.layers[0].self_attn.q_proj, nn.Hardtanh()
        )
    (out, got), (own, before) = gradients(model), gradients(plain)
    assert abs(out.loss - own.loss) < 1e-3
    assert all(norms(x, y.double()) < 0.03 for x, y in zip(got, before, strict=True))


def test_adapters_train_alone() -> None:
    models = [llama(), llama()]
    for model in models:
        torch.manual_seed(1)
        peft.inject_adapter_in_model(
            peft.LoraConfig(r=8, target_modules=["q_proj", "down_proj"], init_lora_weights=False),
            model,
        )
        for name, p in model.named_parameters():
            p.requires_grad_("lora" in name).data = p.data.bfloat16()
    model, plain = models
    report = apply_coda_kernels(model)
    for each in models:
        each(input_ids=IDS, labels=IDS).loss.backward()
    for (name, x), (_, y) in zip(model.named_parameters(), plain.named_parameters(), strict=True):
        assert (x.grad is None) == (y.grad is None) == ("lora" not in name)
        assert x.grad is None or norms(x.grad, y.grad.double()) < 0.03, name
    assert sum(len(graph.kernels) for graph in report.graphs) >= 4
