"""Tiles for a user's own shapes: what is named, measured, kept and committed."""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from coda_agent import generated
from coda_agent.agent import execution, judge, shapes, workspace
from coda_agent.agent.cli import app
from coda_agent.agent.judge.machine import Gpu
from coda_agent.primitives.errors import CodaError, CompileError
from coda_agent.primitives.tiles import SM90_CONFIGS, TileConfig, offered
from coda_agent.runtime.loading import user_tuning
from coda_agent.specs import load_spec

KERNEL = "gemm_residual_partial_rmsnorm"
FOLDER = Path(generated.__file__).parent / KERNEL
GPU = Gpu("GPU-1", "Fake GPU", "9.0")
BEST = SM90_CONFIGS[3]


class Measurer:
    """Stands in for the tuner: the best tile is always the same; shapes in `broken` fail."""

    def __init__(self) -> None:
        self.asked: list[tuple[int, ...]] = []
        self.broken: dict[int, BaseException] = {}

    def __call__(
        self, spec: Any, text: str, executor: Any, *, tiles: list[TileConfig], **_: Any
    ) -> dict[str, Any]:
        (sizes,) = spec.bench_shapes
        self.tiles = tiles
        m, n, k = shape = tuple(sizes[dim] for dim in spec.gemm_dims)
        if m in self.broken:
            raise self.broken[m]
        self.asked.append(shape)
        line = {"m": m, "n": n, "k": k, "config": BEST.to_dict(), "blocks": {}, "median_us": 5.0}
        found = {spec.dtype_of(spec.gemm[0], types) for types in spec.type_choices()}
        return {GPU.name: {dtype: [line] for dtype in found}}


@pytest.fixture
def measurer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Measurer:
    made = Measurer()
    monkeypatch.setattr(judge, "tune_candidate", made)
    monkeypatch.setattr(execution, "hopper", lambda: GPU)
    monkeypatch.setenv("CODA_AGENT_TUNED", str(tmp_path / "tuned"))
    for who in ("AUTHOR", "COMMITTER"):
        monkeypatch.setenv(f"GIT_{who}_NAME", "U")
        monkeypatch.setenv(f"GIT_{who}_EMAIL", "u@example.com")
    (tmp_path / "anywhere").mkdir()
    monkeypatch.chdir(tmp_path / "anywhere")
    return made


def run(*args: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, args)
    assert result.exit_code == code, result.output
    return result.output


def kept() -> list[tuple[int, int, int]]:
    found = user_tuning(FOLDER).lines().get(GPU.name, {})
    assert found.get("bfloat16") == found.get("float16")
    return [line.shape for line in found.get("bfloat16", [])]


def test_a_packaged_kernel_is_tuned_in_any_folder(measurer: Measurer) -> None:
    said = run("tune", KERNEL, "--shape", "16,4096,14336", "--shape=128x4096x4096")
    assert f"bfloat16 16 x 4096 x 14336: {BEST.label}, 5.0 us" in said
    assert (
        f"kept in {user_tuning(FOLDER).path}" in said
        and "\ncommit " not in said
        and said.startswith("measured 16 x 4096 x 14336\nmeasured")
    )
    assert kept() == [(16, 4096, 14336), (128, 4096, 4096)]
    assert user_tuning(FOLDER).find(GPU.name, "float16", (16, 4096, 14336)) == BEST
    measurer.asked.clear()
    document = json.loads(run("tune", KERNEL, "--shape", "16,4096,14336", "--json"))
    assert measurer.asked == []  # it was known
    assert document["tuned"][GPU.name]["bfloat16"][0]["config"] == BEST.to_dict()
    assert document["commit"] is None and list(Path.cwd().iterdir()) == []


def test_ten_tiles_are_tried_that_the_evidence_does_not_refuse(measurer: Measurer) -> None:
    kernel = generated.gemm_fp8_rmsnorm_swiglu
    (program,), shape = kernel.programs.values(), (128, 6144, 4096)
    assert len(offered(program, [shape])) > 15 and kernel.tiles.refused
    run("tune", "gemm_fp8_rmsnorm_swiglu", "--shape", "128,6144,4096")
    assert len(set(measurer.tiles)) == 10 and set(measurer.tiles) <= {*offered(program, [shape])}
    assert kernel.tiles.refused.isdisjoint(tile.label for tile in measurer.tiles)
    assert kernel.tiles.ranked(shape, "float8_e4m3fn", GPU.name)[0] in measurer.tiles


