"""Inductor's Python of calls of kernels: past the dispatcher, with the operator's results."""

from __future__ import annotations

import pytest
import torch
from torch._inductor import config
from torch._inductor.scheduler import Scheduler
from torch._inductor.utils import run_and_get_code

import coda_agent.fuse.joint
from coda_agent.primitives import Tile, epilogue, relu
from coda_agent.runtime.program_operator import kernel_operator, program_text

pytestmark = [
    pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU"),
    pytest.mark.filterwarnings("ignore::DeprecationWarning"),
]
assert coda_agent.fuse.joint


@epilogue(O=Tile)
def clipped(acc, C: Tile):
    return {"O": relu(acc) + C}


TEXT = program_text(clipped, {"O": "bfloat16"}, "bfloat16", "")
CALL = kernel_operator().default


def twice(a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:
    (once,) = CALL(a, b, [c], program=TEXT)
    return CALL(once.mT, b, [c], program=TEXT)[0]


@pytest.mark.parametrize(
    "options",
    [
        {"graph_partition": False},
        {"graph_partition": True},
        {
            "fx_wrapper": True,
            "graph_partition": False,
            "size_asserts": False,
            "alignment_asserts": False,
        },
    ],
)
@pytest.mark.parametrize("fixed", [True, False])
def test_code_of_inductor_calls_kernels_itself(
    options: dict[str, bool], fixed: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In parts for graphs of CUDA, too. FX has a graph instead of code.

    Nothing here asks for a C++ compiler.
    """
    monkeypatch.setattr(Scheduler, "should_partition", lambda *_: None)  # on a CPU, too
    generator = torch.Generator().manual_seed(0)
    a, b, c = (torch.randn(48, 48, generator=generator).bfloat16() for _ in range(3))
    with config.patch({"force_disable_caches": True, **options}):
        found, code = run_and_get_code(torch.compile(twice, dynamic=not fixed), a, b, c)
    wide_a, wide_b, wide_c = a.double(), b.double(), c.double()
    once = ((wide_a @ wide_b.mT).relu() + wide_c).bfloat16().double()
    exact = (once.mT @ wide_b.mT).relu() + wide_c
    assert (found.double() - exact).norm() < 8e-3 * exact.norm()
    if "fx_wrapper" not in options:
        (text,) = code
        assert "kernel_of_buf0(" in text and "torch.ops.coda_agent.kernel.default(" not in text
        assert f"', {fixed})" in text
        assert ("def partition_0(" in text) == options["graph_partition"]
