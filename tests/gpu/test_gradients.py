"""Gradients of accepted kernels on a Hopper GPU."""

from __future__ import annotations

import pytest
import torch

from coda_agent import generated
from tests.gpu.test_library import launches
from tests.runtime.test_autograd import CASES, hold, leaves

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize(("name", "binding"), CASES)
def test_gradients_err_as_pytorchs_own(name: str, binding: dict[str, str]) -> None:
    hold(name, binding, "cuda")


def given(name: str) -> list[torch.Tensor]:
    inputs = leaves(getattr(generated, name).spec, {}, exact=False)
    return [t.detach().cuda().requires_grad_(t.requires_grad) for t in inputs.values()]


@pytest.mark.parametrize(
    ("name", "most"), [("gemm_rmsnorm_swiglu", 1), ("gemm_residual_partial_rmsnorm", 4)]
)
def test_what_is_no_product_is_one_launch(name: str, most: int) -> None:
    values = given(name)
    outputs = getattr(generated, name)(*values)
    grads = [torch.ones_like(t) for t in outputs]

    def backward(wanted: list[torch.Tensor]) -> list[str]:
        return launches(lambda: torch.autograd.grad(outputs, wanted, grads, retain_graph=True))

    products = launches(lambda: (grads[0] @ values[1], grads[0].mT @ values[0]))
    found = backward([t for t in values if t.requires_grad])
    assert sum("Elementwise" in x for x in found) == 1, found
    # Beside it the share of a mean, a fold, and a vector's gradient in 16 bits.
    assert len(found) <= len(products) + most, found


def test_a_graph_replays_gradients_of_new_contents() -> None:
    values = given("gemm_rmsnorm_swiglu")

    def step() -> tuple[torch.Tensor, ...]:
        outputs = generated.gemm_rmsnorm_swiglu(*values)
        return torch.autograd.grad(outputs, values, [torch.ones_like(t) for t in outputs])

    side = torch.cuda.Stream()
    with torch.cuda.stream(side):  # as PyTorch asks of what is captured with its backward
        step()
    torch.cuda.synchronize()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = step()
    with torch.no_grad():
        for t in values:
            t.mul_(1.5)
    graph.replay()
    assert all(torch.equal(got, want) for got, want in zip(captured, step(), strict=True))
