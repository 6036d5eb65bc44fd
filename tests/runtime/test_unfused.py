"""The unfused form: cuBLAS's product, and a kernel that replays the graph on it."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.judge.compile_gate import lacking
from coda_agent.agent.judge.job import CompileJob
from coda_agent.primitives import (
    AddTile,
    ColIndex,
    ColSum,
    ColVector,
    HalfTile,
    HeadTable,
    RowGather,
    RowLogSumExp,
    RowMax,
    RowMean,
    RowVector,
    Scalar,
    Tile,
    WideTile,
    epilogue,
    gather,
    interleave,
    pairs,
)
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.inspect import launches
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import (
    DEFAULT_CONFIGS,
    UNFUSED,
    UNFUSED_ROWS,
    TileConfig,
    unfused_forms,
)
from coda_agent.runtime import unfused
from coda_agent.runtime.function import reduction_block
from coda_agent.runtime.launch import Arguments, allocate, launch
from coda_agent.runtime.plan import finalised
from coda_agent.runtime.target import sass
from tests.programs import built


@epilogue(D=Tile, s=RowMean, lse=RowLogSumExp, t=RowGather, g=ColSum)
def all_reductions(acc, c: Tile, w: RowVector, y: ColIndex):
    d = acc + c
    return {"D": d, "s": d * d, "lse": d, "t": gather(d, y), "g": acc * w}


@epilogue(X=AddTile, O=HalfTile, m=RowMax)
def paired(acc, r: ColVector, cs: HeadTable, alpha: Scalar):
    x, y = pairs(acc * r)
    cosine, sine = pairs(cs)
    return {"X": interleave(x * cosine, y * sine), "O": x * y * alpha, "m": x}


@epilogue(dZ=WideTile)
def widened(acc, Z: WideTile):
    gate, up = pairs(Z)
    return {"dZ": interleave(acc * up, acc * gate)}


@pytest.fixture(autouse=True)
def _forgotten(fresh_cache: None) -> Iterator[None]:
    yield
    unfused.forget()


@pytest.mark.parametrize(
    ("program", "config"),
    [(p, c) for p in (all_reductions, paired, widened) for c in unfused_forms(p)],
    ids=lambda x: x.label if isinstance(x, TileConfig) else x.name,
)
@pytest.mark.one_in(2)
def test_every_kind_compiles_into_wide_accesses(program: Program, config: TileConfig) -> None:
    found = built(program, config=config)
    text = sass(Path(found["object"]))
    assert found["stack_bytes"] == found["local_stores"] == found["mma_instructions"] == 0
    threads = config.tile_n // 8
    assert 0 < found["registers"] * max(threads, 384) <= 65536
    # A row takes two loads of the product; where an operand, an output or the rows of a group
    # were taken element by element, there would be many more.
    loads = text.count("LDG.E.128")
    assert loads >= 2 * min(config.tile_m, 4)
    assert "STG.E.128" in text and "ACQBULK" in text


def test_an_object_is_found_again_and_is_not_that_of_another_type() -> None:
    first = built(widened, config=UNFUSED[0])
    assert built(widened, config=UNFUSED[0]) == first
    other = built(widened, "sm_90a", UNFUSED[0], "float16", "float16")
    assert other["object"] != first["object"] != built(widened, config=UNFUSED[1])["object"]


def test_the_compile_gate_asks_for_no_tensor_core_of_an_elementwise_kernel() -> None:
    job = CompileJob.of(widened, UNFUSED[0], "sm_90a", None, "bfloat16")
    fused = CompileJob.of(widened, DEFAULT_CONFIGS["sm_90a"], "sm_90a", None, "bfloat16")
    assert lacking(job, {}) == ""
    assert lacking(job, {"HGMMA.F32.BF16": 1}) == "an elementwise kernel multiplies matrices"
    assert lacking(fused, {}) != ""


@pytest.mark.parametrize("block", [(0, 1024), (64, 1024), (1, 128), (1, 16384)])
def test_a_block_that_the_kernel_has_not(block: tuple[int, int]) -> None:
    with pytest.raises(CompileError, match="a block has 1 to 32 rows and a multiple of 256"):
        built(widened, config=TileConfig(*block, fused=False))


def test_what_a_call_declares() -> None:
    few, whole, down = UNFUSED[0], UNFUSED_ROWS, TileConfig(16, 256, fused=False)
    # The product, the kernel, and a fold of the reductions of more than one block.
    assert [launches(all_reductions, few, shape) for shape in ((1, 256), (1, 512), (2, 256))] == [
        2, 3, 3,
    ]  # fmt: skip
    assert [launches(all_reductions, whole, shape) for shape in ((1, 8192), (2, 8200))] == [2, 3]
    assert [launches(all_reductions, down, shape) for shape in ((16, 256), (17, 264))] == [2, 3]
    assert unfused_forms(all_reductions) == (*UNFUSED, whole)
    assert unfused_forms(paired) == (*UNFUSED, whole) and unfused_forms(widened) == UNFUSED
    # Raw partials are promised from one launch.
    assert reduction_block(paired, UNFUSED[0]) is None


def test_the_kernel_gets_the_product_then_operands_and_outputs(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    seen: list[tuple[Any, ...]] = []
    monkeypatch.setattr(unfused, "prepare", lambda *_: seen.append)
    monkeypatch.setattr(unfused, "product", lambda a, b: a.float() @ b.float().mT)
    a, b = torch.randn(3, 8), torch.randn(16, 8)
    x = {"r": torch.ones(3), "cs": torch.ones(3, 32), "alpha": 2}
    outputs = allocate(paired, 3, 16, dict.fromkeys("XOm", torch.float32), UNFUSED[0], a.device)
    launch(Arguments(paired, a, b, x, outputs, UNFUSED[0]))
    launch(Arguments(paired, a, b, {**x, "alpha": torch.tensor(2.0)}, outputs, UNFUSED[0]))
    product, r, cs, alpha, *stored = seen[0]
    assert torch.equal(product, a @ b.mT) and (r, cs, alpha) == (x["r"], x["cs"], 2.0)
    assert stored == [*outputs.values()]
    assert seen[1][3].shape == (1,)


def test_one_block_is_final_and_more_are_folded() -> None:
    whole, parts = torch.rand(3, 1), torch.rand(3, 3)
    column = torch.rand(1, 16)
    outputs = {"D": torch.zeros(3, 16), "s": whole, "lse": parts, "t": whole[:, 0], "g": column}
    found = finalised(all_reductions, outputs, 3, 16, TileConfig(4, 256, fused=False))
    assert torch.equal(found["s"], whole[:, 0]) and torch.equal(found["g"], column[0])
    # A fused kernel's mean is over its tile, which may be wider than the row.
    wide = finalised(all_reductions, outputs, 3, 16, TileConfig(128, 128))
    torch.testing.assert_close(wide["s"], whole[:, 0] * 8)
    blocks = finalised(
        all_reductions,
        {**outputs, "s": parts, "g": parts.mT},
        9,
        600,
        TileConfig(4, 256, fused=False),
    )
    torch.testing.assert_close(blocks["s"], parts.sum(-1) * 256 / 600)
    torch.testing.assert_close(blocks["lse"], parts.logsumexp(-1))
    torch.testing.assert_close(blocks["g"], parts.sum(-1))
