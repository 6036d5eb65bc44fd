"""Graphs cut into regions, written at random too: what is left to PyTorch has its reason."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import Tensor

from coda_agent.evals.judge.plans import Exact, called, fault, function, planned, tensors, tried
from coda_agent.fuse.record import recorded
from coda_agent.fuse.regions import Region, cut, order
from tests.fuse.test_plan import FF, D, H, drawn


@pytest.mark.parametrize("seed", range(40))
def test_a_plan_is_right_or_its_function_is_left_by_name(seed: int) -> None:
    cell = tried(1, seed)
    assert cell["layer"] == "right", cell


def test_a_wrong_kernel_is_found() -> None:
    text, args = function(3), tensors(3)
    plan = planned(called(text), args, Exact)
    assert plan.kernels and fault(text, args, plan) == ""
    step: Any = plan.module.kernel_0
    right = step.kernel
    step.kernel = lambda *given: [-x for x in right(*given)]
    assert "off by" in fault(text, args, plan) or "finite" in fault(text, args, plan)


def beside(x: Tensor, w: Tensor, t: Tensor) -> Tensor:
    return F.linear(x, w) * F.silu(t) + t


def before(t: Tensor, w: Tensor, v: Tensor) -> Tensor:
    h = F.silu(t)
    return F.linear(F.linear(h, w).tanh(), v) * h


def wider(x: Tensor, w: Tensor, a: Tensor, b: Tensor) -> Tensor:
    return F.linear(x, w) * (a.float() * b.float() + b.float().exp()).bfloat16()


@pytest.mark.parametrize(
    ("function", "shapes", "inside"),
    [
        (beside, [(24, H), (H, H), (24, H)], True),
        (before, [(24, H), (FF, H), (H, FF)], False),  # a product before it reads it
        (wider, [(24, H), (H, H), (24, H), (24, H)], False),  # two matrices in the place of one
    ],
)
def test_what_is_made_of_one_tile_is_computed_in_the_kernel(function, shapes, inside) -> None:
    args = [drawn(*shape, seed=i) for i, shape in enumerate(shapes)]
    graph = recorded(function, args).graph
    region = cut(graph).regions[-1]
    names = {node.target for node in region.nodes}
    assert bool(names & {torch.ops.aten.sigmoid.default, torch.ops.aten.exp.default}) == inside


def test_steps_come_after_what_they_read() -> None:
    def function(x: Tensor, w: Tensor, v: Tensor, t: Tensor) -> tuple[Tensor, Tensor]:
        y = F.silu(F.linear(x, w))
        return F.relu(F.linear(y, v)) + t.sum(), y

    args = [drawn(24, H), drawn(FF, H), drawn(D, FF), drawn(24, D)]
    known = cut(recorded(function, args).graph)
    steps = [*order(known)]
    assert len([s for s in steps if isinstance(s, Region)]) == len(known.regions) == 2
    for i, step in enumerate(steps):
        if isinstance(step, Region):
            outputs = {x for s in steps[:i] if isinstance(s, Region) for x in s.outputs}
            assert {*step.inputs} <= {*steps[:i]} | outputs
