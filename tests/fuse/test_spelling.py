"""Losses in other spellings: what rules and kernels read is the same, and so are the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.fuse import fuse, head
from tests.fuse.test_head import TARGETS, WIDTH, WORDS, logits
from tests.fuse.test_joint import compared, names
from tests.fuse.test_losses import IDS, check, wider
from tests.fuse.test_regions import drawn
from tests.fuse.test_rules import both

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")


@pytest.fixture(autouse=True)
def a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a quarter of the logits be held."""
    monkeypatch.setattr(head, "LOGITS", WORDS * 2 * TARGETS.numel() // 4)


def of_a_sum_by_letters(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(wider(torch.einsum("btd,vd->btv", h, w)).flatten(0, 1), TARGETS)


def at_counted_rows(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h.flatten(0, 1), w)
    return (z.logsumexp(-1) - z[torch.arange(TARGETS.numel()), TARGETS]).mean()


def from_the_end(h: Tensor, w: Tensor) -> Tensor:
    b, t = (torch.arange(n) for n in IDS.shape)
    p = logits(h, w).log_softmax(-1)
    return -p[b[:, None], t, torch.where(IDS % 2 > 0, IDS, IDS - WORDS)].mean()


def from_the_largest(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h, w)
    z = z - z.max(-1, keepdim=True).values
    return (z.exp().sum(-1).log() - z.gather(-1, IDS[..., None]).squeeze(-1)).mean()


def at_the_largest(h: Tensor, w: Tensor) -> Tensor:
    largest, place = logits(h, w).softmax(-1).max(-1)
    return (largest * (place == IDS)).mean() + largest.square().mean()


def of_a_mixture(h: Tensor, w: Tensor) -> Tensor:
    with torch.no_grad():
        teacher = logits(h.roll(1, 1), w).log_softmax(-1)
    own = logits(h, w).log_softmax(-1)
    mixed = torch.logsumexp(torch.stack([own - 0.5, teacher - 1]), dim=0)
    return F.kl_div(mixed, own, reduction="none", log_target=True).sum() / len(TARGETS)


SPELLINGS = [of_a_sum_by_letters, at_counted_rows, from_the_end, from_the_largest, at_the_largest,
             of_a_mixture]  # fmt: skip


@pytest.mark.parametrize("loss", SPELLINGS, ids=lambda x: x.__name__)
@pytest.mark.one_in(2)
def test_a_loss_in_another_spelling_has_its_logits_some_rows_at_a_time(loss: Any) -> None:
    assert "its loss are computed 128 rows at a time" in check(loss, fuse(loss))


def test_other_elements_than_one_of_each_row_are_indexed() -> None:
    rows = TARGETS.numel()
    loss = lambda h, w: logits(h.flatten(0, 1), w)[torch.arange(rows).flip(0), TARGETS].mean()
    assert "index reads it whole" in check(loss, fuse(loss))


BEHIND = {
    "sums of one": lambda z: z[..., None].sum(-1).logsumexp(-1).mean(),
    "sums of rows and columns": lambda z: (z[..., None].sum((0, 1, 2)) + z.logsumexp(-1)).mean(),
    "the largest of one": lambda z: (z[..., None].amax(-1).exp().sum(-1).log()).mean(),
    "numbers of columns": lambda z: (
        (z[..., None] * torch.arange(WORDS)[:, None]).squeeze(-1).softmax(-1).amax(-1).mean()
    ),
}


@pytest.mark.parametrize("what", BEHIND)
def test_a_dim_of_one_behind_the_columns_is_none_of_them(what: str) -> None:
    loss = lambda h, w: BEHIND[what](logits(h, w))
    check(loss, fuse(loss))


def test_a_sum_by_letters_is_a_product_of_a_kernel() -> None:
    function = lambda x, w, b: F.gelu(torch.einsum("...d,fd->...f", x, w) + b)
    args = [drawn(2, 24, 32), drawn(64, 32), drawn(64)]
    assert len(names(compared(function, args))) == 1
    assert both(function, args).kernels


@pytest.mark.parametrize("columns", [160, 176])
def test_columns_that_change_are_gathered(columns: int) -> None:
    def loss(h: Tensor, w: Tensor) -> Tensor:
        p = logits(h, w).log_softmax(-1)
        return p[torch.arange(len(h)), TARGETS[: len(h)] % 7].mean()

    compiled = fuse(loss, dynamic=True)
    for n in (columns, columns + 16):
        args = [drawn(24, WIDTH).requires_grad_(), drawn(n, WIDTH).requires_grad_()]
        found = torch.autograd.grad(compiled(*args), args)
        torch.testing.assert_close(found, torch.autograd.grad(loss(*args), args), atol=1e-3, rtol=0)


def test_strides_that_later_views_need_stay() -> None:
    turned = lambda x: x.transpose(-1, -2).unsqueeze(1).permute(1, 0, 2, 3)
    function = lambda x, w: (turned(F.linear(x, w)) * 0.7).transpose(-1, -2).reshape(-1, 64)
    args = [drawn(1, 24, 32), drawn(64, 32)]
    compared(function, args)
