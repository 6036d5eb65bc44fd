"""Lowering and compilation without a GPU. A compilation takes some three seconds, so there are few."""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.demos import demos
from coda_agent.primitives import (
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
    RowSum,
    RowVector,
    Scalar,
    Tile,
    absolute,
    clamp,
    epilogue,
    exp,
    gather,
    gelu_erf,
    gelu_tanh,
    hard_swish,
    interleave,
    leaky_relu,
    log,
    maximum,
    pairs,
    relu,
    rsqrt,
    sigmoid,
    silu,
    softplus,
    sqrt,
    swiglu,
    tanh,
)
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.launch import launch
from coda_agent.primitives.lower import (
    Replay,
    forget,
    kernel_names,
    lower,
    lowering_digest,
    zero_preserving,
)
from coda_agent.primitives.target import compile_blind, cubin, sass, target, use_cache
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, SM90_CONFIGS, TileConfig, offered


@epilogue(D=Tile, O=HalfTile)
def gated(acc, r: ColVector):
    d = acc * r
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up)}


@epilogue(D=Tile, O=Tile, s=RowMean)
def statistics(acc, C: Tile, gamma: RowVector):
    d = acc + C
    return {"D": d, "O": d * gamma, "s": d * d}


@epilogue(O=Tile, s=RowSum, m=RowMax)
def masked(acc, b: RowVector, alpha: Scalar):
    o = sigmoid(alpha * acc + b)
    return {"O": o, "s": o, "m": absolute(o)}


@epilogue(O=Tile, s=RowMean)
def rotated(acc, t: RowVector, r: ColVector):
    x, y = pairs(acc)
    cos, sin = pairs(t)
    u, v = x * cos - y * sin, x * sin + y * cos
    return {"O": interleave(u, v) / sqrt(r), "s": u * v}


@epilogue(O=Tile, P=Tile)
def transcendental(acc, C: Tile, E: Tile):
    x = gelu_tanh(acc) + gelu_erf(C) + tanh(E) + softplus(acc)
    return {"O": x, "P": log(exp(-absolute(x)) + 1.0) * rsqrt(x * x + 1.0)}


ELEMENTS: dict[type, str] = {Tile: "bfloat16", ColIndex: "int64"}


@pytest.fixture(scope="module", autouse=True)
def _fresh_cache(tmp_path_factory: pytest.TempPathFactory) -> Iterator[None]:
    """Compile for real: objects of earlier runs are neither found nor left behind."""
    import quack.cache

    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("QUACK_ARCH", "90")
        patch.setenv("CUTE_DSL_ARCH", "sm_90a")
        patch.setattr(quack.cache, "CACHE_DIR", str(tmp_path_factory.mktemp("objects")))
        yield


def build(program: Program, arch: str, config: TileConfig | None = None) -> dict[str, Any]:
    return compile_blind(
        program,
        config or DEFAULT_CONFIGS[arch],
        arch,
        "bfloat16",
        {o: ELEMENTS.get(k, "float32") for o, k in program.operands.items()},
        {o: "bfloat16" for o, k in program.outputs.items() if k in (Tile, HalfTile)},
    )


def demo_programs(name: str) -> tuple[Program, ...]:
    return next(d for d in demos() if d.name == name).programs


@pytest.mark.parametrize(
    "program", [gated, statistics, masked, rotated, transcendental], ids=lambda p: p.name
)
def test_compiles_for_hopper(program: Program) -> None:
    found = build(program, "sm_90a")
    assert 0 < found["registers"] <= 255
    assert found["mma_instructions"] > 0
    assert found["stack_bytes"] == 0
    assert found["local_stores"] == 0
    assert 0 < found["shared_bytes"] <= 227 * 1024 + 1024
    assert cubin(Path(found["object"])).startswith(b"\x7fELF")


@pytest.mark.parametrize("arch", ["sm_100a", "sm_120a"])
def test_compiles_for_blackwell(arch: str) -> None:
    found = build(gated, arch)
    assert found["registers"] > 0
    assert found["mma_instructions"] > 0
    assert found["local_stores"] == 0


def test_a_second_compilation_is_the_same_object_with_its_record() -> None:
    first = build(gated, "sm_90a", TileConfig(128, 192, 1, 1, True))
    second = build(gated, "sm_90a", TileConfig(128, 192, 1, 1, True))
    assert second == first
    text = sass(Path(first["object"]))
    assert "HGMMA.64x192x16.F32.BF16" in text
    assert "MUFU.EX2" in text


