"""Masks among a graph's arguments: compared at each call, with a graph for others."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, fx
from torch._subclasses.fake_tensor import FakeTensorMode
from transformers import BertConfig, BertModel, LlamaConfig, LlamaForCausalLM

from coda_agent.fuse import backend, masks
from coda_agent.fuse.backend import coda
from tests.fuse.test_joint import norms

SIZES: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2,
         "num_attention_heads": 4, "vocab_size": 96}  # fmt: skip
LLAMA = LlamaConfig(**SIZES, num_key_value_heads=2, use_cache=False)
BERT = BertConfig(**SIZES, hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0)
IDS = torch.randint(96, (3, 32), generator=torch.Generator().manual_seed(1))
ATTENTION = torch.nn.functional.scaled_dot_product_attention


def padded(to: int) -> Tensor:
    mask = torch.ones_like(IDS)
    mask[1, to:] = 0
    return mask


class Graphs:
    """How attention is called in each graph that is compiled."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        from torch._inductor import compile_fx

        self.masked: list[list[bool]] = []
        compiled = compile_fx.compile_fx

        def watched(module: fx.GraphModule, *rest: Any, **others: Any) -> Any:
            calls = module.graph.find_nodes(op="call_function", target=ATTENTION)
            found = [c.kwargs.get("attn_mask") is not None for c in calls]
            if found and not others:  # it calls itself
                self.masked.append(found)
            return compiled(module, *rest, **others)

        monkeypatch.setattr(compile_fx, "compile_fx", watched)
        torch._dynamo.reset()


@pytest.fixture
def graphs(monkeypatch: pytest.MonkeyPatch) -> Graphs:
    return Graphs(monkeypatch)


def result(model: Any, mask: Tensor) -> Tensor:
    return model(input_ids=IDS, attention_mask=mask)[0]


@pytest.mark.parametrize(
    "make", [lambda: LlamaForCausalLM(LLAMA), lambda: BertModel(BERT)], ids=["causal", "all"]
)
def test_a_mask_that_hides_nothing_is_compared_at_each_call(
    make: Callable[[], Any], graphs: Graphs
) -> None:
    torch.manual_seed(0)
    model = make().train()
    called = torch.compile(model, backend=coda)
    masks_of_calls = padded(32), padded(20), padded(32), padded(7)
    for mask, compiled in zip(masks_of_calls, (1, 2, 2, 2), strict=True):
        found, true = (result(m, mask) for m in (called, model))
        assert norms(found, true) < 1e-5
        weight = mask[..., None] * torch.randn(found.shape)
        pairs = [torch.autograd.grad((y * weight).sum(), [*model.parameters()],
                                     materialize_grads=True) for y in (found, true)]  # fmt: skip
        for got, expected in zip(*pairs, strict=True):
            assert torch.dist(got, expected) < 1e-4 * (1 + expected.norm())
        assert len(graphs.masked) == compiled
    assert graphs.masked == [[False, False], [True, True]]


def test_a_mask_written_to_is_compared_again(graphs: Graphs) -> None:
    torch.manual_seed(0)
    model, mask = LlamaForCausalLM(LLAMA).eval(), padded(32)
    called = torch.compile(model, backend=coda)
    with torch.inference_mode():
        result(called, mask)
        mask[2, 5:] = 0
        assert norms(result(called, mask), result(model, mask)) < 1e-5


def test_a_mask_that_a_graph_writes_to_stays_one(graphs: Graphs) -> None:
    def part(q: Tensor, mask: Tensor) -> Tensor:
        mask = mask.clone()
        mask[:, 0, 3] = False
        return ATTENTION(q, q, q, attn_mask=mask)

    def whole(q: Tensor, mask: Tensor) -> Tensor:
        mask.logical_and_(torch.ones(9, 9, dtype=torch.bool).tril())
        return ATTENTION(q, q, q, attn_mask=mask)

    q, written = torch.randn(2, 3, 9, 8), list[Tensor]()
    for function in part, whole:
        results = list[Tensor]()
        for called in torch.compile(function, backend=coda), function:
            written.append(torch.ones(2, 1, 9, 9, dtype=torch.bool))
            results.append(called(q, written[-1]))
        assert norms(*results) < 1e-5 and torch.equal(*written[-2:])
    assert graphs.masked == [[True], [True]]


def test_padded_at_first_it_stays_a_mask(graphs: Graphs) -> None:
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA).eval()
    called = torch.compile(model, backend=coda)
    with torch.no_grad():
        for mask in padded(20), padded(32):
            assert norms(result(called, mask), result(model, mask)) < 1e-5
    assert graphs.masked == [[True, True]]


def test_layers_whose_mask_another_graph_made(graphs: Graphs) -> None:
    """As under FSDP2, whose hooks part the model."""
    torch.manual_seed(0)
    model = LlamaForCausalLM(LLAMA).eval()
    for layer in model.model.layers:
        hook: Any = torch.compiler.disable(lambda *_: None)
        layer.register_forward_pre_hook(hook)
    called = torch.compile(lambda ids: model(input_ids=ids).logits, backend=coda)
    with torch.no_grad():
        assert norms(called(IDS), model(input_ids=IDS).logits) < 1e-5
    assert graphs.masked and not any(any(found) for found in graphs.masked)


def test_nothing_is_compared_while_a_cuda_graph_is_captured(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    x, value = torch.zeros(2, 3), torch.ones(2, 3)
    results = (lambda x, word=word: word for word in ("special", "general", "compiled"))
    special, general, compiled = results
    called = masks.by_masks({0: value}, special, general, lambda _: compiled)
    assert called(value) == "special"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    with pytest.warns(UserWarning, match="runs uncompiled"):
        assert called(x) == "general"
    monkeypatch.undo()
    assert called(x) == "compiled"
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert called(value) == "compiled"


def test_equal_values_are_kept_once() -> None:
    mask = torch.ones(4, 1, 6, 6, dtype=torch.bool).tril()
    kept = masks._kept(mask)
    assert torch.equal(kept, mask) and kept.untyped_storage().nbytes() == 36
    assert masks._kept(mask.clone()) is kept
    assert masks._kept(~mask) is not kept


def test_a_small_mask_is_not_waited_for() -> None:
    with FakeTensorMode():
        sizes = (4, 4096), (2, 1024), (4, 1, 512, 512), (2, 128), (1, 1, 512, 512)
        pays = [masks._pays(torch.empty(*s, dtype=torch.bool, device="cuda")) for s in sizes]
    assert pays == [True, True, True, False, False]
    assert masks._pays(torch.ones(2, 3))


def test_tokens_are_no_masks() -> None:
    assert not masks._is_mask(IDS)
    assert not masks._is_mask(torch.ones(2, 3))
    assert masks._is_mask(padded(20))
    assert backend.by_masks is masks.by_masks
