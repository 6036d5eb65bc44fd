"""Wide tiles, accumulation, narrow types and launch forms on a Hopper GPU, against float64."""

from typing import Any

import pytest
import torch

from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColSum,
    ColVector,
    HalfTile,
    HeadTable,
    Program,
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
    clamp,
    epilogue,
    gather,
    interleave,
    pairs,
    rotate,
    sigmoid,
    silu,
    swiglu,
)
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.tiles import STREAMING, UNFUSED, TileConfig
from coda_agent.runtime.launch import Arguments, allocate, launch
from coda_agent.runtime.plan import finalised

pytestmark = pytest.mark.gpu

DEFAULT = TileConfig(128, 128, 2, 1, True)
TILES = [DEFAULT, TileConfig(128, 192, 1, 2, True), TileConfig(256, 128, 2, 1)]
SIZES = [(1, 16, 16), (77, 288, 64), (300, 544, 208)]
FP8 = torch.float8_e4m3fn


@epilogue(O=AddTile, C_out=Tile, g=ColSum)
def norm_backward(acc, C: Tile, r: ColVector, w: RowVector, z: ColVector):
    c = C * r
    return {"O": (acc * w - c * z) * r, "C_out": c * w, "g": acc * c}


@epilogue(O=Tile, C_out=Tile, g=ColSum)
def norm_backward_loaded(acc, X: Tile, C: Tile, r: ColVector, w: RowVector, z: ColVector):
    c = C * r
    return {"O": X + (acc * w - c * z) * r, "C_out": c * w, "g": acc * c}


@epilogue(O=AddTile)
def added_product(acc):
    return {"O": acc}


@epilogue(dZ=WideTile, z=RowMean, O=Tile)
def gate_backward(acc, Z: WideTile):
    gate, up = pairs(Z)
    s = sigmoid(gate)
    d_up = acc * gate * s
    d_gate = acc * up * (s + gate * s * (1.0 - s))
    return {"dZ": interleave(d_gate, d_up), "z": gate * d_gate + up * d_up, "O": gate * s * up}


@epilogue(dZ=WideTile, s=RowSum)
def scaled_gate_backward(acc, Z: WideTile, r: ColVector, w: RowVector, C: Tile):
    gate, up = pairs(Z)
    return {"dZ": interleave(acc * up * r + C, acc * gate * w), "s": acc * up}


@epilogue(Z=Tile, t=RowGather)
def selected(acc, y: ColIndex):
    return {"Z": acc, "t": gather(acc, y)}


@epilogue(O=Tile)
def scaled(acc, alpha: Scalar, r: ColVector, w: RowVector):
    return {"O": alpha * acc * r * w}


@epilogue(O=Tile, s=RowSum)
def activated(acc, w: RowVector, C: Tile):
    o = silu(acc + w)
    return {"O": o + C, "s": o * o}


@epilogue(O=HalfTile, m=RowMax)
def quantised_gate(acc, alpha: Scalar, q: ColVector):
    gate, up = pairs(acc * alpha)
    o = swiglu(gate, up)
    return {"O": clamp(o * q, -448.0, 448.0), "m": absolute(o)}


@epilogue(O=HalfTile)
def loaded_gate(acc, C: Tile, w: RowVector):
    return {"O": swiglu(*pairs(acc * w + C))}


@epilogue(s=RowSum, l=RowLogSumExp, g=ColSum)
def sums(acc, r: ColVector):
    return {"s": acc * r, "l": acc, "g": acc}


@epilogue(D=Tile, O=HalfTile)
def gate(acc, r: ColVector):
    d = acc * r
    return {"D": d, "O": swiglu(*pairs(d))}


@epilogue(O=Tile, m=RowMax)
def quantised(acc, alpha: Scalar, w: RowVector):
    o = acc * alpha * w
    return {"O": clamp(o, -448.0, 448.0), "m": absolute(o)}


@epilogue(O=Tile)
def tabled(acc, cs: HeadTable):
    x, y = pairs(acc)
    cosine, sine = pairs(cs)
    return {"O": interleave(*rotate(x, y, cosine, sine))}


def draw(program: Program, size: tuple[int, int, int], dtype: torch.dtype) -> dict[str, Any]:
    m, n, k = size
    make = torch.Generator("cuda").manual_seed(m + n)

    def normal(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, generator=make, device="cuda")

    narrow = torch.bfloat16 if dtype is FP8 else dtype
    shapes = {ColVector: (m,), RowVector: (n,)}
    values: dict[str, Any] = {
        "A": normal(m, k).to(dtype),
        "B": (normal(n, k) * (1.0 if dtype is FP8 else k**-0.5)).to(dtype),
    }
    for o, kind in program.operands.items():
        if kind is Scalar:
            values[o] = k**-0.5 if dtype is FP8 else 0.75
        elif kind is ColIndex:
            values[o] = torch.randint(-3, n + 3, (m,), generator=make, device="cuda")
        elif kind in shapes:
            values[o] = normal(*shapes[kind]).abs() + 0.5
        else:
            values[o] = normal(m, n * (2 if kind is WideTile else 1)).to(narrow)
    if program.accumulated:
        values[program.accumulated] = normal(m, n).to(narrow)
    return values


