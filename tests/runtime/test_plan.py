"""Call plans, on a launch that interprets: a plan serves the calls it was resolved for, and no others."""

from __future__ import annotations

import gc
import weakref
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch

from coda_agent.primitives import (
    AddTile,
    ColSum,
    ColVector,
    HalfTile,
    Program,
    RowMean,
    RowVector,
    Scalar,
    Tile,
    epilogue,
    pairs,
    swiglu,
)
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime import call_cache
from coda_agent.runtime import function as function_module
from coda_agent.runtime import plan as plan_module
from coda_agent.runtime.call_cache import signature
from coda_agent.runtime.function import ProgramFunction, untuned
from coda_agent.runtime.launch import Arguments, Bound
from coda_agent.runtime.plan import tma_ready

M, N, K = 24, 272, 32


@epilogue(D=Tile, O=HalfTile, s=RowMean)
def several(acc, C: Tile, r: ColVector, b: RowVector, beta: Scalar):
    d = acc * r + beta * C + b
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up), "s": d * d}


@epilogue(X=AddTile, g=ColSum)
def adding(acc, r: ColVector):
    return {"X": acc * r, "g": acc}


def facts(t: Any) -> Any:
    if not isinstance(t, torch.Tensor):
        return "number"
    return t.shape, t.stride(), t.dtype, t.device, t.data_ptr() % 16 == 0


class Launches:
    """Stands in for `launch`. What it gives interprets into the buffers it is handed, which must be
    as those it was bound to."""

    def __init__(self) -> None:
        self.bound = 0

    def __call__(self, given: Arguments, *, run: bool) -> Bound:
        assert not run
        program, a, b, operands, outputs, config, _ = given
        self.bound += 1
        expected = [facts(t) for t in (a, b, *(operands[o] for o in program.operands))]
        shapes = {o: (t.shape, t.dtype) for o, t in outputs.items()}

        def enqueue(inputs: Sequence[Any], results: Sequence[torch.Tensor]) -> None:
            a, b, *rest = inputs
            given = dict(zip(program.operands, rest, strict=False))
            outputs = dict(zip(program.outputs, results, strict=True))
            assert [facts(t) for t in (a, b, *given.values())] == expected
            assert {o: (t.shape, t.dtype) for o, t in outputs.items()} == shapes
            if o := program.accumulated:
                given[o] = outputs[o]
            dtypes = {o: t.dtype for o, t in outputs.items()}
            options: Any = {"block": config.tile_n, "row_block": config.tile_m, "raw": True}
            for o, t in interpret(program, a, b, given, dtypes=dtypes, **options).items():
                over_rows = o in program.reductions and program.reductions[o].over_rows
                outputs[o].copy_(t.mT if over_rows else t)

        return Bound(program, config, enqueue)


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Launches:
    found = Launches()
    monkeypatch.setattr(function_module, "supported", lambda _: True)
    monkeypatch.setattr(plan_module, "launch", found)
    return found


def made(program: Program = several) -> ProgramFunction:
    return ProgramFunction(program, {"O": None}, untuned)


def given(
    seed: int = 0, m: int = M, lead: tuple[int, ...] = ()
) -> tuple[torch.Tensor, torch.Tensor, dict[str, Any]]:
    g = torch.Generator().manual_seed(seed)

    def tensor(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=g).bfloat16()

    rows = lead or (m,)
    operands = {
        "C": tensor(*rows, N), "r": tensor(*rows).float(), "b": tensor(N).float(), "beta": 0.5
    }  # fmt: skip
    return tensor(*rows, K), tensor(N, K), operands


def interpreted(program: Program, *call: Any, **options: Any) -> dict[str, torch.Tensor]:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(function_module, "supported", lambda _: False)
        return made(program)(*call, **options)


def assert_right(run: ProgramFunction, *call: Any, **options: Any) -> None:
    got, want = run(*call, **options), interpreted(several, *call, **options)
    assert list(got) == list(want)
    for o in want:
        assert got[o].dtype == want[o].dtype and got[o].shape == want[o].shape
        assert got[o].stride() == want[o].stride()
        torch.testing.assert_close(got[o], want[o], rtol=2**-7, atol=1e-6)


def test_a_second_call_is_a_lookup_with_other_numbers(launches: Launches) -> None:
    run = made()
    for seed in range(3):
        a, b, operands = given(seed)
        assert_right(run, a, b, {**operands, "beta": float(seed)})
    assert launches.bound == 1
    (plan,) = run.calls._known.values()
    # On a GPU a torch.Size is refused.
    assert {type(x) for made in plan.made if made for x in made[:2]} == {tuple}


def offset(t: torch.Tensor) -> torch.Tensor:
    """`t` at an address that is 4 or 8 bytes off 16."""
    flat = torch.zeros(t.numel() + 2, dtype=t.dtype)
    flat[2:] = t.flatten()
    return flat[2:].view(t.shape)


def spaced(t: torch.Tensor) -> torch.Tensor:
    wide = torch.zeros(*t.shape[:-1], 2 * t.shape[-1], dtype=t.dtype)
    wide[..., ::2] = t
    return wide[..., ::2]


