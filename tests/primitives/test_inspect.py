"""Inspection: degree in the accumulator, split-K, and costs counted by hand."""

from collections.abc import Callable
from typing import Any

import pytest

from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColMax,
    ColSum,
    ColVector,
    HalfTile,
    HeadTable,
    RowGather,
    RowLogSumExp,
    RowMax,
    RowMean,
    RowSum,
    RowVector,
    Scalar,
    Tile,
    WideTile,
    absolute,
    epilogue,
    exp,
    gather,
    interleave,
    maximum,
    pairs,
    rsqrt,
    sigmoid,
    silu,
)
from coda_agent.primitives.inspect import (
    Ceiling,
    Degree,
    datasheet,
    degrees,
    describe,
    inspect_program,
    launches,
    roofline,
)
from coda_agent.primitives.tiles import TileConfig
from tests.programs import program


def identity(acc):
    return {"O": acc}


def rotated(acc, t: RowVector):
    x, y = pairs(acc)
    cos, sin = pairs(t)
    return {"O": interleave(x * cos - y * sin, x * sin + y * cos)}


DEGREES: list[tuple[Callable[..., Any], Degree]] = [
    (identity, Degree.LINEAR),
    (lambda acc, r, b, alpha: {"O": -(alpha * acc) * r * b}, Degree.LINEAR),
    (lambda acc, r: {"O": acc * rsqrt(r + 1e-6)}, Degree.LINEAR),
    (lambda acc, r: {"O": acc / r}, Degree.LINEAR),
    (lambda acc: {"O": acc + acc * 2.0}, Degree.LINEAR),
    (rotated, Degree.LINEAR),
    (lambda acc, b: {"O": acc + b}, Degree.AFFINE),
    (lambda acc, alpha: {"O": interleave(pairs(acc)[0], alpha)}, Degree.AFFINE),
    (lambda acc: {"O": acc * acc}, Degree.NONLINEAR),
    (lambda acc, r: {"O": r / acc}, Degree.NONLINEAR),
    (lambda acc: {"O": silu(acc)}, Degree.NONLINEAR),
    (lambda acc: {"O": maximum(acc, 0.0)}, Degree.NONLINEAR),
    (lambda acc: {"O": interleave(pairs(acc)[0] * pairs(acc)[1], 0.0)}, Degree.NONLINEAR),
]


@pytest.mark.parametrize(("function", "degree"), DEGREES)
def test_degree_and_split_k(function: Callable[..., Any], degree: Degree) -> None:
    made = program(function, O=Tile)
    assert degrees(made.graph)[made.graph.outputs["O"]] is degree
    found = inspect_program(made, (128, 256, 64))
    assert found.split_k_safe == (degree is Degree.LINEAR)


@pytest.mark.parametrize("second", [lambda acc, C: acc + C, lambda acc, C: C])
def test_every_output_decides_split_k(second: Callable[..., Any]) -> None:
    """One that ignores the accumulator would be added once for each part of K."""
    both = program(lambda acc, C: {"D": acc, "O": second(acc, C)}, D=Tile, O=Tile)
    assert not inspect_program(both, (128, 256, 64)).split_k_safe


@pytest.mark.parametrize(
    ("kind", "safe"),
    [
        (RowSum, True),
        (RowMean, True),
        (RowMax, False),
        (RowLogSumExp, False),
        (ColSum, True),
        (ColMax, False),
    ],
)
def test_linear_reductions(kind: Any, safe: bool) -> None:
    linear = program(lambda acc, r: {"D": acc, "s": acc * r}, D=Tile, s=kind)
    assert inspect_program(linear, (128, 256, 64)).split_k_safe is safe
    squares = program(lambda acc: {"D": acc, "s": acc * acc}, D=Tile, s=kind)
    assert not inspect_program(squares, (128, 256, 64)).split_k_safe


