"""What people do with a patched model: right, or the model's own code with one warning."""

from __future__ import annotations

import copy
import gc
import io
import pickle
import threading
import warnings
import weakref
from collections.abc import Callable
from typing import Any

import accelerate
import peft
import pytest
import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize, prune

from coda_agent.layers import apply_coda_kernels
from tests.layers.tiny import IDS, as_near, exact, results, tiny

pytestmark = [
    pytest.mark.filterwarnings("ignore:coda-agent. no Hopper"),
    pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad"),
]
OWN = "runs by the model's own code"


def logits(model: Any, **options: Any) -> Tensor:
    with torch.no_grad():
        return model.eval()(IDS, **options).logits.double()


def own_code(change: Callable[[Any], Any], match: str, **options: Any) -> None:
    """Hold that a patched model that was changed computes what one does that was not patched, bit
    for bit, and warns once."""
    model, plain = tiny(**options), tiny(**options)
    report = apply_coda_kernels(model)
    assert not report.left
    keep = [change(m) for m in (model, plain)]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        ours = results(model)
    theirs = results(plain)
    assert [str(w.message) for w in caught if OWN in str(w.message)] != []
    reasons = [str(w.message) for w in caught if OWN in str(w.message)]
    assert len(reasons) == len({*reasons}) and any(match in reason for reason in reasons), reasons
    for name, t in theirs.items():
        within = 1e-12 if name == "logits" else 0.02
        assert (ours[name] - t).norm() <= within * t.norm() + 1e-12, name
    del keep


