"""Masks that attention is given by word, and those that it keeps."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.fuse.attention import fold_masks

S, D = 12, 16


def heads(count: int, seed: int) -> Tensor:
    return torch.randn(2, count, S, D, generator=torch.Generator().manual_seed(seed))


def attend(mask: Any, k: Any = None) -> Any:
    def function(q: Tensor, key: Tensor, v: Tensor) -> Tensor:
        key, v = (x if k is None else k(x) for x in (key, v))
        return F.scaled_dot_product_attention(q, key, v, attn_mask=mask(q))

    return function


def places() -> Tensor:
    return torch.arange(S)


def causal(q: Tensor) -> Tensor:
    return (places()[:, None] >= places()).expand(2, 1, S, S)


def additive(q: Tensor) -> Tensor:
    return torch.full((S, S), float("-inf")).triu(1)


def smallest(q: Tensor) -> Tensor:
    return torch.full((S, S), torch.finfo(torch.float32).min).triu(1)


def window(q: Tensor) -> Tensor:
    i, j = places()[:, None], places()
    return (i >= j) & (i - j < 5)


def wide_window(q: Tensor) -> Tensor:
    i, j = places()[:, None], places()
    return (i >= j) & (i - j < S)


def everything(q: Tensor) -> Tensor:
    return torch.ones(S, S, dtype=torch.bool)


def biased(q: Tensor) -> Tensor:
    return additive(q) - 0.1 * (places()[:, None] - places()).abs()


def of_values(q: Tensor) -> Tensor:
    return causal(q) & (q[:, :1, :, :1] < 100)


def acausal(q: Tensor) -> Tensor:
    return places()[:, None] <= places()


def written(q: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask[0, 5] = True
    return mask


def filled(q: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask.view(-1)[3:5].fill_(True)
    return mask


def data_written(q: Tensor) -> Tensor:
    mask = torch.ones(S, S, dtype=torch.bool).tril()
    mask.data[0, 5] = True
    return mask


def in_place(q: Tensor) -> Tensor:
    return torch.full((S, S), float("-inf")).triu_(1)


def repeat(x: Tensor) -> Tensor:
    """As transformers repeats keys and values."""
    b, h, s, d = x.shape
    return x[:, :, None, :, :].expand(b, h, 3, s, d).reshape(b, h * 3, s, d)


@pytest.mark.parametrize(
    ("mask", "repeated", "word"),
    [
        (causal, True, "causal"),
        (causal, False, "causal"),
        (additive, True, "causal"),
        (smallest, False, "causal"),
        (wide_window, True, "causal"),
        (everything, False, "all"),
        (window, True, ""),
        (biased, False, ""),
        (of_values, True, ""),
        (acausal, False, ""),
        (written, False, ""),
        (filled, True, ""),
        (data_written, False, ""),
        (in_place, True, "causal"),
    ],
)
def test_a_mask_is_given_by_word_where_it_says_no_more(
    mask: Any, repeated: bool, word: str
) -> None:
    function = attend(mask, repeat if repeated else None)
    args = heads(6, 0), heads(2 if repeated else 6, 1), heads(2 if repeated else 6, 2)
    calls: list[dict[str, Any]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        folded = fold_masks(module.graph)
        assert bool(folded) == bool(word)
        targets = module.graph.find_nodes(op="call_function", target=F.scaled_dot_product_attention)
        calls.extend(dict(node.kwargs) for node in targets)
        return module.forward

    torch._dynamo.reset()
    got = torch.compile(function, backend=backend)(*args)
    assert torch.allclose(got, function(*args), atol=1e-6)
    (given,) = calls
    if word:
        assert given["attn_mask"] is None and given["is_causal"] == (word == "causal")
        assert given.get("enable_gqa", False) == repeated
    else:
        assert given["attn_mask"] is not None


def test_a_mask_that_repeats_queries_stays() -> None:
    """Eager PyTorch refuses it; its tracer gives a result for each mask."""
    q, masks = heads(6, 0), torch.ones(3, 1, S, S, dtype=torch.bool)
    function = lambda q, m: F.scaled_dot_product_attention(q, q, q, attn_mask=m + False)
    graphs: list[dict[str, Any]] = []

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        tensors = dict(zip(module.graph.find_nodes(op="placeholder"), inputs, strict=True))
        graphs.append(fold_masks(module.graph, tensors))
        return module.forward

    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match="broadcast shape"):
        torch.compile(function, backend=backend)(q[:1], masks)
    assert graphs == [{}]


def test_a_mask_of_fewer_queries_than_keys_stays() -> None:
    def function(q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        mask = torch.ones(4, S, dtype=torch.bool).tril()
        return F.scaled_dot_product_attention(q[:, :, :4], k, v, attn_mask=mask)

    def backend(module: torch.fx.GraphModule, inputs: list[Any]) -> Any:
        assert fold_masks(module.graph) == {}
        return module.forward

    torch._dynamo.reset()
    args = heads(6, 0), heads(6, 1), heads(6, 2)
    assert torch.allclose(torch.compile(function, backend=backend)(*args), function(*args))