def test_renaming_reuses_the_compiled_object() -> None:
    @epilogue(rows=Tile, gates=HalfTile)
    def renamed(acc, scale: ColVector):
        d = scale * acc
        gate, up = pairs(d)
        return {"rows": d, "gates": swiglu(gate, up)}

    assert build(renamed, "sm_90a")["object"] == build(gated, "sm_90a")["object"]


def test_one_program_and_tile_for_two_architectures() -> None:
    tile = DEFAULT_CONFIGS["sm_120a"]
    first, second = build(masked, "sm_90a", tile), build(masked, "sm_120a", tile)
    assert first["object"] != second["object"]
    assert build(masked, "sm_90a", tile) == first


def test_unknown_architecture() -> None:
    with pytest.raises(CompileError) as error:
        build(gated, "sm_80", TileConfig(128, 128))
    assert str(error.value) == (
        "unknown architecture 'sm_80', expected one of sm_90a, sm_100a, sm_120a"
    )


def test_an_impossible_tile_is_a_compile_error() -> None:
    with pytest.raises(CompileError, match=r"gated does not compile as 100x128 coop 1x1: "):
        build(gated, "sm_90a", TileConfig(100, 128))


@pytest.mark.parametrize("arch", ["sm_90a", "sm_100a"])
def test_two_full_width_outputs_on_pairs(arch: str) -> None:
    @epilogue(D=Tile, E=Tile, H=HalfTile)
    def three(acc):
        x, y = pairs(acc)
        return {"D": interleave(y, x), "E": acc, "H": x * y}

    assert build(three, arch)["stack_bytes"] == 0


@pytest.mark.parametrize(
    "program",
    [*demo_programs("cross_entropy"), *demo_programs("column_statistics")],
    ids=lambda p: p.name,
)
def test_gathers_and_column_reductions_compile_for_hopper(program: Program) -> None:
    found = build(program, "sm_90a")
    assert 0 < found["registers"] <= 255
    assert found["mma_instructions"] > 0
    assert found["stack_bytes"] == 0
    assert found["local_stores"] == 0


def test_selecting_reducing_and_storing_pairs_at_once() -> None:
    @epilogue(D=Tile, E=Tile, t=RowGather, lse=RowLogSumExp, g=ColSum)
    def program(acc, y: ColIndex, r: ColVector):
        x, z = pairs(acc)
        turned = interleave(z, x)
        return {"D": acc, "E": turned, "t": gather(turned, y), "lse": x * z, "g": turned + r}

    assert build(program, "sm_90a")["stack_bytes"] == 0


def test_kernel_names_are_positional() -> None:
    @epilogue(h=HalfTile, first=Tile, s=RowSum)
    def program(acc, r: ColVector, X: Tile, alpha: Scalar, Y: Tile):
        d = acc * r + alpha * X + Y
        gate, up = pairs(d)
        return {"h": gate * up, "first": d, "s": d}

    assert kernel_names(program) == {
        "r": "in_0", "X": "c", "alpha": "in_2", "Y": "in_3", "h": "out_0", "first": "D", "s": "out_2",
    }  # fmt: skip
    assert kernel_names(masked) == {
        "b": "in_0", "alpha": "in_1", "O": "D", "s": "out_1", "m": "out_2"
    }  # fmt: skip


def test_only_a_mean_binds_the_block() -> None:
    assert lower(masked, 128).module is lower(masked, 192).module
    assert lower(statistics, 128).module is lower(statistics, 128).module
    assert lower(statistics, 128).module is not lower(statistics, 192).module


def test_lowering_digest() -> None:
    assert len(lowering_digest()) == 64


