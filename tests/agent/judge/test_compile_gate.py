"""What a kernel's machine code must show: products of the declared type, tiles moved by TMA."""

from __future__ import annotations

from pathlib import Path
from typing import Any, cast

import pytest

from coda_agent.agent.authors.composer import Composer
from coda_agent.agent.judge.compile_gate import NEWER, compile_all, jobs_for, lacking
from coda_agent.agent.judge.job import BuiltObject, CompileJob
from coda_agent.agent.workspace import packaged_specs
from coda_agent.primitives import AddTile, HalfTile, RowSum, Tile, epilogue, pairs
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.program import Program
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.loading import load_kernel
from coda_agent.runtime.target import instructions
from coda_agent.specs import load_spec

GENERATED = Path(__file__).parents[3] / "generated"
HOPPER = DEFAULT_CONFIGS["sm_90a"]
SASS = """
\t.text.kernel_cutlass_kernel:
        /*0170*/                   UTMACCTL.PF [UR10] ;
        /*0af0*/              @!P0 STL.64 [R1+0x8], R4 ;
        /*0b00*/                   UTMALDG.2D.MULTICAST [UR8], [UR4], UR3, desc[UR10] ;
        /*0b10*/              @UP0 UTMALDG.2D [UR8], [UR4], desc[UR10] ;
        /*0c20*/                   HGMMA.64x128x16.F32.BF16 R24, gdesc[UR8], R24, gsb0 ;
        /*0c30*/                   HGMMA.64x128x16.F32 R24, gdesc[UR8], RZ, !UPT ;
        /*0c40*/             @!UPT QGMMA.64x192x32.F32.E4M3.E4M3 R24, gdesc[UR8], R24 ;
        /*0c50*/                   QMMA.SF.16832.F32.E4M3.E4M3.E8 R4, R8, R10, R4, R2 ;
        /*0c60*/                   UTCHMMA gdesc[UR16], gdesc[UR18], tmem[UR20] ;
        /*0d70*/               @P1 UTMASTG.2D [UR8], [UR4] ;
        /*0d80*/                   UTMAREDG.2D.ADD [UR8], [UR4] ;
        /*0d90*/                   LDL R4, [R1] ; /* STL HGMMA */
"""


@epilogue(O=Tile)
def plain(acc):
    return {"O": acc}


@epilogue(X=AddTile)
def adding(acc):
    return {"X": acc}


@epilogue(s=RowSum)
def summed(acc):
    return {"s": acc}


@epilogue(O=HalfTile)
def halved(acc):
    gate, up = pairs(acc)
    return {"O": gate * up}


def test_instructions_are_counted_by_type_and_not_by_shape() -> None:
    assert instructions(SASS) == {
        "STL": 1, "LDL": 1, "UTMALDG": 2, "UTMASTG": 1, "UTMAREDG": 1, "UTCHMMA": 1,
        "HGMMA.F32.BF16": 1, "HGMMA.F32": 1, "QGMMA.F32.E4M3.E4M3": 1,
        "QMMA.SF.F32.E4M3.E4M3.E8": 1,
    }  # fmt: skip


BF16 = {"HGMMA.F32.BF16": 16, "UTMALDG": 2, "UTMASTG": 8}


@pytest.mark.parametrize(
    ("program", "found", "expected"),
    [
        (plain, BF16, ""),
        (halved, BF16, ""),
        (summed, {"HGMMA.F32.BF16": 16, "UTMALDG": 2}, ""),
        (plain, {"HGMMA.F32.BF16": 16, "UTMALDG": 2}, "tiles do not move by TMA: no UTMASTG"),
        (adding, BF16, "tiles do not move by TMA: no UTMAREDG"),
        (plain, {"HGMMA.F32.BF16": 16}, "tiles do not move by TMA: no UTMALDG, UTMASTG"),
        (
            plain,
            {"UTMALDG": 2, "UTMASTG": 8},
            "tensor-core instructions are none, expected HGMMA.F32.BF16 of bfloat16",
        ),
        (
            plain,
            {"HMMA.F32.BF16": 64, "UTMALDG": 2, "UTMASTG": 8},
            "tensor-core instructions are HMMA.F32.BF16, expected HGMMA.F32.BF16 of bfloat16",
        ),
        (
            plain,
            {**BF16, "QGMMA.F32.E4M3.E4M3": 4},
            "tensor-core instructions are HGMMA.F32.BF16, QGMMA.F32.E4M3.E4M3, "
            "expected HGMMA.F32.BF16 of bfloat16",
        ),
    ],
)
def test_what_is_lacking(program: Program, found: dict[str, int], expected: str) -> None:
    assert lacking(CompileJob.of(program, HOPPER, "sm_90a", None, "bfloat16"), found) == expected


def test_a_type_without_a_known_instruction_needs_some_product() -> None:
    work = CompileJob.of(plain, HOPPER, "sm_90a", None, "float32")
    assert lacking(work, {"UTMALDG": 2, "UTMASTG": 8}).startswith("tensor-core instructions are no")
    assert lacking(work, {"HGMMA.F32.TF32": 8, "UTMALDG": 2, "UTMASTG": 8}) == ""


