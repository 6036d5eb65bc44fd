"""Tests of evals/cases.py: errors against a truth, and passes that give what is checked."""

from __future__ import annotations

import math

import pytest
import torch

from coda_agent.evals.cases import Setup, differentiated


def test_errors_are_distances_over_the_truths_norm() -> None:
    truth = {"a": torch.tensor([3.0, 4.0]), "b": torch.ones(2, 2), "loss": torch.tensor(2.0)}
    setup = Setup({}, truth)
    late = lambda: torch.tensor([3.0, 5.0])
    outputs = {"a": late, "loss": torch.tensor(1.0), "more": torch.ones(1)}
    assert setup.errors(outputs) == pytest.approx({"a": 0.2, "loss": 0.5})
    assert setup.errors({"b": torch.tensor([[1.0, 1.0], [1.0, math.nan]])}) == {"b": math.inf}
    few = Setup({}, {"b": torch.ones(2, 2)}, rows=slice(None, None, 2))
    assert few.errors({"b": torch.tensor([[1.0, 1.0], [9, 9], [1, 1]])}) == {"b": 0.0}


def test_a_pass_gives_outputs_and_gradients() -> None:
    x, w = torch.randn(4, 3, requires_grad=True), torch.randn(5, 3, requires_grad=True)
    values = {"x": x, "w": w}
    way = lambda t: (t["x"] @ t["w"].T, t["x"].sum(), t["w"].detach())
    forward = differentiated(way, values, "forward")(0)
    assert [*forward] == ["out 0", "out 1", "out 2"]
    assert torch.equal(forward["out 0"], (x @ w.T).detach())
    both = differentiated(way, values, "both")
    backward = differentiated(way, values, "backward")
    found, again = both(0), both(1)
    seeded = torch.Generator().manual_seed(1)
    grad, total = torch.randn(4, 5, generator=seeded), torch.randn((), generator=seeded)
    torch.testing.assert_close(found["x"], grad @ w.detach() + total)
    torch.testing.assert_close(found["w"], grad.T @ x.detach())
    assert all(torch.equal(found[name], again[name]) for name in found)
    for _ in range(2):  # its graph is kept
        assert [*(alone := backward(0))] == ["x", "w"] and torch.equal(alone["x"], found["x"])
    assert x.grad is None and w.grad is None
