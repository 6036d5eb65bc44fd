"""Losses that shift, scale or turn logits: of which rows the product is, and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, fx, nn

from coda_agent.fuse import backend, fuse, head, losses
from coda_agent.fuse.losses import spell_by_rows
from tests.fuse.test_head import TARGETS, WIDTH, WORDS, gradients, logits
from tests.fuse.test_joint import norms, watched
from tests.fuse.test_regions import drawn

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
IDS = TARGETS.view(4, -1)
KEPT = IDS % 3 > 0
NEXT = IDS[:, 1:].reshape(-1)
ODD = 161
LABELS = TARGETS * 3 % ODD


@pytest.fixture(autouse=True)
def a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a quarter of the logits be held."""
    monkeypatch.setattr(head, "LOGITS", WORDS * 2 * TARGETS.numel() // 4)


def wider(x: Tensor) -> Tensor:
    return x if x.dtype == torch.float64 else x.float()


def shifted(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h, w)[..., :-1, :].contiguous()
    return F.cross_entropy(z.view(-1, WORDS), NEXT, label_smoothing=0.1)


def capped(h: Tensor, w: Tensor) -> Tensor:
    z = wider(torch.tanh(F.linear(h, w) / 3) * 3)[:, :-1]
    return F.cross_entropy(z.flatten(0, 1), NEXT) + 0.01 * z.logsumexp(-1).square().mean()


def cooled(h: Tensor, w: Tensor) -> Tensor:
    z = h @ w.T
    z /= 0.7
    return F.cross_entropy(wider(z[1:, ::2]).flatten(0, 1), IDS[1:, 1::2].reshape(-1))


def proximal(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h, w)[:, :-1]
    p = z.log_softmax(-1).gather(-1, IDS[:, 1:, None]).squeeze(-1)
    kept, gain = KEPT[:, 1:], IDS[:, 1:] / WORDS - 0.4
    ratio = (p + 5).exp()
    return (torch.max(-gain * ratio, -gain * ratio.clamp(0.8, 1.2)) * kept).sum() / kept.sum()


def of_last(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h.view(TARGETS.numel(), 1, WIDTH).repeat(1, 2, 1), w)[:, -1, :]
    seen = torch.zeros(WORDS)
    seen[3] = 1  # a write in place
    return F.cross_entropy(z, TARGETS) + 0 * seen.sum()


def turned(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(logits(h, w).permute(0, 2, 1), IDS, ignore_index=3)


def turned_and_shifted(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h, w)[:, :-1].transpose(-1, 1)
    x = F.cross_entropy(z, IDS[:, 1:], reduction="none")
    return (x * KEPT[:, 1:]).sum() / KEPT.sum()


def unlikely(h: Tensor, w: Tensor) -> Tensor:
    return -torch.log1p(-logits(h, w).softmax(-1).gather(2, IDS[..., None])).mean()


def check(loss: Any, got: Any, dtype: torch.dtype = torch.bfloat16, upstream: Any = 0.5) -> str:
    """Check a loss and its gradients, and say what became of its logits."""
    h, w = ((4 * drawn(*x, WIDTH)).to(dtype) for x in (IDS.shape, (WORDS,)))
    with watched() as seen:
        ours = gradients(got, [h, w], upstream)
    own = gradients(loss, [h, w], upstream)
    truth = gradients(loss, [h, w], upstream, wide=True)
    for mine, pytorch, true in zip(ours, own, truth, strict=True):
        assert mine.dtype == pytorch.dtype
        assert norms(mine, true) <= 1.3 * norms(pytorch, true) + 1e-4
    (shown,) = seen
    return "\n".join(shown.notes)


def of_some_rows(h: Tensor, w: Tensor) -> Tensor:
    chosen = torch.arange(0, TARGETS.numel(), 2)
    z = logits(h.view(-1, WIDTH), w)[chosen] / 2
    return F.cross_entropy(z, TARGETS[chosen])


LOSSES = [capped, cooled, proximal, of_last, of_some_rows, turned, turned_and_shifted, unlikely]


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.__name__)
@pytest.mark.one_in(2)
def test_a_loss_that_shifts_or_turns_logits_has_them_some_rows_at_a_time(loss: Any) -> None:
    assert "its loss are computed 128 rows at a time" in check(loss, fuse(loss))


def test_a_frozen_head_is_one_product() -> None:
    """As with adapters; of rows that lie apart PyTorch makes a batch of products otherwise."""
    h, w = (4 * drawn(*x, WIDTH) for x in (IDS.shape, (WORDS,)))
    h.requires_grad_()
    found = []
    with watched() as seen:
        for loss, x in ((fuse(shifted), h), (shifted, h), (shifted, h.double())):
            weight = w.to(x.dtype)
            found += torch.autograd.grad(loss(x, weight), h)
    assert "its loss are computed 128 rows at a time" in "\n".join(seen[0].notes)
    ours, own, truth = found
    assert norms(ours, truth.double()) <= 1.3 * norms(own, truth.double()) + 1e-4


def test_sizes_that_change_are_shifted_too() -> None:
    def loss(h: Tensor, w: Tensor) -> Tensor:
        return F.cross_entropy(logits(h, w)[:, :-1].flatten(0, 1), NEXT[: h.shape[0] * 127])

    check(loss, fuse(loss, dynamic=True))


WHOLE = {
    "other rows are read": lambda z: z[:, :-1].logsumexp(-1).mean() + z[:, -1].square().mean(),
    "columns are taken": lambda z: z[:, :-1, 1:].logsumexp(-1).mean(),
    "rows of numbers that are known later": lambda z: z[torch.arange(3)].logsumexp(-1).mean(),
}


@pytest.mark.parametrize("what", WHOLE)
def test_what_is_read_otherwise_is_taken_behind_the_product(what: str) -> None:
    loss = lambda h, w: WHOLE[what](logits(h, w))
    assert "is computed whole" in check(loss, fuse(loss))


def test_gradients_of_float16_keep_the_scale_of_their_loss(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS", head.LOGITS // 2)
    loss = lambda h, w: shifted(h, w) * 1e-5  # as of 100 times as many rows
    notes = check(loss, fuse(loss), torch.float16, 65536.0)
    assert "in both passes, by 1 product more: float16 holds" in notes


def test_fewer_logits_of_float16_are_whole() -> None:
    assert "is computed whole: float16 holds" in check(shifted, fuse(shifted), torch.float16)


def classified(h: Tensor, w: Tensor) -> Tensor:
    return nn.CrossEntropyLoss(ignore_index=5)(wider(F.linear(h, w)).view(-1, ODD), LABELS)


def biased(h: Tensor, w: Tensor) -> Tensor:
    z = wider(F.linear(h, w, w[:, 0].contiguous())).reshape((-1, ODD))
    return F.cross_entropy(input=z, target=LABELS, reduction="none")


def cut(h: Tensor, w: Tensor) -> Tensor:
    z = F.linear(h, w, w[:, 1].contiguous())[..., : ODD - 20].flatten(end_dim=1)
    return F.cross_entropy(z, LABELS % (ODD - 20))


def smoothed(h: Tensor, w: Tensor) -> Tensor:
    z = wider(F.linear(h, w)).view(-1, ODD)
    return F.cross_entropy(z, LABELS, label_smoothing=0.1)


def with_others(h: Tensor, w: Tensor) -> Tensor:
    z = wider(F.linear(h, w)).view(-1, ODD)
    return F.cross_entropy(z, LABELS) + 0.01 * z.square().mean()


def warm(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(torch.reshape(F.linear(h, w) / 1.5, (-1, ODD)), LABELS)


def of_images(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w), IDS[:, :1].expand(-1, ODD) % 128)


def cold(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w).view(-1, ODD) * 1e-3, LABELS)


def capped_and_odd(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(wider(torch.tanh(F.linear(h, w) / 3)).view(-1, ODD), LABELS)


@pytest.mark.parametrize("label", [ODD, 191, -3])
def test_a_label_that_is_no_word_is_refused_beside_more_words(
    label: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "WIDE", 1)
    labels = LABELS.clone()
    labels[7], labels[9] = label, -100
    loss = lambda h, w: F.cross_entropy(wider(F.linear(h, w)).view(-1, ODD), labels)
    args = [drawn(*shape, WIDTH) for shape in (IDS.shape, (ODD,))]
    torch._dynamo.reset()
    with pytest.raises(RuntimeError, match=f"index {label} is out of bounds .* with size {ODD}"):
        gradients(fuse(loss), args)


def test_what_a_kernel_gathers_is_looked_up_before() -> None:
    """A GPU's kernel would take 0 for what lies beyond its columns."""
    labels = TARGETS.clone()
    labels[7] = WORDS
    loss = lambda h, w: F.cross_entropy(logits(h, w), labels)
    args = [drawn(len(labels), WIDTH), drawn(WORDS, WIDTH)]
    torch._dynamo.reset()
    with torch.no_grad(), pytest.raises(RuntimeError, match=f"index {WORDS} is out of bounds"):
        fuse(loss)(*args)


@pytest.mark.one_in(4)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize(
    ("loss", "words", "width"),
    [(classified, ODD, 192), (biased, ODD, 192), (cut, ODD, 192), (cut, 176, 176),
     (smoothed, ODD, ODD), (with_others, ODD, ODD), (capped_and_odd, ODD, ODD),
     (warm, ODD, None), (of_images, ODD, ODD), (cold, ODD, ODD)],
)  # fmt: skip
def test_odd_vocabularies_have_more_words_where_a_loss_does_not_see_them(
    loss: Any, words: int, width: int | None, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(losses, "WIDE", 1)
    seen = list[fx.Graph]()
    monkeypatch.setattr(backend, "spell_by_rows", lambda g: seen.append(g) or spell_by_rows(g))
    h, w = ((4 * drawn(*x, WIDTH)).to(dtype) for x in (IDS.shape, (words,)))
    torch._dynamo.reset()
    upstream = torch.linspace(0.5, 1, LABELS.numel()) if loss is biased else 0.5
    ours = gradients(fuse(loss), [h, w], upstream)
    own, truth = (gradients(loss, [h, w], upstream, wide=wide) for wide in (False, True))
    for mine, pytorch, true in zip(ours, own, truth, strict=True):
        assert mine.shape == pytorch.shape and mine.dtype == pytorch.dtype
        assert norms(mine, true) <= 1.3 * norms(pytorch, true) + 1e-4
    (product,) = seen[0].find_nodes(op="call_function", target=F.linear)
    if width is None:  # -6e4 in float16 may become an infinity
        width = ODD if dtype is torch.float16 else 192
    assert product.meta["example_value"].shape[-1] == width
    assert (len(product.args) == 3) == (width != ODD or loss is biased)