ZERO: list[tuple[Any, bool]] = [
    (lambda acc, C, r, b, a: acc, True),
    (lambda acc, C, r, b, a: C, True),
    (lambda acc, C, r, b, a: acc * r * a, True),
    (lambda acc, C, r, b, a: acc + C - acc * acc, True),
    (lambda acc, C, r, b, a: -absolute(acc) * 3.0, True),
    (lambda acc, C, r, b, a: relu(acc), True),
    (lambda acc, C, r, b, a: leaky_relu(acc), True),
    (lambda acc, C, r, b, a: tanh(acc) + gelu_tanh(acc) + gelu_erf(acc), True),
    (lambda acc, C, r, b, a: silu(acc), True),
    (lambda acc, C, r, b, a: hard_swish(acc), True),
    (lambda acc, C, r, b, a: sqrt(acc * acc), True),
    (lambda acc, C, r, b, a: interleave(*reversed(pairs(acc))), True),
    (lambda acc, C, r, b, a: acc + b, False),
    (lambda acc, C, r, b, a: acc * b, False),  # what is read past N may be NaN or infinite
    (lambda acc, C, r, b, a: acc + 1.0, False),
    (lambda acc, C, r, b, a: acc + r, False),
    (lambda acc, C, r, b, a: acc + a, False),
    (lambda acc, C, r, b, a: maximum(acc, 0.5), False),
    (lambda acc, C, r, b, a: sigmoid(acc), False),
    (lambda acc, C, r, b, a: softplus(acc), False),
    (lambda acc, C, r, b, a: exp(acc), False),
    (lambda acc, C, r, b, a: log(acc), False),
    (lambda acc, C, r, b, a: rsqrt(acc), False),
    (lambda acc, C, r, b, a: acc / C, False),
    (lambda acc, C, r, b, a: acc * rsqrt(C), False),  # 0 · ∞
    (lambda acc, C, r, b, a: clamp(acc, 1.0, 2.0), False),
]


@pytest.mark.parametrize(("value", "zero"), ZERO)
def test_what_is_zero_past_the_last_column(value: Any, zero: bool) -> None:
    def program(acc, C: Tile, r: ColVector, b: RowVector, a: Scalar):
        everything = acc + C + r + b + a
        return {"O": value(acc, C, r, b, a), "used": everything}

    graph = epilogue(O=Tile, used=Tile)(program).graph
    assert zero_preserving(graph)[graph.outputs["O"]] is zero


ZERO_BELOW: list[tuple[Any, bool]] = [
    (lambda acc, C, r, b, a: acc, True),
    (lambda acc, C, r, b, a: acc * C, True),
    (lambda acc, C, r, b, a: acc * b, True),  # a row vector is whole in every row of tiles
    (lambda acc, C, r, b, a: acc * b * a - C * (b + 1.0), True),
    (lambda acc, C, r, b, a: acc * (a * 2.0), True),
    (lambda acc, C, r, b, a: silu(acc) * b, True),
    (lambda acc, C, r, b, a: interleave(pairs(acc)[1] * pairs(b)[0], 0.0), True),
    (lambda acc, C, r, b, a: acc * sigmoid(b), True),
    (lambda acc, C, r, b, a: acc * r, False),  # what is read past M may be NaN or infinite
    (lambda acc, C, r, b, a: acc * (r * b), False),
    (lambda acc, C, r, b, a: acc * sigmoid(r), False),
    (lambda acc, C, r, b, a: acc + r, False),
    (lambda acc, C, r, b, a: acc + b, False),
    (lambda acc, C, r, b, a: acc + b * a, False),
    (lambda acc, C, r, b, a: r * b, False),
    (lambda acc, C, r, b, a: acc * rsqrt(b), False),  # 0 · ∞
    (lambda acc, C, r, b, a: interleave(pairs(acc)[0], pairs(b)[1] * pairs(acc)[1] + 1.0), False),
    (lambda acc, C, r, b, a: sigmoid(acc), False),
    (lambda acc, C, r, b, a: exp(acc) * b, False),
]


@pytest.mark.parametrize(("value", "zero"), ZERO_BELOW)
def test_what_is_zero_past_the_last_row(value: Any, zero: bool) -> None:
    def program(acc, C: Tile, r: ColVector, b: RowVector, a: Scalar):
        everything = acc + C + r + b + a
        return {"O": value(acc, C, r, b, a), "used": everything}

    graph = epilogue(O=Tile, used=Tile)(program).graph
    assert zero_preserving(graph, past_rows=True)[graph.outputs["O"]] is zero


