"""Compiled kernels on a Hopper GPU against the interpreter on the same GPU, at ragged sizes."""

from typing import Any

import pytest
import torch
import torch.nn.functional as F

from coda_agent.demos import Demo, demos
from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColMax,
    ColSum,
    ColVector,
    HalfTile,
    Program,
    RowGather,
    RowLogSumExp,
    RowMax,
    RowMean,
    RowMin,
    RowSum,
    RowVector,
    Tile,
    WideTile,
    absolute,
    epilogue,
    exp,
    gather,
    interleave,
    pairs,
    sigmoid,
    silu,
    softplus,
)
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.spread import spread
from coda_agent.primitives.tiles import TileConfig, offered, unfused_forms
from coda_agent.runtime.function import ProgramFunction, untuned
from coda_agent.runtime.kernel import Kernel
from tests.specs.test_layout import of_gates

pytestmark = pytest.mark.gpu

PROGRAMS = [(d, p) for d in demos() for p in d.programs]
IDS = [p.name for _, p in PROGRAMS]
DEFAULT = TileConfig(128, 128, 2, 1, True)
WIDE = TileConfig(128, 192, 1, 1, True)
COOPERATIVE = TileConfig(256, 128, 2, 1)
RAGGED = (77, 272, 64)
TALL = (300, 272, 64)  # three tiles of rows, the last one ragged
SIZES = [RAGGED, (1, 16, 8), (300, 528, 200)]


def bound(program: Program) -> ProgramFunction:
    return ProgramFunction(program, {}, untuned)


