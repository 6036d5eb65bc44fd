"""Programs as functions, on a machine without a GPU: checks, batches, strides, raw partials."""

import re
import warnings
from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode

from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColMax,
    ColSum,
    ColVector,
    HalfTile,
    RowGather,
    RowLogSumExp,
    RowMean,
    RowVector,
    Scalar,
    Tile,
    epilogue,
    gather,
    pairs,
    swiglu,
)
from coda_agent.primitives.errors import LaunchError
from coda_agent.primitives.interpret import interpret
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime import function as function_module
from coda_agent.runtime.function import ProgramFunction, supported, untuned
from coda_agent.runtime.plan import tma_ready

M, N, K = 24, 272, 32


@epilogue(D=Tile, O=HalfTile, s=RowMean)
def program(acc, C: Tile, r: ColVector, b: RowVector, beta: Scalar):
    d = acc * r + b + beta * C
    gate, up = pairs(d)
    return {"D": d, "O": swiglu(gate, up), "s": d * d}


@epilogue(O=Tile)
def doubled(acc):
    return {"O": acc * 2.0}


RUN = ProgramFunction(program, {"D": None, "O": "float32"}, untuned)
DOUBLED = ProgramFunction(doubled, {"O": None}, untuned)
Operands = dict[str, Any]
Given = tuple[torch.Tensor, torch.Tensor, Operands]
Tall = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


@pytest.fixture(autouse=True)
def _quiet() -> Iterator[None]:
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message="coda-agent: no Hopper GPU")
        yield


@pytest.fixture
def tensors() -> Given:
    g = torch.Generator().manual_seed(0)
    a = torch.randn(M, K, generator=g).bfloat16()
    b = (torch.randn(N, K, generator=g) * K**-0.5).bfloat16()
    operands = {
        "C": torch.randn(M, N, generator=g).bfloat16(),
        "r": torch.randn(M, generator=g),
        "b": torch.randn(N, generator=g),
        "beta": 0.5,
    }
    return a, b, operands


def test_interprets_with_one_warning(tensors: Given) -> None:
    a, b, operands = tensors
    function_module._say_interpreted.cache_clear()
    with pytest.warns(UserWarning, match="no Hopper GPU behind tensors on cpu") as caught:
        RUN(a, b, operands)
        RUN(a, b, operands)
        DOUBLED(a, b, {})
    assert len(caught) == 1


def test_equals_the_interpreter_and_has_the_declared_dtypes(tensors: Given) -> None:
    a, b, operands = tensors
    got = RUN(a, b, operands)
    dtypes = {"D": torch.bfloat16, "O": torch.float32}
    want = interpret(program, a, b, operands, dtypes=dtypes)
    assert list(got) == ["D", "O", "s"]
    for o, value in want.items():
        assert torch.equal(got[o], value), o
        assert got[o].dtype == value.dtype
    assert got["s"].shape == (M,)
    assert got["s"].dtype == torch.float32


def test_a_none_dtype_follows_the_input(tensors: Given) -> None:
    a, b, _ = tensors
    assert DOUBLED(a.half(), b.half(), {})["O"].dtype == torch.float16


