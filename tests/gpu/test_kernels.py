"""Compiled kernels on a Hopper GPU against the interpreter on the same GPU, at ragged sizes."""

from typing import Any

import pytest
import torch

from coda_agent.demos import Demo, demos
from coda_agent.primitives import (
    HalfTile,
    Program,
    RowMax,
    RowMean,
    RowSum,
    RowVector,
    Tile,
    absolute,
    epilogue,
    exp,
    interleave,
    pairs,
    sigmoid,
)
from coda_agent.primitives.function import ProgramFunction, default_config
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.reductions import partials as row_partials
from coda_agent.primitives.tiles import TileConfig

pytestmark = pytest.mark.gpu

PROGRAMS = [(d, p) for d in demos() for p in d.programs]
IDS = [p.name for _, p in PROGRAMS]
DEFAULT = TileConfig(128, 128, 2, 1, True)
WIDE = TileConfig(128, 192, 1, 1, True)
COOPERATIVE = TileConfig(256, 128, 2, 1)
RAGGED = (77, 272, 64)
SIZES = [RAGGED, (1, 16, 8), (300, 528, 200)]


def bound(program: Program) -> ProgramFunction:
    return ProgramFunction(program, {}, default_config)


def draw(demo: Demo, size: tuple[int, int, int], seed: int = 0) -> dict[str, Any]:
    return demo.inputs(torch.Generator("cuda").manual_seed(seed), *size)


def check(program: Program, values: dict[str, Any], config: TileConfig, **options: Any) -> None:
    """Kernel against interpreter: an ulp of bfloat16 for tiles, 2⁻¹⁰ of the largest for reductions."""
    a, b = values["A"], values["B"]
    operands = {o: values[o] for o in program.operands}
    got = bound(program)(a, b, operands, config=config, **options)
    want = interpret(
        program, a, b, operands,
        dtypes={o: torch.float32 for o in program.outputs},
        block=config.tile_n, raw=bool(options),
    )  # fmt: skip
    for o, expected in want.items():
        assert got[o].shape == expected.shape
        error = (got[o].float() - expected).abs()
        scale = expected.abs().max()
        relative = 2**-10 if o in program.reductions else 2**-7
        # 2⁻¹¹ of the largest is what one MUFU.TANH may add.
        slack = relative * expected.abs() + 2**-10 * scale
        worst = (error - slack).argmax()
        assert (error <= slack).all(), (
            f"{program.name}.{o} at {tuple(a.shape)} x {tuple(b.shape)}, {config.label}: expected "
            f"{expected.flatten()[worst]}, got {got[o].flatten()[worst]}"
        )


@pytest.mark.parametrize(("demo", "program"), PROGRAMS, ids=IDS)
def test_demo_at_ragged_sizes(demo: Demo, program: Program) -> None:
    for size in SIZES:
        check(program, draw(demo, size), DEFAULT)


@pytest.mark.parametrize("config", [WIDE, COOPERATIVE], ids=lambda c: c.label)
@pytest.mark.parametrize(
    ("demo", "program"), [x for x in PROGRAMS if x[0].programs[1:] == ()], ids=lambda x: x.name
)
def test_demo_with_other_tiles(demo: Demo, program: Program, config: TileConfig) -> None:
    check(program, draw(demo, RAGGED), config)


@pytest.mark.parametrize(
    ("demo", "program"), [x for x in PROGRAMS if x[1].reductions], ids=lambda x: x.name
)
@pytest.mark.parametrize("config", [DEFAULT, WIDE], ids=lambda c: c.label)
def test_demo_raw_partials(demo: Demo, program: Program, config: TileConfig) -> None:
    check(program, draw(demo, RAGGED), config, block_size=config.tile_n)


@pytest.mark.parametrize(("demo", "program"), PROGRAMS, ids=IDS)
def test_two_runs_are_bitwise_equal(demo: Demo, program: Program) -> None:
    values = draw(demo, (300, 528, 200))
    operands = {o: values[o] for o in program.operands}
    first, second = (bound(program)(values["A"], values["B"], operands) for _ in range(2))
    for o in first:
        assert torch.equal(first[o], second[o]), o


@epilogue(O=Tile, s=RowSum, mean=RowMean, top=RowMax)
def masked(acc, b: RowVector):
    o = sigmoid(acc + b)
    return {"O": o, "s": o, "mean": o, "top": -o}


@epilogue(O=HalfTile, s=RowSum, mean=RowMean, top=RowMax)
def masked_pairs(acc, b: RowVector):
    x, y = pairs(acc + b)
    o = exp(x) + sigmoid(y)
    return {"O": o, "s": o, "mean": o, "top": -o}


