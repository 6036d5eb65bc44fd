"""Programs as a torch operator: what a caller may hand it."""

from __future__ import annotations

import pytest
import torch

from coda_agent.primitives import Tile, epilogue, relu
from coda_agent.runtime import program_operator

pytestmark = pytest.mark.filterwarnings("ignore:coda-agent. no Hopper GPU")


@epilogue(O=Tile)
def clipped(acc):
    return {"O": relu(acc)}


def test_a_kernel_without_operands_takes_an_empty_list_or_none() -> None:
    """AOTInductor gives None for an empty list of tensors."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 32, generator=generator).bfloat16() for n in (24, 48))
    text = program_operator.program_text(clipped, {"O": "bfloat16"}, "bfloat16", "")
    expected = (a.double() @ b.double().T).relu()
    listed = program_operator.kernel_operator()(a, b, [], program=text)
    for (found,) in (listed, program_operator._call(a, b, None, program=text)):
        assert (found.double() - expected).norm() < 4e-3 * expected.norm()
