"""Bound launches: what reaches the compiled function is what quack itself would pass to it."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import partial
from typing import Any
from unittest.mock import Mock

import pytest
import torch
from torch import distributed

from coda_agent.agent.judge.records import Inputs
from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColVector,
    HalfTile,
    Program,
    RowGather,
    RowMean,
    RowVector,
    Scalar,
    Tile,
    WideTile,
    epilogue,
    gather,
    interleave,
    memory,
    pairs,
)
from coda_agent.primitives.lower import forget
from coda_agent.primitives.spread import spread
from coda_agent.primitives.tiles import UNFUSED, TileConfig
from coda_agent.runtime import launch as module
from coda_agent.runtime.launch import Arguments, allocate, launch, launcher
from coda_agent.runtime.target import target
from coda_agent.runtime.tile_choice import scheduled

M, N, K = 40, 272, 1024
PLAIN = TileConfig(128, 128, 2, 1, True)
SPLIT = TileConfig(128, 128, 1, 2, True, split_k=2)
DYNAMIC = TileConfig(128, 128, 2, 1, True, dynamic=True)
TRANSPOSED = TileConfig(128, 32, 1, 1, True, swap_ab=True)


@epilogue(O=HalfTile)
def gated(acc):
    gate, up = pairs(acc)
    return {"O": gate * up}


@epilogue(t=RowGather, D=Tile, O=Tile, s=RowMean)
def many(acc, alpha: Scalar, r: ColVector, beta: Scalar, C: Tile, b: RowVector, y: ColIndex):
    d = alpha * acc * r + beta * C
    return {"t": gather(d, y), "D": d, "O": d + b, "s": d * d}


@epilogue(X=AddTile)
def added(acc, r: ColVector):
    return {"X": acc * r}


@epilogue(dZ=WideTile)
def wide(acc, Z: WideTile):
    gate, up = pairs(Z)
    return {"dZ": interleave(acc * up, acc * gate)}


@epilogue(O=Tile)
def scaled(acc, alpha: Scalar, r: ColVector, b: RowVector):
    return {"O": alpha * acc * r + b}


Call = tuple[Any, ...]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Call]]:
    """Arguments of the calls of every kernel; none is compiled."""
    from quack.epilogue.ops import Scalar as Load
    from quack.gemm_runtime import host

    made: list[Call] = []

    def recorder(*_: object, **__: object) -> Callable[..., None]:
        return lambda *arguments: made.append(arguments)

    compiled: Any = Mock(side_effect=recorder)
    monkeypatch.setattr(host, "_compile_gemm_epi", compiled)
    monkeypatch.setattr(Load, "_validate_pointer_value", lambda *_: None)  # it asks for a GPU's
    monkeypatch.setattr(torch._C, "_cuda_getCurrentRawStream", lambda _: 7, raising=False)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: False)
    monkeypatch.setattr(memory, "_FLAGS", {})
    with target("sm_90a"):
        forget()
        yield made
    forget()


def given(
    program: Program, config: TileConfig, seed: int = 0
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any], dict[str, torch.Tensor]]:
    """A, B, operands and outputs."""
    g = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    operands: dict[str, Any] = {
        o: tensor(*kind.extents(M, N)) if kind.dims else 2.0 for o, kind in program.operands.items()
    }
    if "beta" in operands:
        operands["beta"] = torch.tensor(0.5)
    if "y" in operands:
        operands["y"] = torch.arange(M)
    dtypes = dict.fromkeys(program.outputs, torch.bfloat16)
    return tensor(M, K), tensor(N, K), operands, allocate(program, M, N, dtypes, config, "cpu")


def listed(
    program: Program, a: object, b: object, operands: Inputs, outputs: Mapping[str, torch.Tensor]
) -> tuple[list[object], list[torch.Tensor]]:
    """Inputs and outputs as a bound launch takes them."""
    inputs = [a, b, *(operands[o] for o in program.operands)]
    return inputs, [outputs[o] for o in program.outputs]


def flat(x: object, known: set[int]) -> list[Any]:
    """What a call passes, in order; tensors as their layout, with the address if it is known."""
    if isinstance(x, tuple):
        return [z for y in x for z in flat(y, known)]
    if isinstance(x, torch.Tensor):
        return [({x.data_ptr()} & known, x.shape, x.stride(), x.dtype)]
    return [getattr(x, "value", x)]


@pytest.mark.parametrize(
    ("program", "config"),
    [
        (many, PLAIN),
        (many, SPLIT),
        (many, DYNAMIC),
        (added, PLAIN),
        (wide, PLAIN),
        (scaled, TRANSPOSED),
    ],
    ids=lambda x: x.name if isinstance(x, Program) else x.label,
)
def test_a_bound_launch_passes_what_quack_passes(
    calls: list[Call], program: Program, config: TileConfig
) -> None:
    from quack.gemm_runtime.host import run_gemm_epi_plan

    bound = launch(Arguments(program, *given(program, config, seed=1), config), run=False)
    assert not calls
    a, b, operands, outputs = given(program, config, seed=2)
    bound(*listed(program, a, b, operands, outputs))
    values = module._by_kernel_name(program, operands, outputs)
    plan = module._plan(Arguments(program, a, b, operands, outputs, config))
    d, c = values.pop("D", None), values.pop("c", None)
    slots = (b.mT, a) if config.swap_ab else (a, b)
    counter = memory.tile_counter(a.device) if config.dynamic else None
    run_gemm_epi_plan(plan, *slots, d, c, values, tile_count_semaphore=counter)
    tensors = [a, b, *operands.values(), *outputs.values()]
    known = {t.data_ptr() for t in tensors if isinstance(t, torch.Tensor)}
    ours, theirs = (flat(call, known) for call in calls)
    assert ours == theirs
    passed = {address for x in ours if isinstance(x, tuple) for address in x[0]}
    numbers = {operands["beta"].data_ptr()} if "beta" in operands else set()
    assert passed == known - numbers and numbers <= set(x for x in ours if isinstance(x, int))


def test_tiles_are_counted_where_that_pays(monkeypatch: pytest.MonkeyPatch) -> None:
    wide, turned = TileConfig(128, 256, 2, 1), TileConfig(128, 64, swap_ab=True)
    counted = replace(wide, dynamic=True)
    assert wide.scheduled(2048, 2048, alone=False) == wide
    assert wide.scheduled(4096, 4096, alone=False) == counted
    assert counted.scheduled(4096, 4096, alone=True) == wide
    assert wide.scheduled(16384, 16384, alone=True) == counted
    assert counted.scheduled(2048, 2048, alone=False) == wide
    assert turned.scheduled(16, 8192, alone=False).dynamic is False
    assert turned.scheduled(256, 8192, alone=False).dynamic
    for other in replace(wide, split_k=2), replace(wide, persistent=False), UNFUSED[0]:
        assert not other.scheduled(1 << 16, 1 << 16, alone=True).dynamic
    assert counted.label == "128x256 coop 2x1 dynamic"
    # Processes that train together communicate; a world of one does not.
    for world, expected in ((1, wide), (2, counted)):
        monkeypatch.setattr(distributed, "is_initialized", lambda: True)
        monkeypatch.setattr(distributed, "get_world_size", lambda n=world: n)
        assert scheduled(wide, 4096, 4096) == expected


def test_a_launcher_that_was_set_sees_bound_launches(
    calls: list[Call], request: pytest.FixtureRequest
) -> None:
    seen: list[tuple[str, bool]] = []
    real = launcher.get()

    def telling(given: Arguments, *, run: bool = True) -> object:
        seen.append((given.program.name, run))
        return real(given, run=run)

    bound = launch(Arguments(added, *given(added, PLAIN), PLAIN), run=False)
    request.addfinalizer(partial(launcher.reset, launcher.set(telling)))
    bound(*listed(added, *given(added, PLAIN)))
    again = launch(Arguments(added, *given(added, PLAIN), PLAIN), run=False)
    assert seen == [("added", True), ("added", False)] and len(calls) == 1
    again(*listed(added, *given(added, PLAIN)))
    launch(Arguments(added, *given(added, PLAIN), PLAIN))
    assert len(seen) == 4 and len(calls) == 3


@pytest.mark.parametrize("case", ["rising", "falling", "captured", "one", "far"])
def test_rows_apart_are_launched_from_the_lower_address(
    monkeypatch: pytest.MonkeyPatch, case: str
) -> None:
    launched: list[tuple[Program, list[Any]]] = []

    def fused(given: Arguments) -> Callable[..., None]:
        return lambda inputs, _: launched.append((given.program, [*inputs]))

    monkeypatch.setattr(module, "_fused", fused)
    low, high = torch.arange(2.0).expand(8, 2).clone().chunk(2)
    if case == "far":
        monkeypatch.setattr(module, "_FARTHEST", 16)
    monkeypatch.setattr(module, "_captured", lambda: case == "captured")
    turned, one = (high, low), (low, low)
    even, odd = {"falling": turned, "captured": turned, "one": one}.get(case, (low, high))
    a, program = torch.empty(3, 2), spread(gated)
    given = Arguments(program, a, even, {"odd_rows": odd}, {}, PLAIN)
    launch(given, run=False)([a, even, odd], [torch.empty(0)])
    ((ran, (_, first, second)),) = launched
    assert (ran.digest != program.digest) is (case == "falling")
    assert second.data_ptr() > first.data_ptr()
    expected = (odd, even) if case == "falling" else (even, odd)
    assert all(map(torch.equal, (first, second), expected))
    copied = first.data_ptr() not in (low.data_ptr(), high.data_ptr())
    assert copied is (case in ("captured", "one", "far"))
