"""Tables that many elements read: computed once, and what is no table stays as it is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.fuse import head, tables
from tests.fuse.test_regions import D, drawn
from tests.fuse.test_rotation import by_chunks
from tests.fuse.test_rules import both, calls

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
HEADS, WIDTH = 8, 16
HELD = "prims.inductor_force_stride_order"


def rotated(angles: Callable[[Tensor], Tensor]) -> Callable[[Tensor, Tensor], Tensor]:
    """Queries of positions, turned by their angles."""

    def function(x: Tensor, w: Tensor) -> Tensor:
        place = torch.arange(len(x), dtype=torch.float32)[:, None]
        angle = angles(place / 100 ** torch.linspace(0, 1, WIDTH // 2))
        cos, sin = angle.cos().to(x.dtype), angle.sin().to(x.dtype)
        q = F.linear(x, w).view(len(x), HEADS, WIDTH).transpose(0, 1)
        return q * cos + by_chunks(q) * sin

    return function


@pytest.mark.parametrize(
    "angles", [lambda a: torch.cat((a, a), -1), lambda a: a.repeat_interleave(2, -1)]
)
def test_cosines_of_a_rotation_are_computed_once(
    angles: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each of the two is read by a product's 24 × 128 elements, once in each pass."""
    args = [drawn(24, D), drawn(HEADS * WIDTH, D)]
    for least, held in ((2 * 24 * HEADS * WIDTH, 2), (2 * 24 * HEADS * WIDTH + 1, 0)):
        monkeypatch.setattr(tables, "_READ", least)
        shown = both(rotated(angles), args)
        assert sum("is a table" in note for note in shown.notes) == held
        assert sum(HELD in line for line in shown.graph) == held
        assert calls(shown, "cos") == calls(shown, "sin") == 1


def test_a_table_may_be_a_part_of_what_is_computed(monkeypatch: pytest.MonkeyPatch) -> None:
    """The view of it has gaps between rows."""
    monkeypatch.setattr(tables, "_READ", 0)

    def function(x: Tensor, w: Tensor) -> Tensor:
        place = torch.arange(len(x), dtype=torch.float32)[:, None]
        cos = (place * torch.linspace(0, 1, 2 * WIDTH)).cos().to(x.dtype)[:, :WIDTH]
        return F.linear(x, w).view(len(x), 2 * HEADS, WIDTH).transpose(0, 1) * cos

    shown = both(function, [drawn(24, D), drawn(2 * HEADS * WIDTH, D)])
    assert sum(HELD in line for line in shown.graph) == 1


@pytest.mark.parametrize(("rows", "wide"), [(256, True), (256, False), (128, True)])
def test_what_rows_of_a_loss_have_is_computed_once(
    rows: int, wide: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Then its gradients are few enough calls that Inductor writes them over the logits. Some rows
    at a time have theirs each, or Inductor joined the gradients of all."""
    monkeypatch.setattr(tables, "WIDE", rows * 512 + (not wide))
    y = torch.randint(512, (256,), generator=torch.Generator().manual_seed(0))
    monkeypatch.setattr(head, "LOGITS", rows * 512 * 2)
    shown = both(lambda x, w: F.cross_entropy(F.linear(x, w), y), [drawn(256, D), drawn(512, D)])
    held = [line for line in shown.graph if HELD in line]
    assert len(held) == (2 * 256 // rows if wide else 0)
    assert all(f"# [{rows}, 1]" in line for line in held)


@pytest.mark.parametrize(
    "function",
    [
        lambda x, w: F.linear(x, w) * x.cos().sum(-1, keepdim=True),  # a sum of costly ones
        lambda x, w: F.linear(x, w).cos() * 2,  # as many as it is read by
        lambda x, w: F.linear(x, w) * torch.arange(len(x))[:, None].expand(-1, HEADS * WIDTH),
    ],
)
def test_what_is_no_table_is_left(function: Callable[[Tensor, Tensor], Tensor]) -> None:
    shown = both(function, [drawn(24, D), drawn(HEADS * WIDTH, D)])
    assert not any(HELD in line for line in shown.graph)
