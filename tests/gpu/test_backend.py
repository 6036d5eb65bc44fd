"""The backend `coda` on a GPU."""

import warnings

import pytest
import torch

from coda_agent.evals.float8 import e4m3, quantised, scaled_product
from coda_agent.fuse import fuse

pytestmark = pytest.mark.gpu


def test_a_product_in_fp8_whose_result_is_fp8_is_timed_and_right() -> None:
    torch.manual_seed(0)
    x, w = torch.randn(1024, 512, device="cuda"), torch.randn(768, 512, device="cuda") / 16
    (a, rows), (b, columns) = quantised(x), quantised(w)

    def function(a: torch.Tensor, rows: torch.Tensor) -> torch.Tensor:
        y = scaled_product(a, b, rows[:, None], columns[None])
        gate, up = y.chunk(2, dim=1)
        return e4m3(torch.nn.functional.silu(gate) * up)

    gate, up = (a.double() * rows[:, None] @ (b.double() * columns[:, None]).T).chunk(2, dim=1)
    exact = torch.nn.functional.silu(gate) * up
    own = (function(a, rows).double() - exact).norm()
    with warnings.catch_warnings():
        warnings.filterwarnings("error", message="coda-agent")
        found = fuse(function, dynamic=False)(a, rows).double()
    assert (found - exact).norm() < 1.05 * own
