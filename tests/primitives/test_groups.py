"""Statistics of groups of columns: values, what a program may say, and that kernels carry them."""

from __future__ import annotations

import math

import pytest
import torch

from coda_agent.demos import demos
from coda_agent.primitives import (
    GroupTile32,
    HalfTile,
    RowVector,
    Tile,
    WideTile,
    derivative,
    epilogue,
    exchange,
    group_max,
    group_mean,
    group_min,
    group_sum,
    interleave,
    pairs,
    rotate_half,
)
from coda_agent.primitives.errors import CompileError, ProgramError
from coda_agent.primitives.inspect import inspect_program
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, UNFUSED, TileConfig
from coda_agent.runtime.function import ProgramFunction
from tests.programs import built


@epilogue(S=Tile, X=Tile, N=Tile, M=Tile, first=GroupTile32)
def every(acc):
    return {
        "S": group_sum(acc, 16),
        "X": group_max(acc, 32),
        "N": group_min(acc, 64),
        "M": group_mean(acc, 32),
        "first": acc,
    }


@epilogue(H=HalfTile)
def halves(acc, b: RowVector):
    x, y = pairs(acc + b)
    return {"H": x * group_sum(y, 16)}


@epilogue(O=Tile, H=HalfTile)
def pairs_of_pairs(acc):
    x, y = pairs(exchange(acc, 1))
    return {"O": rotate_half(acc, 2) + exchange(acc, 4), "H": exchange(x + y, 1) * exchange(x, 8)}


EXCHANGED = {p.name: p for d in demos() if d.name == "exchanged_columns" for p in d.programs}


@pytest.mark.parametrize("compute", [torch.float32, torch.float64])
def test_values_by_hand(compute: torch.dtype) -> None:
    generator = torch.Generator().manual_seed(0)
    a = torch.randint(-3, 4, (5, 8), generator=generator).float()
    b = torch.randint(-3, 4, (128, 8), generator=generator).float()
    dtypes = dict.fromkeys(every.outputs, torch.float32)
    got = interpret(every, a, b, {}, dtypes=dtypes, compute=compute)
    rows = (a @ b.T).tolist()
    for m, row in enumerate(rows):
        for n in range(128):
            s, t, u = (row[n - n % w : n - n % w + w] for w in (16, 32, 64))
            expected = {"S": sum(s), "X": max(t), "N": min(u), "M": sum(t) / 32}
            assert {o: got[o][m, n].item() for o in expected} == expected
        assert got["first"][m].tolist() == row[::32]
    bias = torch.arange(128.0)
    half = interpret(halves, a, b, {"b": bias}, dtypes={"H": torch.float32}, compute=compute)["H"]
    for m, row in enumerate(rows):
        x = [v + n for n, v in enumerate(row)]
        for j in range(64):
            odd = x[1::2][j - j % 16 : j - j % 16 + 16]
            assert half[m, j].item() == x[2 * j] * sum(odd)


@pytest.mark.parametrize("distance", [1, 2, 16, 64])
def test_columns_are_exchanged(distance: int) -> None:
    @epilogue(O=Tile)
    def program(acc):
        return {"O": exchange(acc, distance)}

    a, b = torch.randn(5, 8).double(), torch.randn(128, 8).double()
    got = interpret(program, a, b, {}, dtypes={"O": torch.float64}, compute=torch.float64)["O"]
    product = a @ b.T
    for n in range(128):
        assert torch.equal(got[:, n], product[:, n ^ distance])


def test_nan_stays_in_its_group() -> None:
    a, b = torch.eye(4), torch.eye(4).repeat(16, 1)
    a[1, 1] = math.nan
    got = interpret(every, a, b, {}, dtypes=dict.fromkeys(every.outputs, torch.float32))
    assert got["X"].isnan().any(1).tolist() == [False, True, False, False]
    assert got["S"][0].isfinite().all()


