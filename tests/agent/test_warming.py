"""Objects compiled ahead: a call in another process, of other sizes, finds each of them."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent import generated
from coda_agent.agent import warming
from coda_agent.agent.cli import app
from coda_agent.agent.execution import local
from coda_agent.agent.judge.job import BuiltObject, CompileJob
from coda_agent.agent.workspace import packaged_kernels
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.tiles import TileConfig
from coda_agent.runtime.loading import user_tuning

H200 = "NVIDIA H200"


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == code, result.output
    return result.output


def launched(code: str, *args: object) -> list[str]:
    """Lines that a fresh process prints which resolves launches as on a GPU, and may not compile."""
    text = LAUNCH.replace("REST", code)
    done = subprocess.run(
        [sys.executable, "-c", text, *map(str, args)], capture_output=True, text=True
    )
    assert done.returncode == 0, done.stderr[-2000:]
    return done.stdout.splitlines()


LAUNCH = """
import os, sys, torch
from torch._subclasses.fake_tensor import FakeTensorMode
from coda_agent import generated
from coda_agent.runtime import elementwise
from coda_agent.runtime.launch import Arguments, allocate, launch
from coda_agent.runtime.target import target
from quack.gemm_runtime import host

compiled = []
def refuse(*_, **__):
    raise TypeError("it compiles")
host.compile_gemm_kernel = elementwise.compile_elementwise = refuse
REST
name, m, n, k = sys.argv[1], *map(int, sys.argv[2:5])
kernel = getattr(generated, name)
spec = kernel.spec
for types in spec.type_choices():
    dtype = lambda x: getattr(torch, spec.dtype_of(x, types))
    empty = lambda shape, x: torch.empty(shape, dtype=dtype(x), device="meta")
    config = kernel.tiles.choose(m, n, k, spec.dtype_of(spec.gemm[0], types), gpu="NVIDIA H200")
    with FakeTensorMode():
        scalar = torch.empty(1, device="cuda")
    for number in (2.5, scalar):
        for variant, program in kernel.programs.items():
            operands = {
                o: empty(kind.extents(m, n), o) if kind.dims else number
                for o, kind in program.operands.items()
            }
            with target("sm_90a"):
                outputs = allocate(program, m, n, {o: dtype(o) for o in program.outputs}, config, "meta")
                a, b = empty((m, k), spec.gemm[0]), empty((n, k), spec.gemm[1])
                launch(Arguments(program, a, b, operands, outputs, config), run=False)
            print(variant, config.label)
"""


@pytest.fixture
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("QUACK_CACHE_DIR", str(tmp_path / "objects"))
    monkeypatch.setenv("CODA_AGENT_TUNED", str(tmp_path / "tuned"))
    monkeypatch.setattr(local.Local, "_gpus", lambda _: [])
    return tmp_path / "objects"


READ_ONLY = """
import errno, warnings
opened, objects = os.open, os.environ["QUACK_CACHE_DIR"]
def guarded(path, flags, *more, **others):
    writes = flags & (os.O_WRONLY | os.O_RDWR) or flags & os.O_CREAT and not os.path.exists(path)
    if str(path).startswith(objects) and writes:
        raise OSError(errno.EROFS, "Read-only file system", str(path))
    return opened(path, flags, *more, **others)
os.open = guarded
"""
LACKING = """
from coda_agent.primitives.objects import cached
from quack.cache import jit_cache
warnings.showwarning = lambda message, *_: print(message)
for key in "xy":
    cached(lambda: jit_cache(lambda key: print("compiled", key))(key))
raise SystemExit
"""


@pytest.mark.slow
def test_a_call_after_warming_compiles_nothing(
    cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nor where the objects came with an image, in a folder that cannot be written to."""
    pool = local.CompilePool(2)
    monkeypatch.setattr(local.Local, "pool", lambda _: pool)
    name, few, many = "gemm_fp8_rmsnorm", (16, 6144, 4096), (8192, 6144, 4096)  # has scalars
    unfused = TileConfig(4, 512, fused=False)
    line = {**dict(zip("mnk", few, strict=True)), "config": unfused.to_dict(), "median_us": 9.0}
    tuned = user_tuning(packaged_kernels()[name].folder)
    tuned.add({H200: {"float8_e4m3fn": [line]}})
    # It may have been loaded by a test with another cache.
    monkeypatch.setattr(generated.gemm_fp8_rmsnorm.tiles, "user", tuned)
    command = ["warm", name, "--shape=16,6144,4096", "--shape=8192,6144,4096", "--gpu", H200]
    with pool:
        for said in "4 compiled, 0", "0 compiled, 4":  # after what is told while it takes long
            assert run(*command).endswith(f"{said} were there, in {cache}\n")
    assert launched("", name, *few) == [f"{name} {unfused.label}"] * 2
    assert len(launched(READ_ONLY, name, *many)) == 2
    # Another tile's object is not there, and cannot be kept.
    tuned.path.unlink()
    with pytest.raises(AssertionError, match="it compiles"):
        launched("", name, *few)
    warned, *said = launched(READ_ONLY + LACKING, name, *few)
    assert warned.startswith(f"coda-agent: compiled kernels cannot be kept in {cache} (Read-only")
    assert said == ["compiled x", "compiled y"]