def run(
    program: Program,
    values: dict[str, Any],
    config: TileConfig,
    dtypes: dict[str, torch.dtype],
) -> dict[str, torch.Tensor]:
    m, n = values["A"].shape[0], values["B"].shape[0]
    outputs = allocate(program, m, n, dtypes, config, "cuda")
    for o, t in outputs.items():
        if o in values:
            t.copy_(values[o])
        else:
            t.fill_(float("nan"))
    launch(Arguments(program, values["A"], values["B"], values, outputs, config))
    return finalised(program, outputs, m, n, config)


def check(
    program: Program,
    size: tuple[int, int, int],
    config: TileConfig,
    dtype: torch.dtype = torch.bfloat16,
    stored: dict[str, torch.dtype] | None = None,
    loaded: dict[str, torch.dtype] | None = None,
) -> None:
    values = draw(program, size, dtype)
    values |= {o: values[o].to(kind) for o, kind in (loaded or {}).items()}
    dtypes = dict.fromkeys(program.outputs, torch.bfloat16 if dtype is FP8 else dtype)
    dtypes |= stored or {}
    got = run(program, values, config, dtypes)
    again = run(program, values, config, dtypes)
    want = interpret(
        program, values["A"], values["B"], values, dtypes=dtypes, compute=torch.float64,
        block=config.tile_n, row_block=config.tile_m,
    )  # fmt: skip
    for o, expected in want.items():
        assert got[o].shape == expected.shape
        out = got[o].double()
        assert torch.equal(out, again[o].double()), f"{o} differs between runs"
        # Half an ulp at the store (an accumulated output is rounded twice), and the sum of
        # K products in the tensor core, which FP8 keeps to about 14 bits.
        relative = {FP8: 2**-4, torch.bfloat16: 2**-8, torch.float16: 2**-11}.get(got[o].dtype, 0)
        slack = 2 * relative * expected.abs() + expected.abs().max() * (
            2**-7 if dtype is FP8 else 2**-8 if program.outputs[o] is AddTile else 2**-10
        )
        error = (out - expected).abs()
        worst = (error - slack).argmax()
        assert (error <= slack).all(), (
            f"{program.name}.{o} {size} {config.label}: expected {expected.flatten()[worst]}, "
            f"got {out.flatten()[worst]}"
        )


BACKWARD = [norm_backward, norm_backward_loaded, added_product, gate_backward, scaled_gate_backward]


@pytest.mark.parametrize("config", TILES, ids=lambda c: c.label)
@pytest.mark.parametrize("program", BACKWARD, ids=lambda p: p.name)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=str)
def test_backward_stores(program: Program, config: TileConfig, dtype: torch.dtype) -> None:
    for size in SIZES:
        check(program, size, config, dtype)


# Sub-tiles of 16 columns, and of 32 that two warp groups share.
WIDE_TILES = [TileConfig(128, 176, 2, 1, True), TileConfig(192, 192, 2, 1)]


@pytest.mark.parametrize("config", WIDE_TILES, ids=lambda c: c.label)
def test_wide_tiles_in_other_sub_tiles(config: TileConfig) -> None:
    for size in SIZES:
        check(gate_backward, size, config)


@pytest.mark.parametrize("config", [DEFAULT, *WIDE_TILES], ids=lambda c: c.label)
def test_a_float32_tile_beside_a_wide_one(config: TileConfig) -> None:
    for size in SIZES:
        check(scaled_gate_backward, size, config, loaded={"C": torch.float32})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("config", TILES, ids=lambda c: c.label)
