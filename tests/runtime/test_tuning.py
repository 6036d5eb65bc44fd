"""The user's tuning cache: what a call reads of it, and that nothing in it is lost or trusted."""

from __future__ import annotations

import json
import multiprocessing
import warnings
from dataclasses import replace
from pathlib import Path

import pytest

from coda_agent import generated
from coda_agent.agent.judge.records import JsonObject
from coda_agent.primitives.tiles import SM90_CONFIGS, TileConfig
from coda_agent.runtime import tuning
from coda_agent.runtime.kernel import Kernel
from coda_agent.runtime.loading import load_kernel, user_tuning
from coda_agent.runtime.tuning import UserTuning

GPU = "some GPU"
FIRST, SECOND = SM90_CONFIGS[0], SM90_CONFIGS[3]


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("CODA_AGENT_TUNED", str(tmp_path / "tuned"))
    return tmp_path / "tuned"


def line(m: int, config: TileConfig = FIRST, **blocks: TileConfig) -> JsonObject:
    found = {name.removeprefix("b"): c.to_dict() for name, c in blocks.items()}
    shape = {"m": m, "n": 4096, "k": 4096}
    return {**shape, "config": config.to_dict(), "blocks": found, "median_us": 7.0}


def lines(*found: JsonObject, gpu: str = GPU, dtype: str = "bfloat16") -> JsonObject:
    return {gpu: {dtype: list(found)}}


def kernel() -> Kernel:
    """A packaged kernel, with the cache as it is now."""
    loaded = generated.gemm_residual_partial_rmsnorm
    fresh = object.__new__(Kernel)
    fresh.__dict__ = vars(loaded) | {"tiles": replace(loaded.tiles, user=user_tuning(folder()))}
    return fresh


def folder() -> Path:
    return Path(generated.__file__).parent / "gemm_residual_partial_rmsnorm"


def test_the_folder_is_the_users_cache_unless_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("CODA_AGENT_TUNED")
    monkeypatch.setenv("XDG_CACHE_HOME", "/elsewhere")
    assert tuning.folder() == Path("/elsewhere/coda-agent/tuned")
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", "/home/x")
    assert tuning.folder() == Path("/home/x/.cache/coda-agent/tuned")
    monkeypatch.setenv("CODA_AGENT_TUNED", "/given")
    assert UserTuning("k", "d").path.parent == Path("/given")


def test_a_measured_shape_is_dispatched_and_every_other_is_untouched() -> None:
    before = kernel().tiles.choose(17, 4096, 4096, "bfloat16", gpu="NVIDIA H200")
    narrow = TileConfig(128, 64, 2, 1, True)
    assert narrow not in (
        before,
        kernel().tiles.choose(16, 4096, 4096, "bfloat16", gpu="NVIDIA H200"),
    )
    user_tuning(folder()).add(lines(line(16, narrow, b192=SECOND), gpu="NVIDIA H200"))
    tuned = kernel()
    assert tuned.tiles.choose(16, 4096, 4096, "bfloat16", gpu="NVIDIA H200") == narrow
    assert tuned.tiles.choose(16, 4096, 4096, "bfloat16", 192, gpu="NVIDIA H200") == SECOND
    assert tuned.tiles.choose(17, 4096, 4096, "bfloat16", gpu="NVIDIA H200") == before
    for other in ({"gpu": "another GPU"}, {"dtype": "float16"}, {"block": 160}):
        about = {"dtype": "bfloat16", "gpu": "NVIDIA H200", **other}
        untouched = generated.gemm_residual_partial_rmsnorm.tiles.choose(16, 4096, 4096, **about)
        assert tuned.tiles.choose(16, 4096, 4096, **about) == untouched


@pytest.mark.parametrize(
    "config",
    [
        TileConfig(192, 192, 2, 1),  # its evidence refuses it
        TileConfig(192, 192, 2, 1, swizzle=4),  # the same code in another order
        TileConfig(136, 8, 3, 7),  # no tuner offers it
        TileConfig(128, 128, 2, 1, True, swizzle=3),
        TileConfig(0, 0, 0, 0, split_k=0),
    ],
    ids=lambda c: c.label,
)
def test_a_tile_that_no_tuner_may_pick_is_not_dispatched(config: TileConfig) -> None:
    expected = kernel().tiles.choose(16, 4096, 4096, "bfloat16", gpu=GPU)
    user_tuning(folder()).add(lines(line(16, config)))
    tuned = kernel()
    tuned.tiles.refused = tuned.tiles.refused | {"192x192 coop 2x1"}
    assert tuned.tiles.user and tuned.tiles.user.find(GPU, "bfloat16", (16, 4096, 4096)) == config
    assert tuned.tiles.choose(16, 4096, 4096, "bfloat16", gpu=GPU) == expected


