"""Programs as a torch operator: what a caller may hand it."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils.flop_counter import FlopCounterMode

from coda_agent.primitives import (
    ColMax,
    ColSum,
    HalfTile,
    RowLogSumExp,
    RowMax,
    RowMean,
    RowMin,
    RowSum,
    Tile,
    epilogue,
    pairs,
    relu,
)  # fmt: skip
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.spread import spread
from coda_agent.primitives.tiles import TileConfig
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
    plan: Any = lambda values: [values[0], values[1]]
    calls.keep((a, b), program_operator.UNASKED, plan)
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


@epilogue(
    D=Tile, total=RowSum, mean=RowMean, top=RowMax, low=RowMin, lse=RowLogSumExp,
    column=ColSum, highest=ColMax,
)  # fmt: skip
def reduced(acc):
    return dict.fromkeys(("D", "total", "mean", "top", "low", "lse", "column", "highest"), acc)


def test_partials_that_a_kernel_leaves_fold_to_the_values() -> None:
    """Of ragged blocks: 100 rows by 64, 150 columns by 48."""
    generator = torch.Generator().manual_seed(0)
    a, b = (torch.randn(n, 32, generator=generator).bfloat16() for n in (100, 160))
    stored = {o: "bfloat16" if o == "D" else None for o in reduced.outputs}
    text = program_operator.program_text(reduced, stored, "bfloat16", "")
    assert program_operator.folds_of(text) == {}
    text = program_operator.with_tiles(text, (100, 160, 32), TileConfig(64, 48), partials=True)
    folds = program_operator.folds_of(text)
    call = program_operator.kernel_operator()
    found = dict(zip(reduced.outputs, call(a, b, [], program=text), strict=True))
    with FakeTensorMode() as mode:
        fake = call(mode.from_tensor(a), mode.from_tensor(b), [], program=text)
    assert [(x.shape, x.stride()) for x in fake] == [(x.shape, x.stride()) for x in found.values()]
    y = a.double() @ b.double().T
    exact = {
        "total": y.sum(1), "mean": y.mean(1), "top": y.amax(1), "low": y.amin(1),
        "lse": y.logsumexp(1), "column": y.sum(0), "highest": y.amax(0),
    }  # fmt: skip
    assert found["total"].shape == (100, 4) and found["column"].shape == (160, 2)
    assert {*folds} == {*exact} and folds["mean"] == ("add", 48 / 160)
    for o, truth in exact.items():
        combine, factor = folds[o]
        ways = {
            "add": torch.sum,
            "max": torch.amax,
            "min": torch.amin,
            "logsumexp": torch.logsumexp,
        }
        value = ways[combine](found[o].double(), -1) * factor
        assert (value - truth).abs().max() < 1e-5 * truth.abs().max(), o