def test_selected_logits_in_each_type(config: TileConfig, dtype: torch.dtype) -> None:
    for size in SIZES:
        check(selected, size, config, stored={"t": dtype})


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_selected_infinities(dtype: torch.dtype) -> None:
    """They are stored as torch takes them; a row whose index is no column still gets 0."""
    m, n, _ = SIZES[2]
    values = draw(selected, SIZES[2], torch.bfloat16)
    values["A"] = values["A"].abs() + 1
    values["B"][200], values["B"][300] = -torch.inf, torch.inf
    values["y"] = torch.tensor([200, 300, n, 0], device="cuda").repeat(m // 4)
    got = run(selected, values, DEFAULT, {"Z": torch.bfloat16, "t": dtype})["t"]
    product = values["A"].double() @ values["B"].double().T
    want = product.gather(1, values["y"].clamp(max=n - 1)[:, None])[:, 0]
    assert (got[0::4] == -torch.inf).all() and (got[1::4] == torch.inf).all()
    assert (got[2::4] == 0).all()
    torch.testing.assert_close(got[3::4].double(), want[3::4], rtol=2**-7, atol=1e-2)


FP8_CASES = [
    (scaled, {}),
    (scaled, {"O": FP8}),
    (quantised, {"O": FP8}),
    (gate, {}),
    (quantised_gate, {}),
    (quantised_gate, {"O": FP8}),
]


@pytest.mark.parametrize("config", [*TILES, *UNFUSED], ids=lambda c: c.label)
@pytest.mark.parametrize(
    ("program", "stored"), FP8_CASES, ids=[f"{p.name} {len(s)}" for p, s in FP8_CASES]
)
def test_fp8(program: Program, stored: dict[str, torch.dtype], config: TileConfig) -> None:
    for size in [(1, 32, 16), (77, 288, 64), (300, 544, 208)]:
        check(program, size, config, FP8, stored)


def test_fp8_columns_that_cublas_does_not_take() -> None:
    check(scaled, (77, 264, 64), UNFUSED[0], FP8, {})


FORMS = [
    *(c for _, c in STREAMING),
    TileConfig(128, 128, 1, 1, True, split_k=8),
    TileConfig(64, 256, 1, 1, True, split_k=4),
    TileConfig(128, 128, 2, 1, True, swizzle=1),
    TileConfig(128, 128, 2, 1, True, swizzle=32),
    *UNFUSED,
]
ONCE = TileConfig(128, 256, 2, 1, persistent=False)
PARTS = [c for c in FORMS if c.split_k > 1]
SWAPPED = [
    *(TileConfig(128, n, swap_ab=True) for n in (16, 32, 64)),
    TileConfig(64, 32, swap_ab=True),
    TileConfig(128, 128, 1, 1, True, swap_ab=True),
]


@pytest.mark.parametrize("config", [*FORMS, ONCE], ids=lambda c: c.label)
@pytest.mark.parametrize("program", [scaled, activated, gate, norm_backward, gate_backward])
def test_launch_forms(program: Program, config: TileConfig) -> None:
    for size in [*SIZES, (128, 256, 4096)]:
        check(program, size, config)


@pytest.mark.parametrize("config", PARTS, ids=lambda c: c.label)
@pytest.mark.parametrize("program", [quantised_gate, loaded_gate, sums], ids=lambda p: p.name)
def test_k_in_parts_without_a_store_of_the_gemm(program: Program, config: TileConfig) -> None:
    for size in [*SIZES, (16, 288, 4096), (130, 544, 2312)]:
        check(program, size, config)


@pytest.mark.parametrize("config", [PARTS[0], ONCE], ids=lambda c: c.label)
def test_selected_logits_in_other_forms(config: TileConfig) -> None:
    for size in [*SIZES, (130, 256, 4096)]:
        check(selected, size, config, stored={"t": torch.float32})


@pytest.mark.parametrize("config", SWAPPED, ids=lambda c: c.label)
def test_transposed_product(config: TileConfig) -> None:
    for size in [*SIZES, (16, 4096, 256)]:
        check(scaled, size, config)


def test_narrow_half_tile_beside_a_full_width_store_is_refused() -> None:
    values = draw(gate, SIZES[1], FP8)
    with pytest.raises(CompileError, match="e4m3 HalfTile"):
        run(gate, values, DEFAULT, {"D": torch.bfloat16, "O": FP8})


@pytest.mark.parametrize("rows", [128, 384])
def test_table_repeats_over_sequences_and_heads(rows: int) -> None:
    make = torch.Generator("cuda").manual_seed(rows)
    values = draw(tabled, (300, 512, 64), torch.bfloat16)
    values["cs"] = torch.randn(rows, 64, generator=make, device="cuda").to(torch.bfloat16)
    for config in TILES:
        got = run(tabled, values, config, {"O": torch.bfloat16})["O"]
        want = interpret(
            tabled, values["A"], values["B"], values, dtypes={"O": torch.bfloat16},
            compute=torch.float64,
        )["O"]  # fmt: skip
        assert ((got.double() - want).abs() <= 2**-7 * want.abs() + 1e-2).all(), config.label


def test_scalar_from_device_memory() -> None:
    values = draw(scaled, SIZES[1], torch.bfloat16)
    dtypes = {"O": torch.bfloat16}
    number = run(scaled, values, DEFAULT, dtypes)["O"]
    pointer = {**values, "alpha": torch.full((), values["alpha"], device="cuda")}
    assert torch.equal(run(scaled, pointer, DEFAULT, dtypes)["O"], number)
