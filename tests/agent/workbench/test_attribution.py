"""What a kernel's time is made of: the programs that are timed, and the line that is made of it."""

from collections.abc import Mapping
from pathlib import Path

import pytest

from coda_agent.agent.judge.samples import Samples
from coda_agent.agent.judge.timing import interleave
from coda_agent.agent.workbench.attribution import PRODUCT, WHOLE, parts, said
from coda_agent.primitives import (
    ColMax,
    HalfTile,
    RowVector,
    Tile,
    epilogue,
    exp,
    group_max,
    pairs,
    silu,
)
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from tests.agent.judge.test_timing import Gpu


@epilogue(O=HalfTile, D=Tile, top=ColMax)
def whole(acc, bias: RowVector, C: Tile):
    x = (acc + bias) * exp(C)
    gate, up = pairs(x - group_max(acc, 32))
    return {"O": silu(gate) * up, "D": x, "top": x}


@epilogue(O=HalfTile)
def product(acc):
    return {"O": pairs(acc)[0]}


@epilogue(D=Tile, top=ColMax)
def without_o(acc, bias: RowVector, C: Tile):
    x = (acc + bias) * exp(C)
    return {"D": x, "top": x}


@epilogue(O=HalfTile, D=Tile, top=ColMax)
def without_c(acc, bias: RowVector):
    x = (acc + bias) * 1.0
    gate, up = pairs(x - group_max(acc, 32))
    return {"O": silu(gate) * up, "D": x, "top": x}


@epilogue(O=HalfTile, D=Tile, top=ColMax)
def without_group(acc, bias: RowVector, C: Tile):
    x = (acc + bias) * exp(C)
    gate, up = pairs(x - acc)
    return {"O": silu(gate) * up, "D": x, "top": x}


@epilogue(top=ColMax)
def reduced(acc):
    return {"top": acc * 2.0}


def test_parts_are_outputs_operands_and_groups() -> None:
    found = parts(whole)
    assert [*found] == [
        PRODUCT, "output O", "output D", "output top", "operand bias", "operand C", "group_max 32"
    ]  # fmt: skip
    due: Mapping[str, Program] = {
        PRODUCT: product, "output O": without_o, "operand C": without_c,
        "group_max 32": without_group,
    }  # fmt: skip
    assert {part: found[part].digest for part in due} == {p: x.digest for p, x in due.items()}
    assert [*found["output O"].operands] == ["bias", "C"]
    # One output that is a reduction: the product is folded as it would be.
    assert [*parts(reduced)] == [PRODUCT]
    assert "top" in parts(reduced)[PRODUCT].outputs


def timed(**times_us: float) -> dict[str, Samples]:
    gpu = Gpu()
    names = {"whole": WHOLE, "product": PRODUCT}
    runs = {
        names.get(part, part.replace("_", " ")): lambda _, us=us: gpu.run(us)
        for part, us in times_us.items()
    }
    return interleave(runs, 20, trace=False, gpu=gpu)


def test_a_time_is_said_by_what_it_is_made_of() -> None:
    assert said(
        timed(whole=412, product=380, output_D=403, group=394, operand_b=411.9), 371.2
    ).splitlines() == [
        "412 us = product 380 + group 18 + output D 9 + rest 5; floor 371",
        "within the noise: operand b",
        "costs most: group. To try: a narrower group, one statistic for two, or its argument in a cheaper form",
    ]
    shared = said(timed(whole=400, product=380, operand_a=385, operand_b=385), 371.0)
    assert shared.startswith(
        "400 us = product 380 + operand a 15 + operand b 15 - shared 10; floor 371\n"
    )
    alone = said(timed(whole=400, product=380), 371.0)
    assert "product 380 + rest 20" in alone and "costs most: rest. To try: order and form" in alone


def test_what_has_no_times_is_left_out() -> None:
    found = timed(whole=400, product=380, output_D=390)
    found["output D"] = Samples((), fault="the clocks disagree")
    assert said(found, 371.0).startswith("400 us = product 380 + rest 20;")
    found = timed(whole=400, output_D=390)
    assert said(found, 371.0).startswith("400 us = output D 10 + rest 390; floor 371")
    with pytest.raises(MachineError, match="the clocks disagree"):
        said({WHOLE: Samples((), fault="the clocks disagree")}, 371.0)


@pytest.mark.parametrize("name", ["gemm_swiglu", "gemm_residual_partial_rmsnorm"])
def test_parts_of_accepted_kernels_are_programs_again(name: str) -> None:
    text = (Path(__file__).parents[3] / "generated" / name / "kernel.py").read_text()
    found = parts(read_programs(text, [name])[name])
    assert PRODUCT in found and len(found) > 2
    for program in found.values():
        assert Program.from_dict(program.to_dict()).digest == program.digest