def test_what_was_measured_before_a_failure_or_an_interrupt_is_kept(measurer: Measurer) -> None:
    named = [f"--shape={m},4096,4096" for m in (1, 2, 3, 4)]
    measurer.broken = {3: CompileError("no tile computes the right result")}
    assert "error: no tile computes" in run("tune", KERNEL, *named, code=2)
    assert kept() == [(1, 4096, 4096), (2, 4096, 4096)]
    measurer.broken = {4: KeyboardInterrupt()}
    assert "error: interrupted" in run("tune", KERNEL, *named, code=130)
    assert [m for m, _, _ in measurer.asked] == [1, 2, 3]
    measurer.broken = {}
    run("tune", KERNEL, *named)
    assert [m for m, _, _ in measurer.asked] == [1, 2, 3, 4]


def test_a_commit_takes_the_lines_of_the_cache_into_the_workspaces_kernel(
    measurer: Measurer, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    made, _ = workspace.init(tmp_path / "w")
    assert "no kernel named" in run("tune", "gemm_none", "--shape=1,16,16", code=2)
    shutil.copytree(FOLDER, made.generated / KERNEL)
    subprocess.run(["git", "add", "-A"], cwd=made.root, check=True)
    subprocess.run(["git", "commit", "-qm", "first"], cwd=made.root, check=True)
    monkeypatch.chdir(made.root)
    before = (made.generated / KERNEL / "tuned.json").read_text()
    assert "\ncommit " not in run("tune", KERNEL, "--shape=16,4096,4096")
    assert (made.generated / KERNEL / "tuned.json").read_text() == before
    said = run("tune", KERNEL, "--shape=16,4096,4096", "--shape=32,4096,4096", "--commit")
    assert measurer.asked == [(16, 4096, 4096), (32, 4096, 4096)]
    shown = subprocess.run(
        ["git", "show", "--name-only", "--format=%H%n%s"], cwd=made.root, capture_output=True,
        text=True, check=True,
    ).stdout.split()  # fmt: skip
    assert f"commit {shown[0]}" in said
    assert shown[-1] == f"generated/{KERNEL}/tuned.json"
    stored = json.loads((made.generated / KERNEL / "tuned.json").read_text())
    assert [e["m"] for e in stored[GPU.name]["bfloat16"]] == [16, 32]
    assert {k: v for k, v in stored.items() if k != GPU.name} == json.loads(before)
    assert "\ncommit " not in run("tune", KERNEL, "--shape=16,4096,4096", "--commit")


BAD: list[tuple[list[str], str]] = [
    ([KERNEL], "no shapes are named"),
    (["gemm_residual", "--shape=1,16,16"], "no kernel named 'gemm_residual'"),
    ([KERNEL, "--shape=1,20,64"], "N=20; expected a positive multiple of 16"),
    ([KERNEL, "--shape=0,64,64"], "all positive"),
    ([KERNEL, "--shape=1,2"], "expected M,N,K"),
    ([KERNEL, "--shapes=nowhere"], "nowhere cannot be read as text: No such file"),
    ([KERNEL, "--from-model=nowhere"], "nowhere cannot be read"),
    ([KERNEL, "--from-model=.", "--rows=1,-2"], "--rows is '1,-2', expected positive numbers"),
    ([KERNEL, "--shape=1,16,16", "--commit"], "no git repository"),
]


@pytest.mark.parametrize(("args", "message"), BAD, ids=[message for _, message in BAD])
def test_bad_input_is_one_line_and_measures_nothing(
    measurer: Measurer, args: list[str], message: str
) -> None:
    said = run("tune", *args, code=2)
    assert message in said and said.count("\n") == 1
    assert measurer.asked == [] and kept() == []


def test_a_cache_that_cannot_be_written_to_is_said_before_anything_is_measured(
    measurer: Measurer, tmp_path: Path
) -> None:
    (tmp_path / "tuned").write_text("a file")
    said = run("tune", KERNEL, "--shape=16,4096,4096", code=2)
    assert said == f"error: {tmp_path / 'tuned'} cannot be used: File exists\n"
    assert measurer.asked == []


FILES = {
    "lines": "# M,N,K\n16,4096,14336\n128 x 4096 x 4096  # o\n\n1 4096 4096\n",
    "lists": "[[16, 4096, 14336], [128, 4096, 4096], [1, 4096, 4096]]",
}


@pytest.mark.parametrize("text", FILES.values(), ids=FILES)
def test_a_file_of_shapes(tmp_path: Path, text: str) -> None:
    (tmp_path / "f").write_text(text)
    expected = [(16, 4096, 14336), (128, 4096, 4096), (1, 4096, 4096)]
    assert shapes.in_file(tmp_path / "f") == expected


WRONG_FILES = {
    "": "holds no shapes",
    "# nothing": "holds no shapes",
    "1,2,3\n4,5": "f, 2: is '4,5', expected M,N,K",
    "[[1, 2, 3], [1, 2]]": ", 2: is '1, 2', expected M,N,K",
    "[1]": ", 1: is '1', expected M,N,K",
    "[[1, 2": "is not JSON",
    '[{"m": 1, "n": 2}]': r", 1: is .{'m': 1, 'n': 2}., expected M,N,K",
    "[[1, 2, 3.5]]": ", 1: is '1, 2, 3.5', expected M,N,K",
}


@pytest.mark.parametrize(("text", "message"), WRONG_FILES.items())
def test_a_file_of_something_else(tmp_path: Path, text: str, message: str) -> None:
    (tmp_path / "f").write_text(text)
    with pytest.raises(CodaError, match=message):
        shapes.in_file(tmp_path / "f")


LLAMA = {
    "hidden_size": 4096, "intermediate_size": 14336, "num_attention_heads": 32,
    "num_key_value_heads": 8, "vocab_size": 128256,
}  # fmt: skip


def of_model(folder: Path, about: object, kernel: str = KERNEL, rows: str = "16") -> list[Any]:
    (folder / "config.json").write_text(json.dumps(about))
    spec = load_spec(FOLDER.parent / kernel / "spec.md")
    return shapes.of_model(folder, spec, shapes.numbers("--rows", rows, "numbers"))


def test_the_shapes_of_a_model_are_its_products(tmp_path: Path) -> None:
    """Those of Llama-3 8B, as published; and what a configuration may leave out or nest."""
    assert of_model(tmp_path, LLAMA, rows="1,16") == [
        (1, 4096, 4096), (16, 4096, 4096), (1, 4096, 14336), (16, 4096, 14336),
    ]  # fmt: skip
    assert of_model(tmp_path, LLAMA, "gemm_rmsnorm_rope") == [(16, 6144, 4096)]
    assert of_model(tmp_path, LLAMA, "gemm_rmsnorm_swiglu") == [(16, 28672, 4096)]
    head = of_model(tmp_path, LLAMA, "gemm_rmsnorm_partial_cross_entropy")
    assert head == [(16, 128256, 4096)]
    assert of_model(tmp_path, {"text_config": LLAMA}, "gemm_rmsnorm_rope") == [(16, 6144, 4096)]
    whole = {**LLAMA, "num_key_value_heads": None}  # each head has keys of its own
    assert of_model(tmp_path, whole, "gemm_rmsnorm_rope") == [(16, 3 * 4096, 4096)]
    wide = {**LLAMA, "head_dim": 256}
    assert of_model(tmp_path, wide, "gemm_rmsnorm_rope") == [(16, 48 * 256, 4096)]


@pytest.mark.parametrize(
    ("about", "message"),
    [
        ({}, "hidden_size is None, expected a positive number"),
        ({**LLAMA, "vocab_size": "many"}, "vocab_size is 'many'"),
        ([1], "is no model's configuration"),
        ({"text_config": [1]}, "hidden_size is None"),
    ],
)
def test_a_configuration_of_no_transformer(tmp_path: Path, about: object, message: str) -> None:
    with pytest.raises(CodaError, match=message):
        of_model(tmp_path, about)


def test_a_kernel_without_a_place_in_a_layer(tmp_path: Path) -> None:
    with pytest.raises(CodaError, match="gemm_symlog has no place in a Transformer's layer"):
        of_model(tmp_path, LLAMA, "gemm_symlog")