@pytest.mark.parametrize(
    ("kernel", "lie"),
    [
        ("gemm_residual_partial_rmsnorm_bwd", "float8_e4m3fn"),
        ("gemm_fp8_swiglu_quantised", "bfloat16"),
    ],
)
@pytest.mark.one_in(2)
def test_a_real_object_shows_its_own_type_and_no_other(kernel: str, lie: str) -> None:
    found = load_kernel(GENERATED / kernel)
    program = found.programs[found.spec.variant()]
    work = CompileJob.of(program, HOPPER, "sm_90a", found.spec, "bfloat16")
    use_cache()
    seen = work.run().instructions or {}
    assert lacking(work, seen) == ""
    assert "tensor-core instructions are" in lacking(work.model_copy(update={"dtype": lie}), seen)


def test_a_missing_instruction_refuses_the_default_tile_and_drops_another() -> None:
    other = TileConfig(128, 192, 2, 1, True)
    jobs = [CompileJob.of(plain, c, "sm_90a", None, "bfloat16") for c in (HOPPER, other)]

    class Pool:
        def map(self, jobs: list[Any], progress: Any) -> list[Any]:
            found = {"FFMA": 9, "UTMALDG": 2, "UTMASTG": 8}
            built = BuiltObject(object="x.o", registers=168, local_stores=0, instructions=found)
            return [built] * len(jobs)

    pool: Any = Pool()
    findings, reports = compile_all(pool, jobs, lambda *_: None)
    assert [f.where for f in findings] == [{"program": "plain", "arch": "sm_90a"}]
    assert "expected HGMMA.F32.BF16" in findings[0].message
    assert all("expected HGMMA.F32.BF16" in (line.error or "") for line in reports)
    assert all(line.instructions and line.instructions["UTMALDG"] == 2 for line in reports)


def test_what_fails_on_a_newer_gpu_alone_is_said_and_refuses_nothing() -> None:
    jobs = [
        CompileJob.of(plain, DEFAULT_CONFIGS[a], a, None, "bfloat16") for a in (*NEWER, "sm_90a")
    ]

    class Pool:
        def map(self, jobs: list[Any], progress: Any) -> list[Any]:
            found = {"HGMMA.F32.BF16": 4, "UTMALDG": 2, "UTMASTG": 8}
            built = BuiltObject(object="x.o", registers=168, local_stores=0, instructions=found)
            return [CompileError("no room"), CompileError("no room"), built]

    findings, reports = compile_all(cast(Any, Pool()), jobs, lambda *_: None)
    assert findings == []
    assert [line.error for line in reports] == ["no room", "no room", None]


def test_transposed_operands_are_compiled_for_ahead_and_reported_with_their_tile() -> None:
    found = load_kernel(GENERATED / "gemm_rmsnorm")
    jobs = jobs_for(found.spec, dict(found.programs), ["bfloat16"], newer=False, shapes=())
    (turned,) = (job for job in jobs if job.transposed)
    straight = next(job for job in jobs if job.config == HOPPER)
    assert turned == straight.model_copy(update={"transposed": True, "again": True})
    use_cache()
    assert turned.run().object != straight.run().object

    class Pool:
        def map(self, jobs: list[Any], progress: Any) -> list[Any]:
            return [CompileError("no such layout") if job.transposed else built for job in jobs]

    built, pool = straight.run(), cast(Any, Pool())
    findings, reports = compile_all(pool, [straight, turned], lambda *_: None)
    assert [f.message for f in findings] == ["no such layout"]
    assert [line.error for line in reports] == [None]


def test_each_code_for_tables_is_compiled_ahead_and_its_tile_reported_once() -> None:
    """Checks have 16, 272, 336 and 512 columns, the benchmark 1152: whole subtiles, or not."""
    spec = load_spec(packaged_specs()["gemm_sample_gated_residual"])
    programs = read_programs(Composer().write(spec, lambda *_: None))
    jobs = jobs_for(spec, programs, ["bfloat16"], newer=True, shapes=())
    columns = {(job.again, *(table[1] for table in job.tables.values())) for job in jobs}
    assert columns == {(False, 1152), (True, 16), (True, 1152)}
    once = [job for job in jobs if not job.again]
    assert {job.arch for job in once} == {"sm_90a", "sm_100a", "sm_120a"}
    again = [job.config for job in jobs if job.again and not job.transposed]
    assert again == [job.config for job in once if job.arch == "sm_90a"]
    default = [job for job in jobs if job.arch == "sm_90a" and job.config == HOPPER]
    built = [job.run() for job in default if not job.transposed]
    assert len({one.object for one in built}) == 2

    class Pool:
        def map(self, jobs: list[Any], progress: Any) -> list[Any]:
            return built

    _, reports = compile_all(cast(Any, Pool()), default[:2], lambda *_: None)
    assert [line.tile for line in reports] == [HOPPER.label]


def test_fp8_operands_are_never_transposed() -> None:
    found = load_kernel(GENERATED / "gemm_fp8_rmsnorm")
    jobs = jobs_for(found.spec, dict(found.programs), ["bfloat16"], newer=False, shapes=())
    assert jobs and not any(job.transposed for job in jobs)