@epilogue(D=Tile, O=HalfTile, s=RowMean, t=RowMax)
def counted(acc, C: Tile, r: ColVector, b: RowVector, alpha: Scalar):
    d = alpha * acc + C
    gate, up = pairs(d * (r * 2.0) + b)
    return {"D": d, "O": sigmoid(gate) * up, "s": d * d, "t": absolute(up)}


def test_costs_by_hand() -> None:
    m, n, k = 96, 320, 64
    tile, half, blocks = m * n, m * n // 2, 3
    found = inspect_program(counted, (m, n, k))
    assert found.gemm_flops == 2 * m * n * k
    # alpha·acc, + C, · (r·2), + b and d·d at full width; r·2 a row; σ (4), · and |up| at half width;
    # the sum and the maximum one operation an element each.
    assert found.epilogue_flops == 5 * tile + m + (4 + 1 + 1) * half + tile + half
    read = 2 * (m * k + n * k) + 2 * tile + 4 * m + 4 * n
    written = 2 * tile + 2 * half + 2 * (4 * m * blocks)
    assert (found.bytes_moved, found.bytes_written) == (read + written, written)
    assert found.launches == 2
    assert not found.tile_local
    assert not found.split_k_safe


def test_cost_options() -> None:
    found = inspect_program(counted, (96, 320, 64), element_bytes=8, gemm_bytes=1, block=192)
    tile, half = 96 * 320, 96 * 160
    read = (96 * 64 + 320 * 64) + 8 * tile + 4 * (96 + 320)
    assert found.bytes_moved == read + 8 * tile + 8 * half + 2 * (4 * 96 * 2)


def wide_product(acc, Z: WideTile):
    gate, up = pairs(Z)
    return {"dZ": interleave(acc * up, acc * gate), "s": gate * up}


def test_a_wide_tile_has_twice_the_elements() -> None:
    m, n, k = 96, 320, 64
    program = epilogue(dZ=WideTile, s=RowSum)(wide_product)
    found = inspect_program(program, (m, n, k))
    assert found.epilogue_flops == 3 * m * n + m * n
    assert found.bytes_moved == 2 * (m * k + n * k) + 2 * (2 * m * n) * 2 + 4 * m * 3
    degree = degrees(program.graph)
    assert degree[program.graph.outputs["dZ"]] is Degree.LINEAR
    assert degree[program.graph.outputs["s"]] is Degree.CONSTANT


def test_what_is_added_to_is_read_and_written() -> None:
    @epilogue(X=AddTile, O=Tile)
    def program(acc, C: Tile):
        return {"X": acc * C, "O": acc}

    m, n, k = 96, 320, 64
    found = inspect_program(program, (m, n, k))
    assert found.bytes_moved == 2 * (m * k + n * k) + 2 * m * n * (1 + 2 + 1)
    assert found.bytes_written == 2 * m * n * 2
    assert found.split_k_safe and found.tile_local and found.launches == 1


def test_a_table_is_computed_with_but_hardly_read() -> None:
    @epilogue(O=Tile)
    def program(acc, cs: HeadTable, C: Tile):
        return {"O": acc * cs + C}

    m, n, k = 96, 320, 64
    found = inspect_program(program, (m, n, k), gemm_bytes=1)
    assert found.epilogue_flops == 2 * m * n
    assert found.bytes_moved == (m * k + n * k) + 2 * m * n * 2


def test_plain_gemm_costs_nothing_after_it() -> None:
    found = inspect_program(epilogue(O=Tile)(identity), (128, 256, 64))
    assert found.epilogue_flops == 0
    assert found.launches == 1
    assert found.tile_local and found.split_k_safe


@epilogue(Z=Tile, lse=RowLogSumExp, target=RowGather, g=ColSum, top=ColMax)
def selecting(acc, C: Tile, y: ColIndex):
    z = acc * C
    return {"Z": acc, "lse": acc, "target": gather(acc, y), "g": z, "top": absolute(z)}