def test_leading_batch_dimensions(tensors: Given) -> None:
    a, b, operands = tensors
    want = RUN(a, b, operands)
    lead = (2, 3, M // 6)
    batched = {
        **operands, "C": operands["C"].reshape(*lead, N), "r": operands["r"].reshape(lead)
    }  # fmt: skip
    got = RUN(a.reshape(*lead, K), b, batched)
    assert got["D"].shape == (*lead, N)
    assert got["O"].shape == (*lead, N // 2)
    assert got["s"].shape == lead
    for o in want:
        assert torch.equal(got[o].flatten(0, 2), want[o])
    raw = RUN(a.reshape(*lead, K), b, batched, block_size=128)
    assert raw["s"].shape == (*lead, 3)


def test_block_size_returns_raw_partials(tensors: Given) -> None:
    a, b, operands = tensors
    final = RUN(a, b, operands)["s"]
    for block, blocks in ((64, 5), (128, 3), (160, 2), (192, 2), (256, 2)):
        raw = RUN(a, b, operands, block_size=block)["s"]
        assert raw.shape == (M, blocks)
        assert raw.dtype == torch.float32
        torch.testing.assert_close(raw.sum(-1) * block / N, final)


def test_an_unoffered_block_size_names_the_offered_ones(tensors: Given) -> None:
    a, b, operands = tensors
    with pytest.raises(LaunchError) as error:
        RUN(a, b, operands, block_size=100)
    assert str(error.value) == (
        "program: no tile has block_size 100, expected one of 64, 128, 160, 192, 256"
    )
    assert isinstance(error.value, ValueError)


def test_the_chooser_sees_the_problem(tensors: Given) -> None:
    a, b, operands = tensors
    seen: list[tuple[int, int, int, str, int | None]] = []

    def choose(m: int, n: int, k: int, dtype: str, block: int | None) -> TileConfig:
        seen.append((m, n, k, dtype, block))
        return TileConfig(128, 192)

    bound = ProgramFunction(program, {}, choose)
    raw = bound(a, b, operands, block_size=192)["s"]
    assert seen == [(M, N, K, "bfloat16", 192)]
    assert raw.shape == (M, 2)
    bound(a, b, operands, config=TileConfig(128, 128))
    assert len(seen) == 1


def strided(t: torch.Tensor) -> list[torch.Tensor]:
    """`t` with other strides and offsets: transposed storage, spaced columns, a shifted start."""
    spaced = torch.zeros(*t.shape[:-1], t.shape[-1] * 2, dtype=t.dtype)
    spaced[..., 1::2] = t
    flat = torch.zeros(t.numel() + 3, dtype=t.dtype)
    flat[3:] = t.flatten()
    found = [spaced[..., 1::2], flat[3:].view(t.shape)]
    if t.ndim == 2:
        found.append(t.T.contiguous().T)
    return found


def test_strides_and_offsets_do_not_matter(tensors: Given) -> None:
    a, b, operands = tensors
    want = RUN(a, b, operands)
    cases = [(x, b, operands) for x in strided(a)] + [(a, x, operands) for x in strided(b)]
    for o in ("C", "r", "b"):
        cases += [(a, b, {**operands, o: x}) for x in strided(operands[o])]
    assert len(cases) == 13
    for case in cases:
        got = RUN(*case)
        for o in want:
            torch.testing.assert_close(got[o], want[o], rtol=1e-6, atol=1e-6)
    expanded = {**operands, "r": torch.ones(1).expand(M)}
    dense = {**operands, "r": torch.ones(M)}
    assert torch.equal(RUN(a, b, expanded)["D"], RUN(a, b, dense)["D"])


def test_vectors_of_any_float_dtype(tensors: Given) -> None:
    a, b, operands = tensors
    rounded = {**operands, "r": operands["r"].bfloat16(), "b": operands["b"].half()}
    widened = {**operands, "r": rounded["r"].float(), "b": rounded["b"].float()}
    assert torch.equal(RUN(a, b, rounded)["D"], RUN(a, b, widened)["D"])


def bf16(*shape: int) -> torch.Tensor:
    return torch.zeros(*shape, dtype=torch.bfloat16)


A, B = bf16(M, K), bf16(N, K)


def misfit(a: torch.Tensor, b: torch.Tensor, expected: str) -> tuple[object, torch.Tensor, str]:
    return a, b, f"A is {tuple(a.shape)} and B {tuple(b.shape)}, expected {expected}"


def ragged(n: int, k: int) -> tuple[object, torch.Tensor, str]:
    said = f"N, K = {n}, {k}, expected positive, N a multiple of 8 and K of 8"
    return bf16(M, k), bf16(n, k), f"{said} (TMA moves rows in units of 16 bytes; pad the weight)"


GEMM_ERRORS: dict[str, tuple[Any, torch.Tensor, str]] = {
    "float32 A": (A.float(), B, "A is torch.float32, expected a bfloat16 or float16 tensor"),
    "list": ([[1.0]], B, "A is list, expected a bfloat16 or float16 tensor"),
    "integer B": (A, B.int(), "B is torch.int32, expected a bfloat16 or float16 tensor"),
    "two dtypes": (A, B.half(), "A is torch.bfloat16 and B torch.float16, expected one dtype"),
    "K differs": misfit(A, bf16(N, 40), "one K, the last dimension of both"),
    "B transposed": misfit(A, bf16(K, N), "one K, the last dimension of both (B is transposed: give B.mT)"),
    "vector A": misfit(bf16(K), B, "(…, M, K) and (N, K)"),
    "batched B": misfit(A, bf16(2, N, K), "(…, M, K) and (N, K)"),
    "no columns": ragged(0, K),
    "K = 0": ragged(N, 0),
    "ragged K": ragged(N, 36),
    "ragged N": ragged(270, K),
    "another device": (A, bf16(N, K).to("meta"), "B is on meta, A on cpu"),
    "rows beyond 32 bits": (A[:1].expand(1 << 31, -1), B, "M, N, K = 2147483648, 272, 32, expected each below 2³¹"),
}  # fmt: skip


@pytest.mark.parametrize("name", GEMM_ERRORS)
def test_error_in_the_gemm_operands(name: str) -> None:
    a, b, message = GEMM_ERRORS[name]
    with pytest.raises(LaunchError) as error:
        DOUBLED(a, b, {})
    assert str(error.value) == f"doubled: {message}"


def test_half_width_outputs_need_columns_in_sixteens() -> None:
    assert DOUBLED(A, bf16(264, K), {})["O"].shape == (M, 264)
    with pytest.raises(LaunchError, match=r"N a multiple of 16 and K of 8"):
        RUN(A, bf16(264, K), {})


OPERAND_ERRORS: list[tuple[str, object, str]] = [
    ("C", None, "program: operand 'C' is missing"),
    ("beta", None, "program: operand 'beta' is missing"),
    ("C", bf16(N, M), "program: operand 'C' has shape (272, 24), expected (24, 272)"),
    ("C", bf16(N), "program: operand 'C' has shape (272,), expected (24, 272)"),
    ("r", torch.ones(N), "program: operand 'r' has shape (272,), expected (24,)"),
    ("r", torch.ones(M, 1), "program: operand 'r' has shape (24, 1), expected (24,)"),
    ("b", torch.ones(M), "program: operand 'b' has shape (24,), expected (272,)"),
    ("b", 1.5, "program: operand 'b' has shape 1.5, expected (272,)"),
    ("b", torch.ones(N, device="meta"), "program: operand 'b' is on meta, A on cpu"),
]  # fmt: skip


@pytest.mark.parametrize(("name", "value", "message"), OPERAND_ERRORS)
def test_error_in_an_operand(tensors: Given, name: str, value: object, message: str) -> None:
    a, b, operands = tensors
    with pytest.raises(LaunchError) as error:
        RUN(a, b, {**operands, name: value})
    assert str(error.value) == message


def test_an_operand_left_out_is_missing(tensors: Given) -> None:
    a, b, operands = tensors
    del operands["r"]
    with pytest.raises(LaunchError, match=re.escape("program: operand 'r' is missing")):
        RUN(a, b, operands)


def test_a_cpu_is_not_supported() -> None:
    assert not supported(torch.device("cpu"))


def test_tma_ready_copies_only_what_it_must() -> None:
    t = bf16(16, 32)
    assert tma_ready(t) is t
    transposed = t.T
    assert tma_ready(transposed, either_major=True) is transposed
    assert tma_ready(transposed).is_contiguous()
    block = bf16(16, 64)[:, 32:]
    assert tma_ready(block) is block  # row stride 128 bytes, start 64 bytes in
    for awkward in (bf16(16, 65)[:, :32], bf16(16, 64)[:, 1:33], bf16(16, 64)[:, ::2]):
        ready = tma_ready(awkward, either_major=True)
        assert ready.is_contiguous() and ready.data_ptr() % 16 == 0
        assert torch.equal(ready, awkward)
    row = bf16(16, 39)[:1, :32]  # contiguous to torch, at a stride that TMA cannot take
    assert tma_ready(row).stride() == (32, 1) and torch.equal(tma_ready(row), row)
    shifted = torch.arange(33, dtype=torch.float32)[1:]
    assert tma_ready(shifted).data_ptr() % 16 == 0
    assert torch.equal(tma_ready(shifted), shifted)


@epilogue(D=Tile, g=ColSum, top=ColMax)
def over_rows(acc, C: Tile):
    return {"D": acc, "g": acc * C, "top": acc}


@epilogue(D=Tile, s=RowMean, g=ColSum)
def both_ways(acc):
    return {"D": acc, "s": acc, "g": acc}


@epilogue(Z=Tile, lse=RowLogSumExp, target=RowGather)
def logits(acc, y: ColIndex):
    return {"Z": acc, "lse": acc, "target": gather(acc, y)}


OVER_ROWS = ProgramFunction(over_rows, {}, untuned)
BOTH_WAYS = ProgramFunction(both_ways, {}, untuned)
LOGITS = ProgramFunction(logits, {}, untuned)
TALL = 300


@pytest.fixture
def tall() -> Tall:
    g = torch.Generator().manual_seed(1)
    a = torch.randn(TALL, K, generator=g).bfloat16()
    b = (torch.randn(N, K, generator=g) * K**-0.5).bfloat16()
    return a, b, torch.randn(TALL, N, generator=g).bfloat16()


@pytest.mark.parametrize(("block", "blocks"), [(64, 5), (128, 3), (192, 2), (256, 2)])
def test_block_size_of_reductions_over_rows_is_the_tile_height(
    tall: Tall, block: int, blocks: int
) -> None:
    a, b, c = tall
    final = OVER_ROWS(a, b, {"C": c})
    raw = OVER_ROWS(a, b, {"C": c}, block_size=block)
    product = (a.float() @ b.float().T) * c.float()
    for o in ("g", "top"):
        assert final[o].shape == (N,)
        assert raw[o].shape == (N, blocks)
        assert raw[o].dtype == final[o].dtype == torch.float32
    torch.testing.assert_close(raw["g"][:, 0], product[:block].sum(0), rtol=1e-4, atol=1e-4)
    torch.testing.assert_close(raw["g"].sum(-1), final["g"], rtol=1e-4, atol=1e-4)
    assert torch.equal(raw["top"].amax(-1), final["top"])


def test_a_height_no_tile_has_names_the_offered_ones(tall: Tall) -> None:
    a, b, c = tall
    with pytest.raises(LaunchError) as error:
        OVER_ROWS(a, b, {"C": c}, block_size=160)  # a width
    assert str(error.value) == (
        "over_rows: no tile has block_size 160, expected one of 64, 128, 192, 256"
    )


@pytest.mark.parametrize("config", [TileConfig(256, 128, 2, 1), TileConfig(128, 192, 1, 1, True)])
def test_raw_partials_follow_the_configuration(tall: Tall, config: TileConfig) -> None:
    a, b, _ = tall
    raw = BOTH_WAYS(a, b, {}, config=config, block_size=config.tile_n)
    assert raw["s"].shape == (TALL, -(-N // config.tile_n))
    assert raw["g"].shape == (N, -(-TALL // config.tile_m))


def test_reductions_both_ways_need_a_square_tile(tall: Tall) -> None:
    a, b, _ = tall
    raw = BOTH_WAYS(a, b, {}, block_size=192)
    assert raw["s"].shape == (TALL, 2)
    assert raw["g"].shape == (N, 2)
    with pytest.raises(LaunchError) as error:
        BOTH_WAYS(a, b, {}, block_size=256)
    assert str(error.value) == "both_ways: no tile has block_size 256, expected one of 128, 192"


def test_reductions_over_rows_take_all_leading_dimensions_together(tall: Tall) -> None:
    a, b, c = tall
    want = OVER_ROWS(a, b, {"C": c})
    lead = (2, 3, TALL // 6)
    batched = {"C": c.reshape(*lead, N)}
    got = OVER_ROWS(a.reshape(*lead, K), b, batched)
    assert got["D"].shape == (*lead, N)
    for o in ("g", "top"):
        assert torch.equal(got[o], want[o])
    raw = OVER_ROWS(a.reshape(*lead, K), b, batched, block_size=128)
    assert raw["g"].shape == (N, 3)


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
def test_an_index_takes_leading_dimensions(tall: Tall, kind: torch.dtype) -> None:
    a, b, _ = tall
    y = torch.randint(N, (TALL,), generator=torch.Generator().manual_seed(2)).to(kind)
    y[::7] = -100
    y[1::7] = N
    want = LOGITS(a, b, {"y": y})
    acc = a.float() @ b.float().T
    inside = (y >= 0) & (y < N)
    found = acc[range(TALL), y.long().clamp(0, N - 1)] * inside
    torch.testing.assert_close(want["target"], found, rtol=1e-6, atol=1e-6)
    assert (want["target"][~inside] == 0).all()
    torch.testing.assert_close(want["lse"], acc.logsumexp(-1), rtol=1e-6, atol=1e-5)
    lead = (2, 3, TALL // 6)
    got = LOGITS(a.reshape(*lead, K), b, {"y": y.reshape(lead)})
    for o in ("lse", "target"):
        assert got[o].shape == lead
        assert got[o].dtype == torch.float32
        assert torch.equal(got[o].flatten(), want[o])
    for strided_index in strided(y):
        assert torch.equal(LOGITS(a, b, {"y": strided_index})["target"], want["target"])


@pytest.mark.parametrize(
    ("shape", "message"),
    [
        ((N,), "logits: operand 'y' has shape (272,), expected (2, 150)"),
        ((TALL,), "logits: operand 'y' has shape (300,), expected (2, 150)"),
        ((2, 150, 1), "logits: operand 'y' has shape (2, 150, 1), expected (2, 150)"),
        ((1, 150), "logits: operand 'y' has shape (1, 150), expected (2, 150)"),
    ],
)
def test_wrong_shape_of_an_index(tall: Tall, shape: tuple[int, ...], message: str) -> None:
    a, b, _ = tall
    with pytest.raises(LaunchError) as error:
        LOGITS(a.reshape(2, 150, K), b, {"y": torch.zeros(shape, dtype=torch.int64)})
    assert str(error.value) == message


@pytest.mark.parametrize("kind", [torch.float32, torch.bool])
def test_an_index_must_be_of_integers(tall: Tall, kind: torch.dtype) -> None:
    a, b, _ = tall
    with pytest.raises(LaunchError, match="'y'"):
        LOGITS(a, b, {"y": torch.zeros(TALL, dtype=kind)})


def test_raw_log_sum_exp_of_an_index_program(tall: Tall) -> None:
    a, b, _ = tall
    y = torch.zeros(TALL, dtype=torch.int64)
    raw = LOGITS(a, b, {"y": y}, block_size=128)
    assert raw["lse"].shape == (TALL, 3)
    assert raw["target"].shape == (TALL,)
    final = LOGITS(a, b, {"y": y})
    torch.testing.assert_close(raw["lse"].logsumexp(-1), final["lse"])


@epilogue(
    D=Tile, O=HalfTile, s=RowMean, h=RowMean, g=ColSum, top=ColMax, lse=RowLogSumExp, t=RowGather
)
def of_every_kind(acc, y: ColIndex):
    gate, up = pairs(acc)
    o = swiglu(gate, up)
    return {
        "D": acc, "O": o, "s": acc, "h": o, "g": acc, "top": acc, "lse": acc, "t": gather(acc, y)
    }  # fmt: skip


OF_EVERY_KIND = ProgramFunction(of_every_kind, {"O": "float16"}, untuned)


def face(t: torch.Tensor) -> tuple[object, ...]:
    strides = tuple(s for s, extent in zip(t.stride(), t.shape, strict=True) if extent > 1)
    return t.shape, t.dtype, t.device.type, strides


@pytest.mark.parametrize("lead", [(TALL,), (1,), (2, 3, 50), (0,), (2, 0, 3)], ids=str)
@pytest.mark.parametrize("block", [None, 128], ids=str)
def test_fake_results_look_like_real_ones(lead: tuple[int, ...], block: int | None) -> None:
    a, b, y = bf16(*lead, K), bf16(N, K), torch.zeros(lead, dtype=torch.int64)
    real = OF_EVERY_KIND(a, b, {"y": y}, block_size=block)
    with FakeTensorMode() as mode:
        x, w, index = (mode.from_tensor(t) for t in (a, b, y))
        fake = OF_EVERY_KIND.fake(x, w, {"y": index}, block_size=block)
    assert {o: face(t) for o, t in fake.items()} == {o: face(t) for o, t in real.items()}
    with pytest.raises(LaunchError, match="no tile has block_size 96"):
        OF_EVERY_KIND.fake(a, b, {"y": y}, block_size=96)


def test_no_rows_give_empty_results_and_the_identity_of_each_column() -> None:
    a, y = bf16(0, K), torch.zeros(0, dtype=torch.int32)
    got = OF_EVERY_KIND(a, B, {"y": y})
    shapes = {o: tuple(t.shape) for o, t in got.items()}
    assert shapes == {
        "D": (0, N), "O": (0, N // 2), "s": (0,), "h": (0,), "g": (N,), "top": (N,), "lse": (0,),
        "t": (0,),
    }  # fmt: skip
    assert torch.equal(got["g"], torch.zeros(N))
    assert torch.equal(got["top"], torch.full((N,), -torch.inf))
    raw = OF_EVERY_KIND(a, B, {"y": y}, block_size=128)
    assert raw["s"].shape == raw["lse"].shape == (0, 3)
    assert raw["g"].shape == raw["top"].shape == (N, 0)


def test_a_refused_tile_gives_no_block_size(tall: Tall) -> None:
    a, b, c = tall
    refused = frozenset({"64x256 pp 2x1", "192x128 pp 1x2"})
    bound = ProgramFunction(over_rows, {}, untuned, refused=refused)
    with pytest.raises(LaunchError, match="no tile has block_size 64, expected one of 128, 192"):
        bound(a, b, {"C": c}, block_size=64)
    assert torch.equal(
        bound(a, b, {"C": c}, block_size=192)["top"],
        OVER_ROWS(a, b, {"C": c}, block_size=192)["top"],
    )


def test_a_scalar_may_be_a_tensor_of_one_element(tensors: Given) -> None:
    a, b, operands = tensors
    want = RUN(a, b, {**operands, "beta": 0.75})
    for beta in (torch.tensor(0.75), torch.full((1,), 0.75)):
        got = RUN(a, b, {**operands, "beta": beta})
        for o in want:
            assert torch.equal(got[o], want[o]), o
    for beta in (torch.tensor(0.75).bfloat16(), torch.full((2,), 0.75)):
        with pytest.raises(LaunchError, match="expected a number or one float32"):
            RUN(a, b, {**operands, "beta": beta})
    with pytest.raises(LaunchError, match="operand 'beta' is on meta, A on cpu"):
        RUN(a, b, {**operands, "beta": torch.empty((), device="meta")})


def test_types_of_the_product_are_the_declared_ones() -> None:
    half = ProgramFunction(doubled, {}, untuned, ("float16",))
    with pytest.raises(LaunchError, match=r"A is torch\.bfloat16, expected a float16 tensor"):
        half(A, B, {})


@epilogue(X=AddTile, s=RowMean)
def accumulating(acc, r: ColVector):
    return {"X": acc * r, "s": acc}


def test_what_is_added_to_is_updated_in_place_whatever_its_strides(tall: Tall) -> None:
    a, b, held = tall
    r = torch.rand(TALL, generator=torch.Generator().manual_seed(3))
    add = ProgramFunction(accumulating, {"X": None, "s": "float32"}, untuned)
    delta = ((a.float() @ b.float().T) * r[:, None]).bfloat16()
    want = (held.float() + delta.float()).bfloat16()
    rows_apart = held.unflatten(0, (2, 150)).transpose(0, 1).contiguous().transpose(0, 1)
    for lead in ((TALL,), (2, 150)):
        flat = [x.unflatten(0, lead) for x in (held.clone(), *strided(held))]
        for x in flat if len(lead) == 1 else [*flat, rows_apart]:
            operands = {"r": r.reshape(lead), "X": x}
            got = add(a.reshape(*lead, K), b, operands)
            assert got["X"] is x
            torch.testing.assert_close(x.reshape(TALL, N), want, rtol=2**-7, atol=1e-5)
            assert got["s"].shape == lead
    empty = bf16(0, N)
    assert add(bf16(0, K), B, {"r": torch.ones(0), "X": empty})["X"] is empty
    for x, message in (
        (held[:, :8], r"operand 'X' has shape \(300, 8\), expected \(300, 272\)"),
        (held.float(), "operand 'X' is torch.float32, expected torch.bfloat16"),
        (None, "operand 'X' is missing"),
    ):
        with pytest.raises(LaunchError, match=message):
            add(a, b, {"r": r, "X": x})
