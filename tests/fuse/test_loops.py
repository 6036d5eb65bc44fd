"""Losses that go through sequences one by one: which become one call, and the numbers."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.fuse import fuse
from coda_agent.fuse.loops import join_loops
from tests.fuse.test_head import WORDS, logits
from tests.fuse.test_losses import IDS, a_quarter, check

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")
__all__ = ["a_quarter"]
WEIGHTS = torch.linspace(-1, 2, IDS.numel()).view(IDS.shape)


def selected(h: Tensor, w: Tensor) -> Tensor:
    """TRL's selective_log_softmax of float32."""
    z = logits(h, w) / 0.7
    chosen = z.gather(-1, IDS[..., None]).squeeze(-1)
    return chosen - torch.stack([torch.logsumexp(x, dim=-1) for x in z])


def selected_of_16_bits(h: Tensor, w: Tensor) -> Tensor:
    """TRL's selective_log_softmax of bfloat16."""
    pairs = zip(F.linear(h, w), IDS[..., None], strict=True)
    rows = [F.log_softmax(x, dim=-1).gather(dim=-1, index=i) for x, i in pairs]
    return torch.stack(rows).squeeze(-1)


def entropies(h: Tensor, w: Tensor) -> Tensor:
    """TRL's entropy_from_logits."""
    found = []
    for z in logits(h, w).reshape(-1, WORDS).split(128, dim=0):
        p = F.log_softmax(z, dim=-1)
        found.append(-(torch.exp(p) * p).sum(-1))
    return torch.cat(found, dim=0).reshape(IDS.shape)


LOOPS = [selected, selected_of_16_bits, entropies]


@pytest.mark.parametrize("loss", LOOPS, ids=lambda x: x.__name__)
@pytest.mark.one_in(2)
def test_a_loop_through_sequences_has_its_logits_some_rows_at_a_time(loss: Any) -> None:
    notes = check(loss, fuse(loss), upstream=WEIGHTS)
    assert "computed 128 rows at a time in both passes, by 1 product more" in notes


def joined(function: Any) -> int:
    """How many calls that join parts are calls of all; what the function gives stays the same."""
    found: list[str] = []

    def read(module: Any, _: Any) -> Any:
        found.extend(join_loops(module.graph))
        module.graph.lint()
        module.recompile()
        return module

    torch._dynamo.reset()
    x = torch.arange(24.0).view(2, 3, 4).sin()
    assert torch.equal(torch.compile(function, backend=read)(x.clone()), function(x.clone()))
    return len(found)


def test_parts_that_are_computed_alike_are_joined() -> None:
    assert joined(lambda x: torch.stack([(y * 2).exp() for y in x])) == 1
    assert joined(lambda x: torch.stack([y.sum(1) for y in x.unbind(0)])) == 1
    assert joined(lambda x: torch.cat([y.softmax(-1) for y in x.split(1)])) == 1


def written(write: Any) -> Any:
    """Write into a tensor between calls of its parts."""

    def function(x: Tensor) -> Tensor:
        parts = []
        for i in range(2):
            parts.append(x[i].exp())
            write(x)
        return torch.stack(parts)

    return function


OTHERS = {
    "other calls": lambda x: torch.stack([x[0].exp(), x[1].neg()]),
    "another order": lambda x: torch.stack([x[1].exp(), x[0].exp()]),
    "some of them": lambda x: torch.cat([y.exp() for y in x.view(3, 8).split(1)[:2]]),
    "along other dims": lambda x: torch.stack([y.softmax(0) for y in x]),
    "of all parts": lambda x: torch.cat([y.softmax(0) for y in x.view(-1).split(8)]),
    "behind the others": lambda x: torch.stack([y.exp() for y in x], 1),
    "broadcast": lambda x: torch.stack([y * z for y, z in zip(x, x[:, 0], strict=True)]),
    "read elsewhere": lambda x: torch.stack(p := [y.exp() for y in x]) + p[0],
    "themselves": lambda x: torch.stack([*x]),
    "written meanwhile": written(lambda x: x.mul_(2)),
    "written by out": written(lambda x: torch.mul(x, 2, out=x)),
    "written in place": written(lambda x: F.relu(x, inplace=True)),
    "written in place, by position": written(lambda x: F.relu(x, True)),
}


@pytest.mark.parametrize("what", OTHERS)
def test_other_parts_are_left(what: str) -> None:
    assert joined(OTHERS[what]) == 0


def test_sizes_that_are_symbols_are_no_reason_to_fail(recwarn: pytest.WarningsRecorder) -> None:
    function = lambda x, y: torch.cat([x * 2, y * 2])
    x, y = torch.ones(3, 4), torch.ones(5, 4)
    assert torch.equal(fuse(function, dynamic=True)(x, y), function(x, y))
    assert not any("left as it was" in str(warning.message) for warning in recwarn)