CHANGES: dict[str, Any] = {
    "strides of A": lambda a, b, x: (a.T.contiguous().T, b, x),
    "spaced A": lambda a, b, x: (spaced(a), b, x),
    "address of A": lambda a, b, x: (offset(a), b, x),
    "strides of B": lambda a, b, x: (a, b.T.contiguous().T, x),
    "address of B": lambda a, b, x: (a, offset(b), x),
    "strides of C": lambda a, b, x: (a, b, {**x, "C": x["C"].T.contiguous().T}),
    "address of C": lambda a, b, x: (a, b, {**x, "C": offset(x["C"])}),
    "address of r": lambda a, b, x: (a, b, {**x, "r": offset(x["r"])}),
    "expanded r": lambda a, b, x: (a, b, {**x, "r": torch.ones(1).expand(M)}),
    "type of r": lambda a, b, x: (a, b, {**x, "r": x["r"].bfloat16()}),
    "type of all": lambda a, b, x: (a.half(), b.half(), {**x, "C": x["C"].half()}),
    "a scalar in memory": lambda a, b, x: (a, b, {**x, "beta": torch.tensor(0.5)}),
    "rows": lambda a, b, x: given(1, 40),
    "one row": lambda a, b, x: given(1, 1),
    "leading dimensions": lambda a, b, x: given(1, lead=(2, 3, 4)),
    "a parameter": lambda a, b, x: (a, torch.nn.Parameter(b, requires_grad=False), x),
    "names in another order": lambda a, b, x: (a, b, dict(reversed(x.items()))),
}


@pytest.mark.parametrize("change", CHANGES)
def test_what_changes_is_resolved_anew(launches: Launches, change: str) -> None:
    run, call = made(), given()
    for options in ({}, {"block_size": 192}, {"config": TileConfig(128, 64)}):
        assert_right(run, *call, **options)
        assert_right(run, *CHANGES[change](*call), **options)
        assert_right(run, *call, **options)


WRONG: dict[str, tuple[Any, str]] = {
    "K": (lambda a, b, x: (a[:, :16], b, x), "expected one K, the last"),
    "rows of C": (lambda a, b, x: (a, b, {**x, "C": x["C"][:8]}), "operand 'C' has shape"),
    "a missing operand": (lambda a, b, x: (a, b, {**x, "r": None}), "operand 'r' is missing"),
    "one too many": (lambda a, b, x: (a, b, {**x, "q": 1.0}), "no operand is named 'q'"),
    "a number for r": (lambda a, b, x: (a, b, {**x, "r": 1.0}), "operand 'r' has shape 1.0"),
    "a device": (lambda a, b, x: (a, b, {**x, "b": x["b"].to("meta")}), "'b' is on meta"),
    "a type": (lambda a, b, x: (a.float(), b.float(), x), "A is torch.float32"),
}


@pytest.mark.parametrize("wrong", WRONG)
def test_a_wrong_call_after_right_ones_is_refused(launches: Launches, wrong: str) -> None:
    run, call = made(), given()
    change, message = WRONG[wrong]
    for _ in range(2):
        assert_right(run, *call)
        with pytest.raises(LaunchError, match=message):
            run(*change(*call))
    with pytest.raises(LaunchError, match="no tile has block_size 100"):
        run(*call, block_size=100)


def test_no_rows_launch_nothing(launches: Launches) -> None:
    run = made()
    assert run(*given(m=0))["s"].shape == (0,)
    assert launches.bound == 0


@pytest.mark.parametrize("change", [torch.clone, offset, spaced], ids=["as is", "offset", "spaced"])
@pytest.mark.parametrize("lead", [(M,), (2, 12)], ids=str)
def test_what_is_added_to_in_place_is_the_callers(
    launches: Launches, change: Callable[..., Any], lead: tuple[int, ...]
) -> None:
    a, b, operands = given(lead=lead)
    x = operands["C"]
    run = made(adding)
    want = interpreted(adding, a, b, {"r": operands["r"], "X": x.clone()})
    for _ in range(2):
        start = change(x)
        got = run(a, b, {"r": operands["r"], "X": start})
        assert got["X"] is start
        torch.testing.assert_close(start, want["X"], rtol=2**-7, atol=1e-6)
        torch.testing.assert_close(got["g"], want["g"])
    raw = run(a, b, {"r": operands["r"], "X": x.clone()}, block_size=128)["g"]
    assert raw.shape == (N, 1) and raw.stride()[0] == 1


def test_plans_are_few_and_hold_no_tensor(
    launches: Launches, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(call_cache, "_CALLS", 4)
    run, kept = made(), list[Any]()
    for m in range(1, 10):
        a, b, operands = given(m=m)
        kept += map(weakref.ref, (a, b, operands["C"], *run(a, b, operands).values()))
        assert len(run.calls) <= 4
        del a, b, operands
    gc.collect()
    assert all(ref() is None for ref in kept)


def test_a_subclass_of_a_tensor_has_no_signature() -> None:
    class Odd(torch.Tensor):
        pass

    t = torch.zeros(2, 3)
    assert signature([t, 1.0]) == (
        t.shape,
        (3, 1),
        torch.float32,
        t.device,
        t.data_ptr() % 16,
        None,
    )
    assert signature([t.as_subclass(Odd)]) is None
    assert signature([[1.0]]) is None


def test_an_index_is_aligned_to_four_elements() -> None:
    index, numbers = torch.zeros(64, dtype=torch.int64), torch.zeros(64)
    assert index.data_ptr() % 32 == numbers.data_ptr() % 32 == 0
    fits, off = index[4:36], index[2:34]
    assert tma_ready(fits) is fits and tma_ready(off) is not off
    vector = numbers[4:36]
    assert tma_ready(vector) is vector  # 16 bytes are enough
    assert signature((fits,)) != signature((off,))
