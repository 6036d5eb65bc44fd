"""How groups are read in registers, with the threads that hold a row's columns as elements of an
array: what the lowering asks of them, beside the interpreter."""

from __future__ import annotations

import operator
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coda_agent.primitives import (
    HalfTile,
    Program,
    Tile,
    epilogue,
    exchange,
    group_sum,
    pairs,
    rotate_half,
)
from coda_agent.primitives import group_fold as fold
from coda_agent.primitives.groups import spans
from coda_agent.primitives.interpret import interpret
from coda_agent.runtime import elementwise
from tests.primitives.test_groups import EXCHANGED, pairs_of_pairs

N, SUBTILE, COLUMNS = 128, 32, elementwise.COLUMNS


@epilogue(O=Tile)
def every(acc):
    x = rotate_half(acc, 2) + exchange(acc, 1) * rotate_half(acc, 4)
    y = exchange(x, 2) * rotate_half(acc, 8) - exchange(x, 4) * rotate_half(acc, 16)
    z = exchange(y, 8) - rotate_half(y, 128)
    return {"O": z + exchange(acc, 64) * group_sum(acc, 4) - group_sum(x, 8)}


@epilogue(H=HalfTile)
def halves(acc):
    x, y = pairs(acc)
    z = exchange(x, 1) - exchange(y, 2) * exchange(x + y, 4)
    return {"H": z * exchange(y, 32) + group_sum(x, 4)}


PROGRAMS = [every, halves, pairs_of_pairs, EXCHANGED["hadamard"]]


def apply(op: str, *values: Any) -> Any:
    if any(isinstance(v, tuple) for v in values):
        sides = ([v[k] if isinstance(v, tuple) else v for v in values] for k in (0, 1))
        first, second = sides
        if op in ("even", "odd"):
            return values[0][op == "odd"]
        return fold.Pair(apply(op, *first), apply(op, *second))
    known = {"add": operator.add, "sub": operator.sub, "mul": operator.mul, "neg": operator.neg}
    return known[op](*values)


@pytest.fixture
def threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def shuffle(value: Any, *, offset: int) -> Any:
        return value[torch.arange(len(value)) ^ offset]

    def reduce(value: Any, fold: Any, *, threads_in_group: int) -> Any:
        step = 1
        while step < threads_in_group:
            value, step = fold(value, shuffle(value, offset=step)), 2 * step
        return value

    arch = SimpleNamespace(
        shuffle_sync_bfly=shuffle, warp_reduction=reduce, lane_idx=lambda: torch.arange(4)
    )
    monkeypatch.setattr(fold, "_arch", arch)
    monkeypatch.setattr(fold, "Float32", lambda x: x)
    monkeypatch.setattr(fold, "select_", torch.where)
    monkeypatch.setattr(elementwise, "apply", apply)


def expected(program: Program, row: torch.Tensor) -> dict[str, torch.Tensor]:
    a, b = row[None], torch.eye(N, dtype=torch.float64)
    found = interpret(
        program, a, b, {}, dtypes=dict.fromkeys(program.outputs, torch.float64), compute=a.dtype
    )
    return {o: x[0] for o, x in found.items()}


@pytest.mark.parametrize("lanes", [4, 1], ids=["wgmma", "a row a thread"])
@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
@pytest.mark.usefixtures("threads")
def test_a_tile_is_as_the_interpreter_has_it(program: Program, lanes: int) -> None:
    """A subtile has 32 columns; of wgmma a thread has two of each eight."""
    row = torch.randn(N, dtype=torch.float64)
    own = [8 * i + j for i in range(SUBTILE // 8) for j in (0, 1)] if lanes == 4 else range(SUBTILE)
    places = SimpleNamespace(
        lanes=lanes, of=lambda coord, i: ((coord[0], 0), coord[1] * SUBTILE + own[i])
    )
    paired = 2 if program.paired else 1
    values = fold._Values(program, apply, None, places)  # pyright: ignore[reportArgumentType]

    def held(coord: tuple[int, int], i: int) -> torch.Tensor:
        return row[SUBTILE * coord[1] + own[i] + 2 * torch.arange(lanes)]

    coords = [(0, j) for j in range(N // SUBTILE)]
    for coord in coords:
        values.subtiles[coord] = {
            i: held(coord, i) if paired == 1 else fold.Pair(held(coord, i), held(coord, i + 1))
            for i in range(0, len(own), paired)
        }
    values.fold()
    wanted = expected(program, row)
    found = {o: torch.empty_like(x) for o, x in wanted.items()}
    for coord in coords:
        loaded: dict[Any, Any] = {}
        for i in range(0, len(own), paired):
            known = {node: values.of(node, coord, i, loaded) for node in spans(program.graph)}
            nodes = program.graph.replay(values.subtiles[coord][i], {}, apply, known)
            at = SUBTILE * coord[1] + own[i] + 2 * torch.arange(lanes)
            for o, node in program.graph.outputs.items():
                if program.outputs[o] is HalfTile:
                    found[o][at // 2] = nodes[node]
                elif isinstance(nodes[node], tuple):
                    found[o][at], found[o][at + 1] = nodes[node]
                else:
                    found[o][at] = nodes[node]
    for o, x in wanted.items():
        torch.testing.assert_close(found[o], x)


@pytest.mark.parametrize("program", PROGRAMS, ids=lambda p: p.name)
@pytest.mark.usefixtures("threads")
def test_a_row_of_threads_is_as_the_interpreter_has_it(program: Program) -> None:
    """A product by cuBLAS is read by a kernel whose threads have eight columns each."""
    row = torch.randn(N, dtype=torch.float64)
    count = COLUMNS // (2 if program.paired else 1)
    each = row.reshape(-1, COLUMNS)
    elements = [
        (each[:, e] if count == COLUMNS else fold.Pair(each[:, 2 * e], each[:, 2 * e + 1]), {})
        for e in range(count)
    ]
    place = SimpleNamespace(vector=torch.arange(N // COLUMNS))
    kernel: Any = SimpleNamespace(program=program)
    kernel._moved = partial(elementwise.Elementwise._moved, kernel)
    statistic = partial(elementwise.Elementwise._statistic, kernel, place)
    nodes = fold.replayed(program.graph, elements, apply, statistic, {})  # pyright: ignore[reportArgumentType]
    for o, x in expected(program, row).items():
        lanes = [
            lane
            for v in nodes[program.graph.outputs[o]]
            for lane in (v if isinstance(v, tuple) else (v,))
        ]
        torch.testing.assert_close(torch.stack(lanes, 1).flatten(), x)
