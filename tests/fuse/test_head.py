"""A head and its loss some rows at a time: what is taken, what is left whole, and the numbers."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.fuse import fuse, head
from tests.fuse.test_joint import leaves, norms, watched
from tests.fuse.test_regions import drawn

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
ROWS, WORDS, WIDTH = 512, 160, 32
TARGETS = torch.arange(ROWS) * 7 % WORDS


@pytest.fixture(autouse=True)
def a_quarter(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let a quarter of the logits be held."""
    monkeypatch.setattr(head, "LOGITS", WORDS * 2 * ROWS // 4)


def gradients(
    loss: Callable[..., Tensor], args: list[Tensor], upstream: float = 1.0, *, wide: bool = False
) -> list[Tensor]:
    given = [(a.double() if wide else a.clone()).requires_grad_() for a in args]
    value, *_ = leaves(loss(*given))
    (value * upstream).sum().backward()
    return [value.detach(), *(a.grad for a in given if a.grad is not None)]


def compared(loss: Callable[..., Tensor], args: list[Tensor], upstream: float = 1.0) -> str:
    """What is noted of a loss, which with its gradients is as near to float64 as PyTorch's."""
    with watched() as seen:
        got = gradients(fuse(loss), args, upstream)
    own, truth = gradients(loss, args, upstream), gradients(loss, args, upstream, wide=True)
    for mine, pytorch, true in zip(got, own, truth, strict=True):
        assert norms(mine, true) <= 1.25 * norms(pytorch, true) + 1e-3
    (shown,) = seen
    return "\n".join(shown.notes)


def logits(h: Tensor, w: Tensor) -> Tensor:
    return F.linear(h, w).float()


def rows_left_out(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(logits(h, w), TARGETS.where(TARGETS > 40, -100))


def of_sequences(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h.view(4, -1, WIDTH), w)
    return F.cross_entropy(z.view(-1, WORDS), TARGETS)


def capped(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy(torch.tanh(logits(h, w) / 5) * 5, TARGETS, label_smoothing=0.1)


def with_z_loss(h: Tensor, w: Tensor) -> Tensor:
    z = logits(h, w)
    return F.cross_entropy(z, TARGETS, reduction="sum") / 7 + z.logsumexp(-1).square().mean()


def biased(h: Tensor, w: Tensor, b: Tensor) -> Tensor:
    return F.cross_entropy(F.linear(h, w, b).float(), TARGETS)


def log_probability(h: Tensor, w: Tensor) -> Tensor:
    return -torch.log_softmax(logits(h, w), -1).gather(-1, TARGETS[:, None]).mean()


def other_way_round(h: Tensor, w: Tensor) -> Tensor:
    return F.cross_entropy((h @ w.view(WIDTH, WORDS)).float(), TARGETS)


def distilled(h: Tensor, w: Tensor) -> Tensor:
    teacher = torch.softmax(logits(h.detach(), w.detach()) * 0.5, -1)
    return F.kl_div(F.log_softmax(logits(h, w), -1), teacher, reduction="batchmean")


LOSSES = [rows_left_out, of_sequences, capped, with_z_loss, biased, log_probability,
          other_way_round, distilled]  # fmt: skip


@pytest.mark.parametrize("loss", LOSSES, ids=lambda x: x.__name__)
@pytest.mark.one_in(2)
def test_gradients_of_some_rows_at_a_time_are_as_near_as_pytorchs(loss: Any) -> None:
    args = [drawn(ROWS, WIDTH) * 4, drawn(WORDS, WIDTH, seed=1) * 2, drawn(WORDS, seed=2)]
    args = args[: loss.__code__.co_argcount]
    assert "computed 128 rows at a time" in compared(loss, args, 0.5)


def test_no_logits_are_whole_or_kept_and_sums_of_gradients_are_in_kernels() -> None:
    args = [drawn(ROWS, WIDTH).requires_grad_(), drawn(WORDS, WIDTH, seed=1).requires_grad_()]
    kept: list[tuple[list[int], torch.dtype]] = []
    with (
        watched() as seen,
        torch.autograd.graph.saved_tensors_hooks(
            lambda x: kept.append(([*x.shape], x.dtype)) or x, lambda x: x
        ),
    ):
        fuse(rows_left_out)(*args)
    assert ([WORDS, WIDTH], torch.float32) in kept
    assert not any(shape[-1] == WORDS or ROWS // 4 in shape for shape, _ in kept)
    (shown,) = seen
    assert not any(f"[{ROWS}, {WORDS}]" in line for line in shown.graph)
    assert any(f"[{ROWS // 4}, {WORDS}]" in line for line in shown.graph)
    ours = [x for x in shown.steps if x.what.startswith("composed")]
    # One after the other: logits, and what they add to the weight's gradient.
    kinds = ["add" if x.step.startswith("add") else x.step.split(" + ")[1][:9] for x in ours]
    assert kinds == ["logsumexp", *["logsumexp", "add"] * 3]


def test_a_frozen_head_gives_gradients_of_its_input_alone() -> None:
    w = drawn(WORDS, WIDTH, seed=1)
    loss = lambda h: F.cross_entropy(logits(h, w.to(h.dtype)), TARGETS)
    assert "computed 128 rows at a time" in compared(loss, [drawn(ROWS, WIDTH) * 4])


WHOLE = {
    "is not of one loss": lambda h, w: F.cross_entropy(logits(h, w), TARGETS, reduction="none"),
    "it is a result": lambda h, w: (F.cross_entropy(z := logits(h, w), TARGETS), z),
    "a gradient needs a value of all rows": lambda h, w: F.cross_entropy(
        logits(h, w), TARGETS
    ).exp(),
    "reads it whole": lambda h, w: F.cross_entropy(
        (z := logits(h, w)).where(z > z.topk(8).values[:, -1:], -9), TARGETS
    ),
}


@pytest.mark.parametrize("why", WHOLE)
def test_what_needs_all_rows_has_them(why: str) -> None:
    args = [drawn(ROWS, WIDTH), drawn(WORDS, WIDTH, seed=1)]
    assert why in compared(WHOLE[why], args)


def test_logits_that_fit_are_whole(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(head, "LOGITS", WORDS * 2 * ROWS)
    args = [drawn(ROWS, WIDTH), drawn(WORDS, WIDTH, seed=1)]
    assert compared(rows_left_out, args).count("row") == 2