def test_facts() -> None:
    assert every.group == 64 and halves.group == 32
    assert Program.from_dict(every.to_dict()).digest == every.digest
    facts = inspect_program(every, (128, 256, 64))
    # Four tiles in bfloat16, and a float32 for each 32 columns.
    assert facts.bytes_written == 4 * 128 * 256 * 2 + 128 * 8 * 4
    assert facts.launches == 1 and facts.tile_local and not facts.split_k_safe

    @epilogue(O=Tile)
    def summed(acc):
        return {"O": group_sum(acc, 16)}

    assert inspect_program(summed, (128, 256, 64)).split_k_safe


def test_columns_that_groups_do_not_fill_are_refused() -> None:
    function = ProgramFunction(every, {}, lambda *_: DEFAULT_CONFIGS["sm_90a"])
    a, b = torch.zeros(4, 16).bfloat16(), torch.zeros(96, 16).bfloat16()
    with pytest.raises(Exception, match="N a multiple of 64"):
        function(a, b, {})


def test_columns_are_exchanged_within_a_tile() -> None:
    with pytest.raises(ProgramError, match=r"exchange\(\): distance is 3, expected one of"):
        epilogue(O=Tile)(lambda acc: {"O": exchange(acc, 3)})
    with pytest.raises(ProgramError, match="128 columns of half width are 256 of the accumulator"):
        epilogue(O=HalfTile)(lambda acc: {"O": exchange(pairs(acc)[0], 64)})


def test_what_no_kernel_has_in_time_is_refused() -> None:
    def tile(acc, C: Tile):
        return {"O": acc * group_sum(acc + C, 16)}

    with pytest.raises(ProgramError, match="needs 'C', a Tile, which is loaded after it"):
        epilogue(O=Tile)(tile)

    def wide(acc, Z: WideTile):
        x, y = pairs(Z)
        return {"O": interleave(x * group_sum(acc, 16), y * acc)}

    with pytest.raises(ProgramError, match="WideTile has no statistics"):
        epilogue(O=WideTile)(wide)

    def slope(acc, C: Tile):
        return {"O": acc * derivative(lambda x: group_sum(x, 16), C)}

    with pytest.raises(ProgramError, match=r"derivative\(\) of group_sum 16"):
        epilogue(O=Tile)(slope)
    for width, message in ((24, "expected one of"), (128, "256 of the accumulator")):

        def half(acc, width=width):
            return {"O": group_sum(pairs(acc)[0], width)}

        with pytest.raises(ProgramError, match=message):
            _traced(half)


def _traced(function) -> Program:
    """The program of a function whose further parameters are bound."""

    def program(acc):
        return function(acc)

    return epilogue(O=HalfTile)(program)


@pytest.mark.parametrize(
    ("program", "arch", "config"),
    [
        (every, "sm_90a", DEFAULT_CONFIGS["sm_90a"]),
        (halves, "sm_90a", TileConfig(128, 96, 2, 1)),
        (every, "sm_90a", UNFUSED[0]),
        (halves, "sm_100a", DEFAULT_CONFIGS["sm_100a"]),
    ],
    ids=["every", "halves", "unfused", "blackwell"],
)
@pytest.mark.one_in(6)
@pytest.mark.usefixtures("fresh_cache")
def test_it_compiles(program: Program, arch: str, config: TileConfig) -> None:
    stored = {"first": "float32"} if program is every else {}
    found = built(program, arch, config, **stored)
    assert 0 < found["registers"] <= 255 and found["local_stores"] == 0


@pytest.mark.parametrize("config", [TileConfig(128, 128), UNFUSED[0]], ids=lambda x: x.label)
@pytest.mark.parametrize("name", ["hadamard", "two_of_four", "pairs_of_pairs"])
@pytest.mark.one_in(4)
@pytest.mark.usefixtures("fresh_cache")
def test_exchanges_stay_in_registers(name: str, config: TileConfig) -> None:
    program = {**EXCHANGED, "pairs_of_pairs": pairs_of_pairs}[name]
    found = built(program, "sm_90a", config, **{o: "float32" for o in program.outputs if o == "s"})
    assert 0 < found["registers"] <= 255 and found["local_stores"] == 0


@pytest.mark.usefixtures("fresh_cache")
def test_where_warps_share_rows_it_is_refused() -> None:
    with pytest.raises(CompileError, match="its warps share rows"):
        built(halves, "sm_120a")