def draw(demo: Demo, size: tuple[int, int, int], seed: int = 0) -> dict[str, Any]:
    m, n, k = size
    n = -(-n // demo.n_multiple) * demo.n_multiple
    return demo.inputs(torch.Generator("cuda").manual_seed(seed), m, n, k)


def given(program: Program, values: dict[str, Any]) -> dict[str, Any]:
    """The operands of a call, which writes into a copy of what it adds to."""
    operands = {o: values[o] for o in program.operands}
    added = {o: values[o].clone() for o in program.outputs if o == program.accumulated}
    return {**operands, **added}


def interpreted(
    program: Program, values: dict[str, Any], config: TileConfig, *, raw: bool
) -> dict[str, torch.Tensor]:
    """The interpreter's outputs in float32, each reduction in blocks of the tile's own extent."""
    return interpret(
        program,
        values["A"],
        values["B"],
        values,
        dtypes={o: torch.float32 for o in program.outputs},
        block=config.tile_n,
        row_block=config.tile_m,
        raw=raw,
    )


def check(program: Program, values: dict[str, Any], config: TileConfig, **options: Any) -> None:
    """Kernel against interpreter: an ulp of bfloat16 for tiles, 2⁻¹⁰ of the largest for the rest."""
    a, b = values["A"], values["B"]
    got = bound(program)(a, b, given(program, values), config=config, **options)
    want = interpreted(program, values, config, raw=bool(options))
    for o, expected in want.items():
        assert got[o].shape == expected.shape, o
        assert not got[o].isnan().any(), o
        error = (got[o].float() - expected).abs()
        scale = expected.abs().max()
        kind = program.outputs[o]
        relative = 2**-7 if kind in (Tile, HalfTile, WideTile, AddTile) else 2**-10
        # 2⁻¹¹ of the largest is what one MUFU.TANH may add; what is added is rounded by itself too.
        slack = relative * expected.abs() + 2 ** (-8 if kind is AddTile else -10) * scale
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


@pytest.mark.parametrize(("demo", "program"), PROGRAMS, ids=IDS)
def test_demo_unfused(demo: Demo, program: Program) -> None:
    for config in unfused_forms(program):
        for size in (*SIZES, (5, 8224, 72)):
            check(program, draw(demo, size), config)


@epilogue(D=Tile, top=RowMax, lse=RowLogSumExp, g=ColSum, c=ColMax)
def all_folds(acc, b: RowVector):
    d = acc + b
    return {"D": d, "top": d, "lse": d, "g": d, "c": d}


@pytest.mark.parametrize("config", unfused_forms(all_folds), ids=lambda c: c.label)
def test_nan_and_infinity_unfused(config: TileConfig) -> None:
    """As of a fused kernel: a row's maximum keeps NaN, a column's passes it over."""
    a, b = integers(77, 64, 12), integers(272, 64, 13)
    a[3], b[5] = float("nan"), float("nan")
    bias = torch.zeros(272, device="cuda")
    bias[7] = float("-inf")
    got, want = (bound(all_folds)(a, b, {"b": bias}, config=c) for c in (config, DEFAULT))
    assert got["top"].isnan().all() and not got["c"].isnan().any()
    for o in got:
        torch.testing.assert_close(got[o], want[o], rtol=1e-5, atol=1e-3, equal_nan=True)


@epilogue(low=RowMin, top=RowMax)
def extremes(acc, X: Tile):
    return {"low": acc + X, "top": acc + X}


@pytest.mark.parametrize("config", [DEFAULT, WIDE, COOPERATIVE, *unfused_forms(extremes)],
                         ids=lambda c: c.label)  # fmt: skip
def test_one_nan_is_that_rows_extreme(config: TileConfig) -> None:
    a, b = integers(300, 64, 14), integers(528, 64, 15)
    x = torch.zeros(300, 528, device="cuda", dtype=torch.bfloat16)
    for row, column in ((0, 0), (7, 131), (150, 527), (299, 300)):
        x[row, column] = float("nan")
    got, due = bound(extremes)(a, b, {"X": x}, config=config), a.float() @ b.float().T + x.float()
    assert torch.equal(got["low"].isnan(), x.isnan().any(1))
    torch.testing.assert_close(got["low"], due.amin(1), equal_nan=True)
    torch.testing.assert_close(got["top"], due.amax(1), equal_nan=True)


@pytest.mark.parametrize(
    ("demo", "program"), [x for x in PROGRAMS if x[1].reductions], ids=lambda x: x.name
)
@pytest.mark.parametrize("config", [DEFAULT, WIDE, COOPERATIVE], ids=lambda c: c.label)
def test_demo_raw_partials(demo: Demo, program: Program, config: TileConfig) -> None:
    for size in (RAGGED, TALL):
        check(program, draw(demo, size), config, block_size=config.tile_n)


@pytest.mark.parametrize(("demo", "program"), PROGRAMS, ids=IDS)
def test_two_runs_are_bitwise_equal(demo: Demo, program: Program) -> None:
    values = draw(demo, (300, 528, 200))
    first, second = (
        bound(program)(values["A"], values["B"], given(program, values)) for _ in range(2)
    )
    for o in first:
        assert torch.equal(first[o], second[o]), o


@epilogue(D=Tile)
def product(acc, b: RowVector):
    return {"D": acc + b}


@epilogue(D=Tile)
def added(acc, C: Tile):
    return {"D": acc + C}


@pytest.mark.parametrize("program", [product, added], ids=lambda p: p.name)
@pytest.mark.parametrize("config", [DEFAULT, WIDE, COOPERATIVE], ids=lambda c: c.label)
def test_many_tiles_of_few_stages(program: Program, config: TileConfig) -> None:
    """A stage that is stored from while the next tile writes it shows at short K alone, and so does
    an epilogue that loads C and waits for a mainloop of one step."""
    run = bound(program)
    for k in (64, 128, 192, 256):
        a, b = integers(4096, k, 1), integers(4096, k, 2)
        (name,) = program.operands
        beside = integers(4096, 4096, 3) if name == "C" else b[:, 0].contiguous()
        want = (a.float() @ b.float().T + beside.float()).bfloat16()
        wrong = torch.zeros((), dtype=torch.int64, device="cuda")
        for _ in range(250):
            wrong += (run(a, b, {name: beside}, config=config)["D"] != want).sum()
        assert wrong.item() == 0, k


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
    assert torch.equal(got["total"], RowSum.partials(summed, width))
    assert torch.equal(got["mean"], RowMean.partials(summed, width))
    assert torch.equal(got["top"], RowMax.partials(value if half else value.abs(), width))
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


@epilogue(D=Tile, g=ColSum, top=ColMax)
def column_masked(acc, r: ColVector):
    d = acc + r
    return {"D": d, "g": d, "top": -d}


@epilogue(D=Tile, E=Tile, g=ColSum, top=ColMax)
def column_masked_pairs(acc, r: ColVector):
    x, y = pairs(acc + r)
    d = interleave(y, x)
    return {"D": d, "E": acc, "g": d, "top": -d}


@pytest.mark.parametrize("program", [column_masked, column_masked_pairs], ids=lambda p: p.name)
@pytest.mark.parametrize("config", [DEFAULT, WIDE, COOPERATIVE], ids=lambda c: c.label)
@pytest.mark.parametrize("height", [1, 77, 129, 300])
def test_rows_past_the_edge_do_not_leak(program: Program, config: TileConfig, height: int) -> None:
    """0 + r is not 0: a sum that took in rows past M, or stale shared memory, would show."""
    generator = torch.Generator("cuda").manual_seed(height)

    def values(m: int, bias: float) -> dict[str, Any]:
        a = torch.randn(m, 64, generator=generator, device="cuda").bfloat16()
        b = torch.randn(272, 64, generator=generator, device="cuda").bfloat16() / 8
        return {"A": a, "B": b, "r": torch.full((m,), bias, device="cuda")}

    check(program, values(512, 1e4), config)  # leaves large values behind
    check(program, values(height, 0.5), config)
    check(program, values(height, 0.5), config, block_size=config.tile_m)


def test_column_partials_of_integers_are_exact() -> None:
    a, b = integers(300, 64, 4), integers(272, 64, 5)
    acc = a.float() @ b.float().T
    operands = {"C": acc.bfloat16()}

    @epilogue(D=Tile, g=ColSum, top=ColMax)
    def program(acc, C: Tile):
        return {"D": acc, "g": acc * C, "top": acc}

    for config in (DEFAULT, WIDE, COOPERATIVE):
        got = bound(program)(a, b, operands, block_size=config.tile_m, config=config)
        product = acc * operands["C"].float()
        assert torch.equal(got["g"], ColSum.partials(product, config.tile_m)), config.label
        assert torch.equal(got["top"], ColMax.partials(acc, config.tile_m)), config.label
        final = bound(program)(a, b, operands, config=config)
        assert torch.equal(final["g"], product.sum(0)), config.label
        assert torch.equal(final["top"], acc.amax(0)), config.label


@pytest.mark.parametrize(
    "config",
    [TileConfig(128, 128, 1, 1, True), WIDE, COOPERATIVE],
    ids=lambda c: c.label,
)
@pytest.mark.parametrize("size", [*SIZES, TALL, (129, 144, 72)], ids=str)
def test_two_full_width_outputs_on_pairs(config: TileConfig, size: tuple[int, int, int]) -> None:
    demo = next(d for d in demos() if d.name == "rotate_pairs")
    program = next(p for p in demo.programs if p.name == "rotate_and_keep")
    check(program, draw(demo, size), config)


def test_full_width_outputs_on_pairs_are_not_exchanged() -> None:
    @epilogue(D=Tile, H=HalfTile, E=Tile, F=Tile)
    def program(acc):
        x, y = pairs(acc)
        return {"D": acc, "H": x - y, "E": interleave(y, x), "F": -acc}

    a, b = integers(200, 64, 6), integers(272, 64, 7)
    acc = a.float() @ b.float().T
    got = bound(program)(a, b, {})
    assert torch.equal(got["D"], acc.bfloat16())
    assert torch.equal(got["H"], (acc[:, 0::2] - acc[:, 1::2]).bfloat16())
    assert torch.equal(got["E"][:, 0::2], acc[:, 1::2].bfloat16())
    assert torch.equal(got["E"][:, 1::2], acc[:, 0::2].bfloat16())
    assert torch.equal(got["F"], -acc.bfloat16())


@epilogue(Z=Tile, t=RowGather, shifted=RowGather)
def gathering(acc, y: ColIndex, b: RowVector):
    return {"Z": acc, "t": gather(acc, y), "shifted": gather(acc + b, y)}


@epilogue(D=Tile, t=RowGather, lse=RowLogSumExp)
def gathering_pairs(acc, y: ColIndex, b: RowVector):
    x, z = pairs(acc + b)
    d = interleave(z, x)
    return {"D": d, "t": gather(d, y), "lse": x * z}


@pytest.mark.parametrize("program", [gathering, gathering_pairs], ids=lambda p: p.name)
@pytest.mark.parametrize("config", [DEFAULT, WIDE, COOPERATIVE], ids=lambda c: c.label)
@pytest.mark.parametrize("kind", [torch.int32, torch.int64], ids=str)
def test_gather_at_every_column_and_outside(
    program: Program, config: TileConfig, kind: torch.dtype
) -> None:
    """Outside [0, N) is 0, in the columns of the last, ragged tile too; 300 rows name 272 columns."""
    m, n, k = TALL
    generator = torch.Generator("cuda").manual_seed(8)
    y = torch.arange(m, device="cuda", dtype=kind) % n
    outside = [-1, -100, n, n + 1, 383, 384, 2**31 - 1, -(2**31)]
    y[: len(outside)] = torch.tensor(outside, device="cuda", dtype=kind)
    values: dict[str, Any] = {
        "A": torch.randn(m, k, generator=generator, device="cuda").bfloat16(),
        "B": torch.randn(n, k, generator=generator, device="cuda").bfloat16() / 8,
        "y": y,
        "b": torch.full((n,), 5.0, device="cuda"),
    }
    operands = {o: values[o] for o in program.operands}
    for _ in range(2):
        got = bound(program)(values["A"], values["B"], operands, config=config)
        for o, output in program.outputs.items():
            if output is RowGather:
                assert (got[o][: len(outside)] == 0).all(), (o, got[o][: len(outside)])
    check(program, values, config)


def test_an_index_of_64_bits_does_not_wrap() -> None:
    a, b = integers(77, 64, 9), integers(272, 64, 10)
    y = torch.full((77,), 2**32 + 3, device="cuda")
    got = bound(gathering)(a, b, {"y": y, "b": torch.zeros(272, device="cuda")})
    assert (got["t"] == 0).all()


@pytest.mark.parametrize("config", [DEFAULT, WIDE, COOPERATIVE], ids=lambda c: c.label)
def test_log_sum_exp_of_large_values_stays_finite(config: TileConfig) -> None:
    """Past N the accumulator reads 0, which is far above -1e4: it must not be counted."""

    @epilogue(Z=Tile, lse=RowLogSumExp)
    def program(acc, b: RowVector):
        return {"Z": acc, "lse": acc + b}

    generator = torch.Generator("cuda").manual_seed(11)
    for shift in (-1e4, 0.0, 1e4):
        values = {
            "A": torch.randn(77, 64, generator=generator, device="cuda").bfloat16(),
            "B": torch.randn(272, 64, generator=generator, device="cuda").bfloat16() / 8,
            "b": torch.full((272,), shift, device="cuda"),
        }
        check(program, values, config)
        check(program, values, config, block_size=config.tile_n)


@epilogue(sigma=Tile, gated=Tile, plus=Tile)
def tails(acc):
    return {"sigma": sigmoid(acc), "gated": silu(acc), "plus": softplus(acc)}


def test_functions_keep_the_digits_of_their_tails() -> None:
    """Whatever rounds to bfloat16 may be off by half of its last place, and a little more."""
    x = torch.logspace(-6, 1.9, 4096, device="cuda").bfloat16()
    a, b = torch.zeros(8192, 16, device="cuda"), torch.zeros(32, 16, device="cuda")
    a[:, 0], b[:, 0] = torch.cat([-x, x]), 1.0  # the product is x itself
    got = bound(tails)(a.bfloat16(), b.bfloat16(), {})
    exact = a[:, :1].bfloat16().double()
    due = {"sigma": exact.sigmoid(), "gated": F.silu(exact), "plus": F.softplus(exact)}
    for o, expected in due.items():
        error = (got[o].double() - expected).abs() / expected.abs()
        assert error.max() < 2.0**-8 + 1e-5, o


@epilogue(D=Tile, O=HalfTile)
def gated(acc, bias: RowVector):
    z = acc + bias
    gate, up = pairs(z)
    return {"D": z, "O": silu(gate) * up}


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float8_e4m3fn])
@pytest.mark.parametrize("config", offered(spread(gated), [SIZES[0]])[::3], ids=lambda c: c.label)
def test_rows_of_weights_apart_are_those_of_one(config: TileConfig, dtype: torch.dtype) -> None:
    generator = torch.Generator("cuda").manual_seed(0)
    draw = lambda *shape: torch.randn(shape, generator=generator, device="cuda").to(dtype)
    a, held, far = draw(77, 64), draw(2, 136, 64), draw(136, 64)
    bias = torch.randn(272, generator=generator, device="cuda")
    stored = {"D": "bfloat16", "O": "bfloat16"}
    types = (str(dtype).removeprefix("torch."),)
    whole, apart = (ProgramFunction(p, stored, untuned, types) for p in (gated, spread(gated)))
    pairs_of = [(held[0], held[1]), (held[1], held[0]), (held[0], far), (far, held[1]), (far, far)]
    for even, odd in pairs_of:
        b = torch.stack([even, odd], 1).flatten(0, 1)
        expected = whole(a, b, {"bias": bias}, config=config)
        got = apart(a, even, {"bias": bias, "odd_rows": odd}, config=config)
        assert all(torch.equal(got[o], expected[o]) for o in expected)


def test_a_kernel_reads_paired_weights_where_they_lie() -> None:
    made, program = of_gates("two weights")
    kernel: Any = Kernel(made, {"probe": program}, "kernel_apart")
    x = torch.randn(2, 300, 64, device="cuda").bfloat16()
    gate, up = (torch.randn(272, 64, device="cuda").bfloat16() for _ in range(2))
    packed = kernel.packed(x, kernel.pack(gate=gate, up=up))
    assert torch.equal(kernel(x, gate, up), packed)
    before = torch.cuda.memory_allocated()
    torch.cuda.reset_peak_memory_stats()
    found = kernel(x, gate, up)  # by the first call's plan
    most = torch.cuda.max_memory_allocated() - before
    assert torch.equal(found, packed)
    assert most < found.numel() * 2 + gate.numel() * 2
    assert torch.equal(kernel(x, up, gate), kernel.packed(x, kernel.pack(gate=up, up=gate)))
