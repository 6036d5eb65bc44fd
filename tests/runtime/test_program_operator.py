"""Programs as a torch operator: what a caller may hand it."""

from __future__ import annotations

import pytest
import torch
from torch.utils.flop_counter import FlopCounterMode

from coda_agent.primitives import HalfTile, Tile, epilogue, pairs, relu
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.spread import spread
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


@epilogue(O=HalfTile)
def gated(acc):
    gate, up = pairs(acc)
    return {"O": gate * up}


def test_rows_that_are_not_those_of_b_are_refused() -> None:
    a, b = torch.ones(24, 32).bfloat16(), torch.ones(32, 32).bfloat16()
    text = program_operator.program_text(spread(gated), {"O": "bfloat16"}, "bfloat16", "")
    for odd in (b.half(), b[:, :16], b[:16]):
        with pytest.raises(LaunchError, match="operand 'odd_rows'"):
            program_operator.kernel_operator()(a, b, [odd], program=text)


def test_operations_are_counted_of_all_rows_of_b() -> None:
    a, b = torch.ones(24, 32).bfloat16(), torch.ones(64, 32).bfloat16()
    operator = program_operator.kernel_operator()
    for program, even, operands in ((gated, b, []), (spread(gated), b[:32], [b[32:]])):
        text = program_operator.program_text(program, {"O": "bfloat16"}, "bfloat16", "")
        with FlopCounterMode(display=False) as counted:
            operator(a, even, operands, program=text)
        assert counted.get_total_flops() == 2 * 24 * 64 * 32


@pytest.mark.parametrize("fixed", [True, False])
def test_a_place_in_code_looks_for_its_launch_once(fixed: bool) -> None:
    """Where sizes may change, and of tensors at odd addresses, it is looked for each time."""
    text = program_operator.program_text(clipped, {"O": "bfloat16"}, "bfloat16", "")
    site = program_operator.CallSite(text, fixed)
    room = torch.ones(24 * 32 + 1).bfloat16()
    a, odd, b = room[:-1].view(24, 32), room[1:].view(24, 32), torch.ones(48, 32).bfloat16()
    assert program_operator.aligned([a, b]) and not program_operator.aligned([odd, b])
    assert site(a, b, [])[0].tolist() == torch.full((24, 48), 32.0).tolist()  # interpreted
    calls = program_operator.function_of(text).calls
    calls.keep((a, b), program_operator.UNASKED, lambda values: [values[0], values[1]])
    assert site(a, b, []) == [a, b]
    program_operator.function_of(text).calls._checks.clear()
    program_operator.function_of(text).calls._known.clear()
    assert (site(a, b, [])[0] is a) == fixed
    assert site(odd, b, [])[0].tolist() == torch.full((24, 48), 32.0).tolist()


def test_a_profiler_sees_a_place_in_code_as_the_operator() -> None:
    text = program_operator.program_text(clipped, {"O": "bfloat16"}, "bfloat16", "")
    site = program_operator.CallSite(text, True)
    a, b = torch.ones(24, 32).bfloat16(), torch.ones(48, 32).bfloat16()
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as seen:
        (found,) = site(a, b, [])
    assert found.tolist() == torch.full((24, 48), 32.0).tolist()
    assert [e.count for e in seen.key_averages() if e.key == "coda_agent::kernel"] == [1]
