"""Tests of evals/layers.py: blocks and heads at reduced size, as right as PyTorch's own."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from coda_agent.evals import layers
from coda_agent.evals.cases import Case
from coda_agent.evals.float8 import quantised, scaled_product
from coda_agent.evals.layers import BLOCKS, Fp8Ops, Widths
from tests.evals.small import measured

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")


@pytest.mark.one_in(15)
@pytest.mark.parametrize("case", layers.cases(), ids=lambda case: case.name)
def test_a_case_is_as_right_as_pytorchs(tmp_path: Path, case: Case) -> None:
    cells = {name: cell for (_, name), cell in measured(tmp_path, 64, case).items()}
    # At these sizes single roundings count; e4m3 rounds by up to a sixteenth on both sides.
    assert 0 < (cells["ours"].error_ratio or 0) <= 1.05
    assert (cells["ours"].error or 0) < (2**-4 if "fp8" in case.name else 0.02)
    assert cells["gemm"].error is None and not cells["gemm"].absent
    assert {c.absent for n, c in cells.items() if "compile" in n} == {"needs a GPU"}


def test_the_forms_of_scaled_products_agree() -> None:
    torch.manual_seed(0)
    weights = {
        n: torch.randn(32, 48).bfloat16() for n in ("wo", "gate", "up", "down", "q", "k", "v")
    }
    x = torch.randn(64, 48).bfloat16()
    one = torch.ones(64, 4)
    exact, behind = (Fp8Ops(weights, one, one, 0.25, late) for late in (False, True))
    (values, columns), (narrow, rows) = exact.weights["gate", "up"], quantised(x)
    truth = (narrow.double() * rows[:, None]) @ (values.double() * columns[:, None]).T
    for ops in (exact, behind):
        found = torch.cat([*ops.products(weights, x, "gate", "up")], 1).double()
        torch.testing.assert_close(found, truth, rtol=2**-7, atol=1e-2)
    values, scales = exact.weights["q", "k", "v"]
    assert len({*scales.tolist()}) == 1 and values.shape == (96, 48)
    (down,) = exact.products(weights, x, "down")
    static = scaled_product((x / 0.25).to(torch.float8_e4m3fn), exact.weights["down",][0],
                            torch.full((64, 1), 0.25), exact.weights["down",][1][None])  # fmt: skip
    assert torch.equal(down, static)


def test_widths_are_divided_in_multiples_of_16() -> None:
    assert Widths(3584, 18944, 512, True).shrunk(64) == Widths(64, 304, 16, True)
    assert Widths(4096, words=32000).shrunk(64) == Widths(64, words=512)
    assert all(
        w.shrunk(1) == w and w.d % w.head_dim == w.kv % w.head_dim == 0 for w in BLOCKS.values()
    )
