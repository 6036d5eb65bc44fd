"""Tests of evals/float8.py: linears in FP8 against float64."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch

from coda_agent.evals.float8 import converted


@pytest.mark.parametrize("bias", [False, True])
def test_linears_in_fp8_are_right_but_for_e4m3(bias: bool) -> None:
    """Outputs and gradients: random roundings of a sixteenth at most."""
    torch.manual_seed(0)
    model = torch.nn.Sequential(torch.nn.Linear(64, 96, bias=bias), torch.nn.Linear(96, 80))
    model.add_module("lm_head", torch.nn.Linear(80, 32))
    model, x = model.bfloat16(), torch.randn(2, 24, 64).bfloat16()
    exact, found = copy.deepcopy(model).double(), list[Any]()
    assert converted(model).startswith("torch") and type(model.lm_head) is torch.nn.Linear
    assert type(model[0]) is not torch.nn.Linear and model[0].weight.dtype == torch.bfloat16
    one: Any
    for one in (model, exact):
        given = x.detach().to(one[0].weight.dtype, copy=True).requires_grad_()
        out = one(given)
        made = torch.Generator().manual_seed(1)
        out.backward(torch.randn(out.shape, generator=made).bfloat16().to(out.dtype))
        found.append([out.detach(), given.grad, *(p.grad for p in one.parameters())])
    for mine, truth in zip(*found, strict=True):
        assert 0 < (mine.double() - truth).norm() < 0.1 * truth.norm()