class Scaled(nn.Module):
    """A linear with an adapter, as PEFT's."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base, self.add = base, nn.Linear(base.in_features, base.out_features, bias=False)
        nn.init.constant_(self.add.weight, 0.02)
        self.add.to(base.weight.dtype)

    def forward(self, x: Tensor) -> Tensor:
        return self.base(x) + self.add(x)


def _hook(name: str) -> Callable[[Any], Any]:
    def add(model: Any) -> Any:
        for layer in model.model.layers:
            layer.get_submodule(name).register_forward_hook(lambda module, given, out: out * 0.5)

    return add


def _each(change: Callable[[Any], Any]) -> Callable[[Any], Any]:
    return lambda model: [change(layer) for layer in model.model.layers]


def _adapt(name: str) -> Callable[[Any], Any]:
    def change(layer: Any) -> None:
        owner, _, leaf = name.rpartition(".")
        module = layer.get_submodule(owner)
        setattr(module, leaf, Scaled(getattr(module, leaf)))

    return _each(change)


def _set(path: str, value: Any) -> Callable[[Any], Any]:
    owner, _, leaf = path.rpartition(".")
    return _each(lambda layer: setattr(layer.get_submodule(owner), leaf, value))


def _wrap_forward(layer: Any) -> None:
    before = layer.mlp.forward
    layer.mlp.forward = lambda x: before(x) * 0.5


CHANGES: dict[str, tuple[Callable[[Any], Any], str]] = {
    "a hook of the MLP": (_hook("mlp"), "mlp has a hook"),
    "a hook of a projection": (_hook("mlp.up_proj"), "mlp.up_proj has a hook"),
    "a hook of a norm": (_hook("post_attention_layernorm"), "post_attention_layernorm has a hook"),
    "a hook of the output": (_hook("self_attn.o_proj"), "self_attn.o_proj has a hook"),
    "a backward hook": (
        _each(lambda m: m.mlp.register_full_backward_hook(lambda mod, i, o: (i[0] * 0.5,))),
        "mlp has a hook",
    ),
    "an adapter": (_adapt("self_attn.q_proj"), "self_attn.q_proj is tests's Scaled now"),
    "another activation": (_set("mlp.act_fn", nn.ReLU()), "mlp.act_fn is ReLU now"),
    "another eps": (_set("input_layernorm.variance_epsilon", 0.5), "variance_epsilon has changed"),
    "another forward": (_each(_wrap_forward), "mlp.forward has changed"),
    "float32": (lambda model: model.float(), "its input is torch.float32"),
    "pruning": (
        _each(lambda m: prune.random_unstructured(m.mlp.up_proj, "weight", 0.0)),
        "mlp.up_proj has a hook",
    ),
    "a parametrisation": (
        _each(
            lambda m: parametrize.register_parametrization(
                m.self_attn.k_proj, "weight", nn.Identity()
            )
        ),
        "self_attn.k_proj is",
    ),
}


@pytest.mark.parametrize("name", CHANGES)
def test_a_changed_layer_runs_by_its_own_code(name: str) -> None:
    own_code(*CHANGES[name])


def test_a_hook_on_attention_sees_what_it_would() -> None:
    seen: list[Tensor] = []

    def hook(module: Any, args: Any, kwargs: Any, output: Any) -> Any:
        seen.append(kwargs["hidden_states"].double())
        return output[0] * 0.5, output[1]

    own_code(
        _each(lambda layer: layer.self_attn.register_forward_hook(hook, with_kwargs=True)),
        "self_attn has a hook",
    )
    ours, theirs = seen[: len(seen) // 2], seen[len(seen) // 2 :]
    assert all(torch.equal(one, other) for one, other in zip(ours[:2], theirs[:2], strict=True))


def test_a_hook_of_a_whole_layer_runs_around_the_kernels() -> None:
    model = tiny()
    apply_coda_kernels(model)
    expected = logits(model)
    handle = model.model.layers[0].register_forward_hook(lambda module, args, out: out * 0)
    assert not torch.equal(logits(model), expected)
    handle.remove()
    assert torch.equal(logits(model), expected)


def test_autocast() -> None:
    model, plain = tiny(), tiny()
    apply_coda_kernels(model)
    with torch.autocast("cpu", torch.bfloat16):
        with pytest.warns(UserWarning, match="autocast is on; cast the model instead"):
            ours = results(model)
        theirs = results(plain)
    assert all(torch.equal(t, theirs[name]) for name, t in ours.items())


def test_loss_functions_that_are_set_later() -> None:
    model = tiny()
    apply_coda_kernels(model)
    model.loss_function = lambda logits, labels, vocab_size, **_: logits.sum() * 0 + 42
    with pytest.warns(UserWarning, match="loss_function has changed"):
        assert model.train()(IDS, labels=IDS).loss == 42


def test_hidden_states_in_training() -> None:
    model, plain = tiny(), tiny()
    apply_coda_kernels(model)
    with pytest.warns(UserWarning, match="hidden states are asked for"):
        ours = model.train()(IDS, labels=IDS, output_hidden_states=True).hidden_states
    theirs = plain.train()(IDS, labels=IDS, output_hidden_states=True).hidden_states
    assert len(ours) == len(theirs)
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).double().norm() <= 0.05 * other.double().norm()


def test_attentions_are_recorded() -> None:
    model, plain = tiny(), tiny()
    apply_coda_kernels(model)
    ours, theirs = (m(IDS, output_attentions=True).attentions for m in (model, plain))
    assert len(ours) == len(theirs) == 2
    for one, other in zip(ours, theirs, strict=True):
        assert (one - other).double().norm() <= 0.05 * other.double().norm()


@pytest.mark.parametrize("targets", [["q_proj", "up_proj"], ["q_proj", "lm_head"]])
def test_adapters_after_the_patch(targets: list[str]) -> None:

    def adapted(model: Any) -> Any:
        torch.manual_seed(5)
        model = peft.get_peft_model(model, peft.LoraConfig(r=8, target_modules=targets))
        for name, p in model.named_parameters():
            if "lora_B" in name:
                nn.init.normal_(p, std=0.05)
        return model

    model, plain = tiny(), adapted(tiny())
    apply_coda_kernels(model)
    model = adapted(model)
    with pytest.warns(UserWarning, match=f"{targets[0]} is peft's Linear now"):
        ours = results(model)
    theirs = results(plain)
    assert ours.keys() == theirs.keys() and ours["loss"].ndim == 0
    for name, t in theirs.items():
        assert (ours[name] - t).norm() <= 0.05 * t.norm(), name


def test_adapters_before_the_patch() -> None:
    model = peft.get_peft_model(tiny(), peft.LoraConfig(r=8, target_modules=["q_proj"]))
    report = apply_coda_kernels(model)
    assert report.left["layers.0"] == "q_proj is peft's Linear, not a plain nn.Linear"
    assert "lm_head" in report.replaced


def test_offloaded_models() -> None:
    expected = logits(tiny())
    before = accelerate.cpu_offload(tiny(), execution_device=torch.device("cpu"))
    report = apply_coda_kernels(before)
    assert not report.replaced
    assert report.left["layers.0"] == "q_proj is offloaded or placed on a device by accelerate"
    assert report.left["lm_head"] == "lm_head is offloaded or placed on a device by accelerate"
    assert torch.equal(logits(before), expected)
    after = tiny()
    apply_coda_kernels(after)
    accelerate.cpu_offload(after, execution_device=torch.device("cpu"))
    with pytest.warns(UserWarning, match="has changed|is offloaded"):
        assert torch.equal(logits(after), expected)


def test_threads() -> None:
    model = tiny()
    apply_coda_kernels(model)
    batches = [torch.roll(IDS, i, 1) for i in range(24)]
    with torch.no_grad():
        expected = [model(ids).logits for ids in batches]
    ours: list[Any] = [None] * 24

    def work(which: int) -> None:
        with torch.no_grad():
            for i in range(which, 24, 4):
                ours[i] = model(batches[i]).logits

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert all(torch.equal(one, other) for one, other in zip(ours, expected, strict=True))


def test_threads_that_train() -> None:
    model = tiny().train()
    apply_coda_kernels(model)
    batches = [torch.roll(IDS, i, 1) for i in range(12)]
    expected = [model(ids, labels=ids).loss.item() for ids in batches]
    ours = [0.0] * 12

    def work(which: int) -> None:
        for i in range(which, 12, 4):
            ours[i] = model(batches[i], labels=batches[i]).loss.item()

    threads = [threading.Thread(target=work, args=(i,)) for i in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert ours == expected


@pytest.mark.parametrize("options", [{}, {"num_items_in_batch": torch.tensor(37)}])
def test_a_batch_without_labels(options: dict[str, Any]) -> None:
    model, plain = tiny(), tiny()
    apply_coda_kernels(model)
    labels = torch.full_like(IDS, -100)
    for one in (model, plain):
        one.train()(IDS, labels=labels, **options).loss.backward()
    ours, theirs = (m.train()(IDS, labels=labels, **options).loss for m in (model, plain))
    assert torch.equal(ours.isnan(), theirs.isnan()) and (options or ours.isnan())
    for (name, p), q in zip(model.named_parameters(), plain.parameters(), strict=True):
        assert torch.equal(p.grad, torch.zeros_like(p)), name
        assert q.grad is None or torch.equal(q.grad, p.grad), name


def test_gradient_accumulation_over_halves() -> None:
    model = tiny().train()
    apply_coda_kernels(model)
    count = (IDS[:, 1:] != -100).sum()
    whole = model(IDS, labels=IDS, num_items_in_batch=count).loss
    halves = [model(ids, labels=ids, num_items_in_batch=count).loss for ids in IDS.split(1)]
    torch.testing.assert_close(sum(halves), whole, rtol=1e-4, atol=0)


@pytest.mark.parametrize("reentrant", [False, True])
def test_checkpointing_of_transformers(reentrant: bool) -> None:
    model = tiny()
    apply_coda_kernels(model)
    expected = results(model)
    model.gradient_checkpointing_enable({"use_reentrant": reentrant})
    saved: list[int] = []

    def note(t: Tensor) -> Tensor:
        saved.append(t.nbytes)
        return t

    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model.train()(IDS, labels=IDS, use_cache=False)
    checkpointed = sum(saved)
    ours = results(model)
    for name, t in expected.items():
        # Between layers the statistic is computed again, of the rounded stream.
        assert (ours[name] - t).norm() <= 0.1 * t.norm(), name
    model.gradient_checkpointing_disable()
    saved.clear()
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        model.train()(IDS, labels=IDS, use_cache=False)
    assert checkpointed < 0.7 * sum(saved)


def test_packed_sequences_and_padding_are_as_near_as_the_model_s_own() -> None:
    places = torch.cat((torch.arange(10), torch.arange(14))).expand(2, -1)
    mask = torch.ones_like(IDS)
    mask[1, :8] = 0
    for options in ({"position_ids": places}, {"attention_mask": mask}):
        model = tiny()
        truth, own = exact(model, **options), results(copy.deepcopy(model), **options)
        apply_coda_kernels(model)
        assert as_near(results(model, **options), own, truth)


def test_generation_with_a_static_cache_and_padding() -> None:
    model = tiny()
    mask = torch.ones_like(IDS)
    mask[1, :8] = 0
    options: dict[str, Any] = {"attention_mask": mask, "max_new_tokens": 6, "do_sample": False}
    expected = model.generate(IDS, cache_implementation="static", **options)
    apply_coda_kernels(model)
    assert torch.equal(model.generate(IDS, cache_implementation="static", **options), expected)


@pytest.mark.parametrize("scaling", ["linear", "dynamic", "yarn", "llama3"])
def test_scaled_positions(scaling: str) -> None:
    rope = {"rope_type": scaling, "factor": 4.0, "rope_theta": 10000.0}
    rope |= {"original_max_position_embeddings": 16} if scaling != "linear" else {}
    rope |= {"low_freq_factor": 1.0, "high_freq_factor": 4.0} if scaling == "llama3" else {}
    model = tiny(max_position_embeddings=64, rope_parameters=rope)
    truth, own = exact(model), results(copy.deepcopy(model))
    assert not apply_coda_kernels(model).left
    assert as_near(results(model), own, truth)


def test_under_torch_compile_the_model_s_own_code_runs() -> None:
    model, plain = tiny(), tiny()
    apply_coda_kernels(model)
    torch.compiler.reset()
    with pytest.warns(UserWarning, match=r"under torch\.compile a patched"):
        ours = torch.compile(model, backend="eager", fullgraph=True)(IDS).logits
    assert torch.equal(ours, plain(IDS).logits)


def test_transforms_of_torch_func() -> None:
    model, plain = tiny(), tiny()
    apply_coda_kernels(model)
    call = lambda m: torch.func.vmap(lambda ids: m(ids[None], use_cache=False).logits[0])(IDS)
    with pytest.warns(UserWarning, match=r"a transform of torch\.func is active"):
        ours = call(model)
    assert torch.equal(ours, call(plain))


def test_weights_that_come_to_lie_where_others_were() -> None:
    """Packed weights are kept in eval by what they were packed of, not by where that lay."""
    model = tiny()
    apply_coda_kernels(model)
    for seed in range(4):
        torch.manual_seed(seed)
        state = {n: torch.randn_like(p) * 0.2 for n, p in model.state_dict().items()}
        model.load_state_dict(state, assign=True)
        plain = tiny()
        plain.load_state_dict(state)
        ours, theirs = logits(model), logits(plain)
        assert (ours - theirs).norm() <= 0.1 * theirs.norm()
        del state


def test_an_empty_batch() -> None:
    model = tiny()
    apply_coda_kernels(model)
    expected = logits(model)
    for one in (model, tiny()):  # transformers' own attention takes none
        with pytest.raises(RuntimeError, match="cannot reshape tensor of 0 elements"):
            one(IDS[:0])
    assert torch.equal(logits(model), expected)


def test_a_patched_model_is_saved_as_the_original() -> None:
    model = tiny()
    report = apply_coda_kernels(model)
    for save in (lambda: torch.save(model, io.BytesIO()), lambda: pickle.dumps(model)):
        with pytest.raises(TypeError, match=r"call revert\(\) first, or save its state_dict"):
            save()
    report.revert()
    copied = pickle.loads(pickle.dumps(model))
    assert torch.equal(logits(copied), logits(model))


def test_nothing_of_transformers_is_replaced() -> None:
    from transformers.models.llama import modeling_llama

    before = dict(vars(modeling_llama))
    report = apply_coda_kernels(tiny())
    assert dict(vars(modeling_llama)) == before
    report.revert()


def test_a_call_leaves_nothing_to_the_collector_of_cycles() -> None:
    model = tiny()
    layer: Any = apply_coda_kernels(model)._layers[0]
    parts: list[Any] = []
    attended = layer._attended

    def watched(x: Tensor, qkv: list[Tensor], kwargs: dict[str, Any]) -> Tensor:
        parts.extend(weakref.ref(t) for t in qkv)
        return attended(x, qkv, kwargs)

    layer._attended = watched
    gc.disable()
    try:
        logits(model, use_cache=False)
    finally:
        gc.enable()
    assert [ref() for ref in parts] == [None] * 3