def config(m: int) -> TileConfig:
    kernel = generated.gemm_residual_partial_rmsnorm
    found = kernel.tiles.choose(m, 4096, 14336, "bfloat16", gpu=H200)
    assert found
    return found


def test_one_job_for_what_compiles_to_one_object(cache: Path) -> None:
    kernel = packaged_kernels()["gemm_residual_partial_rmsnorm"]
    shapes = [(m, 4096, 14336) for m in (8192, 8193, 8194)]
    found, _ = warming.ahead(kernel, shapes, gpu=H200)
    tiles = [replace(config(m), swizzle=8) for m, _, _ in shapes]
    assert [(j.element, j.config) for j in found if j.element == "bfloat16"] == [
        ("bfloat16", tile) for tile in dict.fromkeys(tiles)
    ]
    assert {j.element for j in found} == {"bfloat16", "float16"}
    short, _ = warming.ahead(kernel, [(16, 4096, 64)], gpu=H200)
    assert {j.config.split_k for j in short} == {1}  # a launch splits no short K
    scalars, _ = warming.ahead(packaged_kernels()["gemm_fp8_rmsnorm"], shapes[:1], gpu=H200)
    assert [j.read_scalars for j in scalars] == [False, True] * (len(scalars) // 2)


FOLD = """
import sys, torch, triton.compiler.compiler as compiler
from coda_agent.primitives.fold import fold
def refuse(*_, **__):
    raise TypeError("it compiles")
compiler.ASTSource.make_ir = refuse
print(len(fold(torch.empty(*map(int, sys.argv[1:]), device="meta"), "add", 0.5)))
"""


def test_the_fold_of_a_final_reduction_is_compiled_too(
    cache: Path, mapped: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    """In Triton's cache, for the shapes that were named."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(cache.parent / "triton"))
    mapped.append(lambda job: SimpleNamespace(object=__file__))
    name, (m, n, k) = "gemm_residual_partial_rmsnorm", (8192, 4096, 4096)
    tile = generated.gemm_residual_partial_rmsnorm.tiles.choose(m, n, k, "bfloat16", gpu=H200)
    assert tile
    run("warm", name, f"--shape={m},{n},{k}", "--gpu", H200)

    def folded(*shape: int) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", FOLD, *map(str, shape)]
        return subprocess.run(command, capture_output=True, text=True)

    assert folded(m, -(-n // tile.tile_n)).stdout == f"{m}\n"
    assert "it compiles" in folded(m + 1, 7).stderr


@pytest.mark.parametrize(
    ("args", "message", "code"),
    [
        (["gemm_swiglu", "--shape=1,16,16"], "needs a Hopper GPU", 3),
        (["gemm_swiglu", "--shape=1,16,16", "--gpu=NVIDIA H20"], "did you mean NVIDIA H200?", 2),
        (["gemm_swiglu", "--shape=1,20,16", "--gpu", H200], "N=20; expected a positive", 2),
        (["gemm_swigl", "--shape=1,16,16", "--gpu", H200], "did you mean gemm_swiglu?", 2),
        (["gemm_swiglu", "--gpu", H200], "no shapes are named", 2),
        (["gemm_swiglu", "--shape=1,16,16", "--gpu", H200, "--block-size=7"], "block_size 7", 2),
    ],
)
def test_bad_input_is_one_line(cache: Path, args: list[str], message: str, code: int) -> None:
    said = run("warm", *args, code=code)
    assert message in said and said.count("\n") == 1
    assert not cache.exists()


@pytest.fixture
def mapped(cache: Path, monkeypatch: pytest.MonkeyPatch) -> list[Callable[[CompileJob], Any]]:
    """What a job's worker answers."""
    answers: list[Callable[[CompileJob], Any]] = []

    def each(_: Any, jobs: list[CompileJob], progress: Callable[..., None]) -> list[Any]:
        found = []
        for done, job in enumerate(jobs, 1):
            found.append(answers[0](job))
            progress(done, job)
        return found

    monkeypatch.setattr(local.Local, "map", each)
    return answers


def test_what_fails_is_named_and_the_rest_is_kept(cache: Path, mapped: list[Any]) -> None:
    def answer(job: CompileJob) -> Any:
        if job.element == "float16":
            return CompileError("no such tile", hint="another")
        path = cache / "made.o"
        path.touch()
        return SimpleNamespace(object=str(path))

    mapped.append(answer)
    said = run("warm", "gemm_swiglu", "--shape=4096,4096,4096", "--gpu", H200, code=1)
    assert re.match(r"gemm_swiglu float16 \S+ \S+ \S+: no such tile \(another\)\n", said)
    assert said.endswith(f"1 compiled, 0 were there, in {cache}\n")
    document = json.loads(
        run("warm", "gemm_swiglu", "--shape=4096,4096,4096", "--gpu", H200, "--json", code=1)
    )
    assert document["new"] == 1 and len(document["failed"]) == 1


def test_an_interrupt_and_a_place_that_cannot_be_used(cache: Path, mapped: list[Any]) -> None:
    def interrupted(_: CompileJob) -> BuiltObject:
        raise KeyboardInterrupt

    mapped.append(interrupted)
    named = ["gemm_swiglu", "--shape=4096,4096,4096", "--gpu", H200]
    assert "interrupted" in run("warm", *named, code=130)
    cache.rmdir()
    cache.write_text("a file")
    assert run("warm", *named, code=2) == f"error: {cache} cannot be used: File exists\n"