def test_another_program_or_compiler_has_a_file_of_its_own(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    other = tmp_path / folder().name
    other.mkdir()
    for file in ("kernel.py", "spec.md"):
        (other / file).write_bytes((folder() / file).read_bytes())
    path = user_tuning(folder()).path
    assert user_tuning(other).path == path
    (other / "kernel.py").write_text((folder() / "kernel.py").read_text() + "\n# another\n")
    assert user_tuning(other).path != path
    tuning._toolchain.cache_clear()
    monkeypatch.setattr(tuning.metadata, "version", lambda package: f"{package} of tomorrow")
    assert user_tuning(folder()).path != path
    tuning._toolchain.cache_clear()


DAMAGED = {
    "empty": b"",
    "truncated": json.dumps(lines(line(16))).encode()[:-30],
    "another form": b'{"quack": [1, 2]}',
    "no text": b"\xff\xfe\x00",
    "a line too long": json.dumps(lines({**line(16), "key": "AAAA"})).encode(),
    "no tile": json.dumps(lines({**line(16), "config": {"tile_m": "wide"}})).encode(),
}


@pytest.mark.parametrize("text", DAMAGED.values(), ids=DAMAGED.keys())
def test_a_damaged_file_is_said_once_not_used_and_not_lost(text: bytes) -> None:
    user = user_tuning(folder())
    user.path.parent.mkdir()
    user.path.write_bytes(text)
    with pytest.warns(UserWarning, match=r"is no tuning cache and is not used") as said:
        assert user.find(GPU, "bfloat16", (16, 4096, 4096)) is None
        assert user.find(GPU, "bfloat16", (17, 4096, 4096)) is None
    assert len(said) == 1 and "\n" not in str(said[0].message)
    with pytest.warns(UserWarning, match=r"was no tuning cache and is now .*\.damaged"):
        user.add(lines(line(16)))
    assert user.path.with_suffix(".damaged").read_bytes() == text
    assert user.find(GPU, "bfloat16", (16, 4096, 4096)) == FIRST


def test_a_place_that_cannot_be_used_is_a_warning_in_a_call_and_an_error_for_a_writer(
    cache: Path,
) -> None:
    cache.write_text("a file")
    user = user_tuning(folder())
    with pytest.warns(UserWarning, match="is not used: Not a directory"):
        assert user.find(GPU, "bfloat16", (16, 4096, 4096)) is None
    for write in (lambda: user.add({}), lambda: user.add(lines(line(16)))):
        with pytest.raises(OSError) as found:
            write()
        assert found.value.filename == str(cache)
    assert cache.read_text() == "a file"


def test_new_lines_stand_beside_old_ones_and_replace_their_own(cache: Path) -> None:
    user = user_tuning(folder())
    user.add(lines(line(16), line(32)))
    user.add(lines(line(16, SECOND)))
    user.add(lines(line(16), dtype="float16"))
    user.add(lines(line(16), gpu="another GPU"))
    found = user.lines()
    assert [(x.m, x.config) for x in found[GPU]["bfloat16"]] == [(16, SECOND), (32, FIRST)]
    assert found[GPU]["float16"] == found["another GPU"]["bfloat16"]
    assert user.find(GPU, "bfloat16", (16, 4096, 4096)) == SECOND
    assert sorted(p.suffix for p in cache.iterdir()) == [".json", ".lock"]


def test_what_is_no_measurement_is_not_written() -> None:
    user = user_tuning(folder())
    user.add(lines(line(16)))
    with pytest.raises(ValueError):
        user.add({GPU: {"bfloat16": [{"m": 1}]}})
    assert [x.m for x in user.lines()[GPU]["bfloat16"]] == [16]


def test_a_file_without_newer_fields_of_a_tile_is_read() -> None:
    user = user_tuning(folder())
    user.path.parent.mkdir()
    old = {**line(16), "config": {"tile_m": 128, "tile_n": 160, "pingpong": True}}
    user.path.write_text(json.dumps(lines(old)))
    assert user.find(GPU, "bfloat16", (16, 4096, 4096)) == TileConfig(128, 160, pingpong=True)


def _adds(first: int) -> None:
    user = user_tuning(folder())
    for m in range(first, first + 40):
        user.add(lines(line(m)))


def test_writers_at_once_lose_nothing(cache: Path) -> None:
    context = multiprocessing.get_context("fork")
    writers = [context.Process(target=_adds, args=(start,)) for start in (1, 101, 201)]
    for writer in writers:
        writer.start()
    with warnings.catch_warnings():
        warnings.simplefilter("error")  # a reader never sees half a file
        while any(writer.is_alive() for writer in writers):
            user_tuning(folder()).find(GPU, "bfloat16", (1, 4096, 4096))
    for writer in writers:
        writer.join()
        assert writer.exitcode == 0
    expected = [m for start in (1, 101, 201) for m in range(start, start + 40)]
    assert [x.m for x in user_tuning(folder()).lines()[GPU]["bfloat16"]] == expected


def test_a_kernel_made_for_the_judge_reads_no_users_file() -> None:
    loaded = load_kernel(folder())
    judged = Kernel(loaded.spec, loaded.programs, "gemm_of_the_judge")
    predicted = judged.tiles.choose(16, 4096, 4096, "bfloat16", gpu=GPU)
    assert predicted not in (None, SECOND)
    user_tuning(folder()).add(lines(line(16, replace(SECOND))))
    assert judged.tiles.choose(16, 4096, 4096, "bfloat16", gpu=GPU) == predicted