def test_sums_over_rows_are_masked_by_what_lies_past_the_last_row() -> None:
    @epilogue(D=Tile, by_r=ColSum, by_b=ColSum, across_r=RowSum, across_b=RowSum, top=ColMax)
    def program(acc, r: ColVector, b: RowVector):
        u, v = acc * r, acc * b
        return {"D": acc, "by_r": u, "by_b": v, "across_r": u, "across_b": v, "top": u}

    replay = Replay(program, kernel_names(program), 0)
    assert replay.masked == {"by_r", "across_b"}
    assert replay.scaled == {"by_b", "across_r"}
    kinds = {o: type(replay.sink(o)).__name__ for o in program.reductions}
    assert kinds == {
        "by_r": "MaskedColSum",
        "by_b": "RowVecReduce",
        "across_r": "ColVecReduce",
        "across_b": "MaskedRowSum",
        "top": "RowVecReduce",
    }


def test_log_sum_exp_is_a_reduction_of_its_own() -> None:
    @epilogue(Z=Tile, lse=RowLogSumExp)
    def program(acc):
        return {"Z": acc, "lse": acc + 1.0}

    replay = Replay(program, kernel_names(program), 0)
    assert replay.masked == replay.scaled == set()
    assert type(replay.sink("lse")).__name__ == "OnlineLSEReduce"


def test_the_index_of_a_gather() -> None:
    @epilogue(Z=Tile, t=RowGather, u=RowGather)
    def program(acc, first: ColIndex, second: ColIndex):
        return {"Z": acc, "t": gather(acc, second), "u": gather(acc * 2.0, first)}

    replay = Replay(program, kernel_names(program), 0)
    assert (replay.index_of("t"), replay.index_of("u")) == ("second", "first")


def test_sums_are_masked_where_needed_and_maxima_left_to_quack() -> None:
    @epilogue(D=Tile, plain=RowSum, shifted=RowSum, mean=RowMean, top=RowMax)
    def program(acc):
        return {"D": acc, "plain": acc, "shifted": acc + 1.0, "mean": exp(acc), "top": exp(acc)}

    replay = Replay(program, kernel_names(program), 128)
    assert replay.masked == {"shifted", "mean"}
    kinds = {o: type(replay.sink(o)).__name__ for o in program.reductions}
    assert kinds == {
        "plain": "ColVecReduce",
        "shifted": "MaskedRowSum",
        "mean": "MaskedRowSum",
        "top": "ColVecReduce",
    }


def test_fused_sums() -> None:
    assert Replay(statistics, kernel_names(statistics), 128).scaled == {"s"}
    assert Replay(masked, kernel_names(masked), 128).scaled == set()
    assert Replay(rotated, kernel_names(rotated), 128).scaled == set()  # element mode only


def test_offered_tiles() -> None:
    assert set(offered(True)) <= set(offered(False)) == set(SM90_CONFIGS)
    assert all(c.tile_n % 32 == 0 for c in offered(True))
    assert DEFAULT_CONFIGS["sm_90a"] in offered(True)
    assert TileConfig(128, 192, 2, 1, True).label == "128x192 pp 2x1"
    assert TileConfig(256, 128, 1, 2, swizzle=4).label == "256x128 coop 1x2 s4"
    assert len({c.label for c in SM90_CONFIGS}) == len(SM90_CONFIGS)


def test_a_second_process_finds_every_tile_in_the_cache(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What a worker compiles tile by tile, the judging process loads while it keeps its modules."""
    from quack.gemm_runtime import host

    @epilogue(O=Tile)
    def scaled(acc, r: ColVector, b: RowVector):
        return {"O": acc * r + b}

    use_cache(tmp_path)
    types = ("sm_90a", "bfloat16", {"r": "float32", "b": "bfloat16"}, {"O": "bfloat16"})
    tiles = [TileConfig(128, 128, 2, 1, True), TileConfig(128, 256, 2, 1)]
    for config in tiles:
        compile_blind(scaled, config, *types)
    forget()

    def compiled_again(*_: object, **__: object) -> None:
        raise AssertionError("this tile was not found in the cache")

    monkeypatch.setattr(host, "compile_gemm_kernel", compiled_again)
    meta = {"device": "meta", "dtype": torch.bfloat16}
    a, b, o = (torch.empty(*s, **meta) for s in ((77, 64), (272, 64), (77, 272)))
    operands = {"r": torch.empty(77, device="meta"), "b": torch.empty(272, **meta)}
    with target("sm_90a"):
        for config in tiles:
            launch(scaled, a, b, operands, {"O": o}, config, run=False)