@pytest.mark.parametrize("program", [masked, masked_pairs], ids=lambda p: p.name)
@pytest.mark.parametrize("config", [DEFAULT, WIDE, COOPERATIVE], ids=lambda c: c.label)
@pytest.mark.parametrize("columns", [16, 144, 272, 400])
def test_columns_past_the_edge_do_not_leak(
    program: Program, config: TileConfig, columns: int
) -> None:
    """σ(0 + b) is not 0: a sum that took in columns past N, or stale shared memory, would show."""
    generator = torch.Generator("cuda").manual_seed(columns)

    def values(n: int, bias: float) -> dict[str, Any]:
        a = torch.randn(77, 64, generator=generator, device="cuda").bfloat16()
        b = torch.randn(n, 64, generator=generator, device="cuda").bfloat16() / 8
        return {"A": a, "B": b, "b": torch.full((n,), bias, device="cuda")}

    check(program, values(512, 8.0), config)  # leaves large values behind
    check(program, values(columns, 0.5), config)
    check(program, values(columns, 0.5), config, block_size=config.tile_n)


@epilogue(D=Tile, total=RowSum, mean=RowMean, top=RowMax)
def exact(acc):
    return {"D": acc, "total": acc * acc, "mean": acc * acc, "top": absolute(acc)}


@epilogue(O=HalfTile, total=RowSum, mean=RowMean, top=RowMax)
def exact_pairs(acc):
    x, y = pairs(acc)
    o = x * y
    return {"O": o, "total": o, "mean": o, "top": o}


@epilogue(D=Tile)
def swapped(acc):
    x, y = pairs(acc)
    return {"D": interleave(y, -x)}


def integers(rows: int, columns: int, seed: int) -> torch.Tensor:
    generator = torch.Generator("cuda").manual_seed(seed)
    drawn = torch.randint(-1, 2, (rows, columns), generator=generator, device="cuda")
    return drawn.bfloat16()


@pytest.mark.parametrize("program", [exact, exact_pairs], ids=lambda p: p.name)
def test_partials_of_integers_equal_the_interpreters(program: Program) -> None:
    """Sums of small integers are exact in float32, so their order cannot matter; 1/128 is exact too."""
    a, b = integers(77, 64, 0), integers(272, 64, 1)
    got = bound(program)(a, b, {}, block_size=128, config=DEFAULT)
    acc = a.float() @ b.float().T
    half = program is exact_pairs
    value, width = (acc[:, 0::2] * acc[:, 1::2], 64) if half else (acc, 128)
    summed = value if half else value * value
    assert torch.equal(got["total"], row_partials(summed, RowSum, width))
    assert torch.equal(got["mean"], row_partials(summed, RowMean, width))
    assert torch.equal(got["top"], row_partials(value if half else value.abs(), RowMax, width))
    stored = "O" if half else "D"
    assert torch.equal(got[stored], value.bfloat16())


def test_pairs_keep_their_places() -> None:
    a, b = integers(77, 64, 2), integers(272, 64, 3)
    got = bound(swapped)(a, b, {})["D"]
    acc = a.float() @ b.float().T
    assert torch.equal(got[:, 0::2], acc[:, 1::2].bfloat16())
    assert torch.equal(got[:, 1::2], -acc[:, 0::2].bfloat16())


def test_strides_offsets_and_batches() -> None:
    demo = next(d for d in demos() if d.name == "residual_statistics")
    program, values = demo.programs[0], draw(demo, (96, 272, 64))
    a, b = values["A"], values["B"]
    operands = {o: values[o] for o in program.operands}
    want = bound(program)(a, b, operands)
    spaced = torch.zeros(96, 2 * 64, dtype=a.dtype, device="cuda")
    spaced[:, 1::2] = a
    shifted = torch.zeros(1 + 272, device="cuda")
    shifted[1:] = operands["gamma"]
    others = {"C": operands["C"].T.contiguous().T, "gamma": shifted[1:]}
    got = bound(program)(spaced[:, 1::2], b.T.contiguous().T, others)
    batched = {**operands, "C": operands["C"].reshape(2, 48, 272)}
    stacked = bound(program)(a.reshape(2, 48, 64), b, batched)
    for o in want:
        torch.testing.assert_close(got[o], want[o], rtol=2**-7, atol=1e-3)
        assert torch.equal(stacked[o].flatten(0, 1), want[o]), o


def test_changing_a_scalar_changes_the_result() -> None:
    demo = next(d for d in demos() if d.name == "scaled_residual")
    values = draw(demo, RAGGED)
    for alpha, beta in ((1.0, 0.0), (0.0, 1.0), (-2.5, 3.0)):
        check(demo.programs[0], {**values, "alpha": alpha, "beta": beta}, DEFAULT)
