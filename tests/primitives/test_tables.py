"""Tables of part of the rows or columns: which element each of the output reads, in every reading."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from coda_agent.primitives import (
    HalfTile,
    HeadTable,
    PositionHeads,
    PositionPairs,
    PositionTable,
    SampleHeads,
    SampleTable,
    Tile,
    epilogue,
    group_mean,
    pairs,
    rotate_half,
    rsqrt,
)
from coda_agent.primitives.errors import LaunchError, ProgramError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.program import Program
from coda_agent.primitives.resources import OPERAND_KINDS
from coda_agent.primitives.tables import TABLES, Table
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, UNFUSED, TileConfig
from coda_agent.runtime.function import ProgramFunction, untuned
from coda_agent.runtime.target import Tensors, compile_blind
from tests.programs import built

M, N, K = 12, 64, 8


def added(kind: type[Table]) -> Program:
    def program(acc, t):
        return {"O": acc + t}

    program.__annotations__["t"] = kind
    return epilogue(O=Tile)(program)


@epilogue(O=Tile)
def turned(acc, g: PositionTable, c: PositionTable):
    return {"O": rotate_half(acc * g, 32) * c}


@epilogue(O=Tile)
def normed(acc, g: PositionTable, slope: PositionHeads):
    """The RMS norm of each head, with a weight, and a number of each head."""
    return {"O": acc * rsqrt(group_mean(acc * acc, 64) + 1e-6) * g + slope}


WHERE: dict[str, tuple[tuple[int, int], Callable[[int, int], tuple[int, int]]]] = {
    "PositionTable": ((4, 16), lambda m, n: (m % 4, n % 16)),
    "SampleTable": ((3, 64), lambda m, n: (m // 4, n)),
    "PositionPairs": ((12, 32), lambda m, n: (m, n // 2)),
    "PositionHeads": ((1, 4), lambda m, n: (0, n // 16)),
    "SampleHeads": ((6, 2), lambda m, n: (m // 2, n // 32)),
}


@pytest.mark.parametrize("kind", TABLES, ids=lambda kind: kind.__name__)
def test_an_element_reads_the_table_by_its_place(kind: type[Table]) -> None:
    shape, where = WHERE[kind.__name__]
    generator = torch.Generator().manual_seed(1)
    a, b = (torch.randn(x, K, generator=generator).double() for x in (M, N))
    table = torch.randn(shape, generator=generator)
    got = interpret(
        added(kind), a, b, {"t": table}, dtypes={"O": torch.float64}, compute=torch.float64
    )["O"]
    product = a @ b.T
    for m in range(M):
        for n in range(N):
            assert got[m, n] == product[m, n] + table[where(m, n)].double()


@pytest.mark.parametrize("width", [16, 64])
def test_halves_are_rotated(width: int) -> None:
    @epilogue(O=Tile)
    def program(acc):
        return {"O": rotate_half(acc, width)}

    a, b = torch.randn(M, K).double(), torch.randn(N, K).double()
    got = interpret(program, a, b, {}, dtypes={"O": torch.float64}, compute=torch.float64)["O"]
    product, half = a @ b.T, width // 2
    for n in range(N):
        other = n + half if n % width < half else n - half
        sign = -1 if n % width < half else 1
        assert torch.equal(got[:, n], sign * product[:, other])


def test_halves_are_of_full_width_and_of_a_width_that_is_known() -> None:
    with pytest.raises(ProgramError, match=r"rotate_half\(\): width is 48, expected one of"):
        epilogue(O=Tile)(lambda acc: {"O": rotate_half(acc, 48)})
    with pytest.raises(ProgramError, match=r"rotate_half\(\) takes a value \(M, N\)"):
        epilogue(O=HalfTile)(lambda acc: {"O": rotate_half(pairs(acc)[0], 16)})


@pytest.mark.one_in(3)
@pytest.mark.usefixtures("fresh_cache")
@pytest.mark.parametrize(
    ("program", "arch", "config"),
    [
        (normed, "sm_90a", TileConfig(128, 192, 2, 1)),
        (normed, "sm_90a", UNFUSED[0]),
        (turned, "sm_90a", TileConfig(64, 64)),
        (turned, "sm_90a", UNFUSED[0]),
        (normed, "sm_100a", DEFAULT_CONFIGS["sm_100a"]),
        (added(SampleHeads), "sm_120a", DEFAULT_CONFIGS["sm_120a"]),
        (added(PositionPairs), "sm_90a", DEFAULT_CONFIGS["sm_90a"]),
        (added(SampleTable), "sm_90a", DEFAULT_CONFIGS["sm_90a"]),
    ],
    ids=lambda x: x.name if isinstance(x, Program) else getattr(x, "label", x),
)
def test_it_compiles(program: Program, arch: str, config: TileConfig) -> None:
    assert built(program, arch, config)["registers"] > 0


@epilogue(O=Tile)
def modulated(acc, scale: SampleTable, shift: SampleTable, gate: SampleTable, keep: SampleTable):
    return {"O": (acc * scale + shift) * gate + keep}


@epilogue(O=Tile)
def normed_and_turned(acc, g: PositionTable, c: PositionTable, s: PositionTable):
    x = acc * rsqrt(group_mean(acc * acc, 128) + 1e-6) * g
    return {"O": x * c + rotate_half(x, 128) * s}


@pytest.mark.parametrize(
    ("program", "columns", "most"),
    [(modulated, 1024, 0), (modulated, 1, 0), (normed_and_turned, 128, 140)],
    ids=lambda x: getattr(x, "name", x),
)
@pytest.mark.one_in(3)
def test_what_tables_give_stays_in_registers(program: Program, columns: int, most: int) -> None:
    """They were 333 and 769 stores to local memory."""
    tables = {o: (4, columns) for o in program.operands}
    types = dict.fromkeys(tables, "bfloat16")
    config = DEFAULT_CONFIGS["sm_90a"]
    tensors = Tensors("bfloat16", types, {"O": "bfloat16"}, tables=tables)
    assert "local_stores" not in compile_blind(program, config, "sm_90a", tensors, read=False)
    found = compile_blind(program, config, "sm_90a", tensors)
    assert found["local_stores"] <= most


@pytest.mark.parametrize(
    ("kind", "columns", "strides", "address", "form"),
    [
        (SampleTable, 96, (96, 1), 256, 32),
        (PositionPairs, 32, (0, 1), 256, 32),
        (SampleTable, 96, (97, 1), 256, 0),
        (SampleTable, 96, (96, 1), 8, 0),
        (SampleTable, 96, (1, 4), 256, 0),
        (SampleTable, 80, (80, 1), 256, 0),
        (SampleHeads, 32, (32, 1), 256, 0),
        (SampleHeads, 1, (3, 7), 2, 1),
    ],
)
def test_whole_subtiles_are_loaded_in_twos(
    kind: type[Table], columns: int, strides: tuple[int, int], address: int, form: int
) -> None:
    assert kind.form(columns, strides, address) == form


@pytest.mark.parametrize(
    ("kind", "shape", "message"),
    [
        (SampleTable, (5, 64), r"has shape \(5, 64\), expected \(R, C\) with R a divisor of 12"),
        (PositionTable, (12, 48), "C of 64"),
        (PositionPairs, (12, 64), "C of 64 / 2"),
        (PositionHeads, (4,), r"has shape \(4,\)"),
    ],
)
def test_a_table_that_does_not_fit(kind: type[Table], shape: tuple[int, ...], message: str) -> None:
    call = ProgramFunction(added(kind), {}, untuned)
    a, b = torch.randn(M, K).bfloat16(), torch.randn(N, K).bfloat16()
    with pytest.raises(LaunchError, match=message):
        call(a, b, {"t": torch.randn(shape)})


def test_kinds_are_known_by_name() -> None:
    assert {kind.__name__ for kind in TABLES} <= OPERAND_KINDS.keys()
    assert not issubclass(HeadTable, Table)  # TMA loads it
    paired = epilogue(O=Tile)(_paired)
    assert Program.from_dict(paired.to_dict()).operands["c"] is PositionPairs


def _paired(acc, c: PositionPairs):
    return {"O": acc * c}