def test_costs_of_a_gather_and_of_column_reductions_by_hand() -> None:
    m, n, k = 300, 272, 64
    tile, across, down = m * n, 3, 3  # ⌈272 / 128⌉ and ⌈300 / 128⌉
    found = inspect_program(selecting, (m, n, k))
    # acc·C and |z|, then an operation an element for each of the three reductions; selecting
    # computes nothing.
    assert found.epilogue_flops == 2 * tile + 3 * tile
    read = 2 * (m * k + n * k) + 2 * tile + 8 * m
    written = 2 * tile + 4 * m * across + 4 * m + 2 * (4 * n * down)
    assert found.bytes_moved == read + written
    assert found.launches == 2
    assert not found.tile_local
    assert not found.split_k_safe


def test_blocks_of_reductions_over_rows_divide_m() -> None:
    @epilogue(D=Tile, g=ColSum)
    def program(acc):
        return {"D": acc, "g": acc}

    m, n, k = 1000, 64, 32
    found = inspect_program(program, (m, n, k), block=256)
    assert found.bytes_moved == 2 * (m * k + n * k) + 2 * m * n + 4 * n * 4
    assert found.launches == 2


@pytest.mark.parametrize(("bias", "safe"), [(False, True), (True, False)])
def test_a_gather_is_as_linear_as_what_it_takes(bias: bool, safe: bool) -> None:
    @epilogue(Z=Tile, t=RowGather)
    def program(acc, y: ColIndex):
        return {"Z": acc, "t": gather(acc + 1.0 if bias else acc * 2.0, y)}

    found = inspect_program(program, (128, 256, 64))
    assert found.split_k_safe is safe
    assert found.tile_local  # one element of one tile: nothing to fold
    assert found.launches == 1


def test_launches_of_a_call() -> None:
    assert [launches(selecting), launches(selecting, raw=True)] == [2, 1]
    assert launches(epilogue(O=Tile)(identity)) == 1


def test_a_short_inner_dimension_is_not_split() -> None:
    split = TileConfig(128, 128, split_k=4)
    assert [split.parts(1023), split.parts(1024), TileConfig(128, 128).parts(1024)] == [1, 4, 1]


def test_the_roofline_is_the_larger_of_two_times() -> None:
    program = epilogue(O=Tile)(identity)
    square = inspect_program(program, (8192, 8192, 8192))
    least = roofline(square, Ceiling(800e12, 4e12))
    assert least.compute_us == pytest.approx(2 * 8192**3 / 800e6)
    assert least.memory_us == pytest.approx(3 * 2 * 8192**2 / 4e6)
    assert least.floor_us == least.compute_us
    narrow = roofline(inspect_program(program, (16, 8192, 8192)), Ceiling(800e12, 4e12))
    assert narrow.floor_us == narrow.memory_us > narrow.compute_us


def test_what_stays_in_the_cache_need_not_reach_memory() -> None:
    facts = inspect_program(epilogue(O=Tile)(identity), (4096, 4096, 512))
    read, written = 2 * 2 * 4096 * 512, 2 * 4096**2
    for cache, moved in ((0, read + written), (10**6, read + written - 10**6), (10**9, read)):
        assert roofline(facts, Ceiling(1e18, 1e12, cache)).memory_us == pytest.approx(moved / 1e6)


def test_narrow_operands_multiply_twice_as_fast() -> None:
    assert datasheet(2) == Ceiling(990e12, 4.8e12)
    assert datasheet(1) == Ceiling(1980e12, 4.8e12)


def test_describe() -> None:
    @epilogue(O=Tile, s=RowSum)
    def program(acc, r: ColVector):
        return {"O": exp(acc * r), "s": acc * 0.5}

    assert describe(program.graph).splitlines() == [
        "%0 = operand(r)  # (M, 1)",
        "%1 = acc()  # (M, N)",
        "%2 = mul(%1, %0)  # (M, N)",
        "%3 = exp(%2)  # (M, N)",
        "%4 = const(0.5)  # ()",
        "%5 = mul(%1, %4)  # (M, N)",
        "O <- %3",
        "s <- %5",
    ]
