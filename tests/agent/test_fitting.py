"""A dispatch table from measured times: what is measured, kept and taken up again."""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest

from coda_agent.agent import fitting
from coda_agent.agent.fitting import Wanted, fit_tables, shapes
from coda_agent.agent.judge import survey as surveying
from coda_agent.agent.judge.job import SurveyJob, read_job
from coda_agent.agent.judge.machine import Gpu
from coda_agent.agent.judge.records import VERSIONS, Outcome, Survey, SurveyedShape
from coda_agent.agent.judge.survey import survey
from coda_agent.agent.workspace import Kernel
from coda_agent.primitives.errors import CompileError
from coda_agent.primitives.reader import read_programs
from coda_agent.primitives.tiles import TileConfig, offered
from coda_agent.runtime import dispatch_tables as tables
from coda_agent.runtime.loading import load_kernel
from coda_agent.specs import load_spec

ROOT = Path(__file__).parents[2] / "generated"
NAME = "gemm_rmsnorm"


def simulated_us(c: TileConfig, m: int, n: int, k: int) -> float:
    """Waves of tiles over 100 SMs."""
    if not c.fused:
        c = TileConfig(128, 128, split_k=12)
    tiles = math.ceil(m / c.tile_m) * math.ceil(n / c.tile_n) * c.parts(k)
    return 5 + c.split_k + math.ceil(tiles / 100) * (k / c.parts(k)) * c.tile_m * c.tile_n / 3e6


class Clock:
    """A device whose time passes when something runs on it."""

    now = 0.0

    def settle(self) -> None: ...
    def synchronize(self) -> None: ...
    def spin(self, time_us: float) -> None: ...
    def work(self, times: int) -> None:
        Clock.now += 100 * times

    def mark(self) -> float:
        return Clock.now

    def elapsed_us(self, start: float, stop: float) -> float:
        return stop - start


class Launched:
    counts: ClassVar[dict[TileConfig, int]] = {}

    def __init__(
        self, spec: Any, program: Any, inputs: Any, dtypes: Any, config: TileConfig
    ) -> None:
        self.config, self.shape = config, inputs[0]["shape"]

    def restore(self, i: int) -> None: ...
    def __call__(self, i: int) -> None:
        Launched.counts[self.config] = Launched.counts.get(self.config, 0) + 1
        Clock.now += simulated_us(self.config, *self.shape)


@pytest.fixture
def job(monkeypatch: pytest.MonkeyPatch) -> SurveyJob:
    spec = load_spec(ROOT / NAME / "spec.md")
    sizes = tuple(
        dict(zip(spec.gemm_dims, s, strict=True)) for s in ((16, 512, 512), (4096, 4096, 512))
    )
    programs = load_kernel(ROOT / NAME).programs
    draw: Callable[..., Any] = lambda spec, sizes, *_, **__: {"shape": tuple(sizes.values())}
    monkeypatch.setattr("coda_agent.agent.judge.survey.draw_inputs", draw)
    monkeypatch.setattr(surveying, "DeviceClock", Clock)
    monkeypatch.setattr(surveying, "Launched", Launched)
    monkeypatch.setattr(surveying, "require_idle", lambda: None)
    monkeypatch.setattr(
        surveying, "_right", lambda *given: list(given[-1])[1:]
    )  # the first is wrong
    about = SimpleNamespace(multi_processor_count=100)
    monkeypatch.setattr("torch.cuda.get_device_properties", lambda _: about)
    tiles = offered(programs[NAME], [(1, 512, 512)])
    return SurveyJob(
        spec=spec.model_copy(update={"bench_shapes": sizes}), programs=dict(programs), tiles={(NAME, "bfloat16"): tiles}
    )  # fmt: skip


def test_times_of_right_tiles_on_offer_at_each_shape(job: SurveyJob) -> None:
    Launched.counts = {}
    sent = read_job(job.model_dump(mode="json"))
    answer = sent.run(lambda *_: None).model_dump(mode="json")
    found = Outcome.model_validate(answer).survey
    assert found is not None and (found.sms, found.dtype) == (100, "bfloat16")
    wrong, *right = job.tiles[NAME, "bfloat16"]
    assert list(found.configs.values()) == right
    for shape in found.shapes:
        on_offer = offered(job.programs[NAME], [(shape.m, shape.n, shape.k)])
        assert set(shape.us) == {c.label for c in on_offer} - {wrong.label}
        for label, us in shape.us.items():
            assert us == pytest.approx(
                simulated_us(found.configs[label], shape.m, shape.n, shape.k), abs=0.01
            )
    few, many = found.shapes
    assert set(many.us) < set(few.us)
    # What is far behind is not timed to the end.
    fastest = min(many.us, key=lambda label: many.us[label])
    slowest = max(many.us, key=lambda label: many.us[label])
    assert Launched.counts[found.configs[fastest]] > Launched.counts[found.configs[slowest]]
    assert survey(job.spec, job.programs, job.tiles, progress=lambda *_: None) == found


def test_long_products_count_in_streams_too(
    job: SurveyJob, monkeypatch: pytest.MonkeyPatch
) -> None:
    size = 2500, 4300, 18432
    sizes = dict(zip(job.spec.gemm_dims, size, strict=True))
    spec = job.spec.model_copy(update={"bench_shapes": (sizes,)})
    right = set(job.tiles[NAME, "bfloat16"][1:])
    on_offer = [c for c in offered(job.programs[NAME], [size]) if c in right]
    alone = {c.label: simulated_us(c, *size) for c in on_offer}
    fastest = min(alone.values())
    near = [label for label, us in alone.items() if us <= 1.1 * fastest]
    # In streams what is slower when warm is faster, and about one nothing is known.
    at = {label: 3 * fastest**2 / alone[label] for label in near}
    seen: list[str] = []

    def steady(runs: Any, *, gpu: Any) -> Any:
        seen.extend(runs)
        return {n: SimpleNamespace(median_us=at[n], fault=n == near[0] and "lost") for n in runs}

    monkeypatch.setattr(surveying, "steady", steady)
    (found,) = survey(spec, job.programs, job.tiles, progress=lambda *_: None).shapes
    assert 1 < len(near) < len(alone) and seen == near
    least = min(at[label] for label in near[1:])
    for label, us in found.us.items():
        if label in near[1:]:
            assert math.log(us / fastest) == pytest.approx(
                (math.log(alone[label] / fastest) + math.log(at[label] / least)) / 2, abs=1e-4
            )
        else:
            assert us == pytest.approx(alone[label], abs=0.01)


class Executor:
    """A GPU that measures as `simulated_us`; `broken` kernels do not compile."""

    def __init__(self, broken: str = "") -> None:
        self.measured: list[str] = []
        self.shapes: list[tuple[int, ...]] = []
        self.broken = broken

    def gpu(self) -> Gpu:
        return Gpu("GPU-1", "Test GPU", "9.0")

    def start(self, *, gpu: bool, ahead: Any = None) -> None: ...

    def map(self, jobs: Any, progress: Any) -> list[CompileError]:
        return [CompileError("no compiler here") for _ in jobs]

    def environment(self, device: str) -> dict[str, Any]:
        return {"cuda": "13.0", "packages": {"torch": "2"}, "gpu": {"driver_version": "5"}}


@pytest.fixture
def measuring(monkeypatch: pytest.MonkeyPatch) -> None:
    def measured(spec: Any, text: str, executor: Any, **_: Any) -> Survey:
        if spec.name == executor.broken:
            raise CompileError("it does not compile")
        executor.measured.append(spec.name)
        executor.shapes = [tuple(s.values()) for s in spec.bench_shapes]
        program = read_programs(text)[spec.variant(spec.bindings()[0])]
        found, configs = [], {}
        for m, n, k in (tuple(s.values()) for s in spec.bench_shapes):
            tiles = offered(program, [(m, n, k)])
            configs |= {c.label: c for c in tiles}
            us = {c.label: simulated_us(c, m, n, k) for c in tiles}
            found.append(SurveyedShape(m=m, n=n, k=k, us=us))
        return Survey(sms=100, dtype="bfloat16", configs=configs, shapes=tuple(found))

    monkeypatch.setattr(fitting, "survey_candidate", measured)


def run(
    folder: Path,
    names: list[str],
    executor: Any,
    *,
    fresh: bool = False,
    count: int = 24,
    own: tuple[tuple[int, int, int], ...] = (),
) -> tuple[Path | None, list[str]]:
    kernels = [Kernel(name, ROOT / name) for name in names]
    lines: list[str] = []
    tables.read.cache_clear()
    wanted = Wanted(count, lambda _: own, fresh)
    path = fit_tables(folder, kernels, wanted, executor, lambda *_: None, lines.append)
    return path, lines


@pytest.mark.usefixtures("measuring")
def test_a_table_grows_kernel_by_kernel(tmp_path: Path) -> None:
    first = Executor(broken="gemm_rope")
    path, lines = run(tmp_path, [NAME, "gemm_rope"], first)
    assert path == tmp_path / "dispatch" / "test-gpu.json.xz" and first.measured == [NAME]
    assert re.fullmatch(
        rf"{NAME}: picks \d+\.\d% slower .* and \d+\.\d% at worst, at 24 shapes held back", lines[0]
    )
    assert lines[1] == "gemm_rope: it does not compile"
    again = Executor()
    _, lines = run(tmp_path, [NAME, "gemm_rope"], again)
    assert again.measured == ["gemm_rope"] and lines[0].startswith(f"{NAME}: known, picks")
    assert run(tmp_path, [NAME], again) == (None, lines[:1])
    run(tmp_path, [NAME], again, fresh=True)
    assert again.measured == ["gemm_rope", NAME]
    tables.read.cache_clear()
    table = tables.read(tmp_path, "Test GPU")
    assert table is not None and list(table.kernels) == [NAME, "gemm_rope"]
    entry = table.kernels[NAME]
    assert entry.machine == {"cuda": "13.0", "packages": {"torch": "2"}, "driver": "5"}
    assert entry.version == VERSIONS["compile"] and entry.regret.shapes == 24 == len(entry.shapes)
    program = load_kernel(ROOT / NAME).programs[NAME]
    model = tables.find(tmp_path, "Test GPU", NAME, program.digest, "bfloat16")
    assert model is not None
    for shape in ((4096, 4096, 4096), (100, 2048, 8192)):
        times = {c: simulated_us(c, *shape) for c in offered(program, [shape])}
        pick, _ = model.ranked(shape, times)[0]
        assert times[pick] <= 1.15 * min(times.values())


@pytest.mark.usefixtures("measuring")
@pytest.mark.slow
def test_what_was_measured_of_the_same_program_stays(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """More shapes are measured alone, and the entry holds the times of all of them."""
    executor = Executor()
    run(tmp_path, [NAME], executor)
    run(tmp_path, [NAME], executor, count=30)
    assert executor.shapes == shapes(30)[24:]
    tables.read.cache_clear()
    table = tables.read(tmp_path, "Test GPU")
    assert table is not None
    entry = table.kernels[NAME]
    assert entry.regret.shapes == 30
    found = entry.model(100).measured()
    assert list(found) == shapes(30)
    for shape, times in found.items():
        for config, us in times.items():
            assert us == pytest.approx(simulated_us(config, *shape), rel=3e-3)
    own = (200, 1024, 4096)
    run(tmp_path, [NAME], executor, count=30, own=(own, shapes(30)[0]))
    assert executor.shapes == [own]
    # What is fastest there is picked there.
    tables.read.cache_clear()
    table = tables.read(tmp_path, "Test GPU")
    assert table is not None
    model = table.kernels[NAME].model(100)
    times = model.measured()[own]
    (pick, us), *_ = model.ranked(own)
    assert us == pytest.approx(times[pick]) and times[pick] == min(times.values())
    monkeypatch.setitem(VERSIONS, "compile", VERSIONS["compile"] + 1)
    run(tmp_path, [NAME], executor)
    assert executor.shapes == shapes(24)


def test_shapes_are_spread_and_possible() -> None:
    found = shapes(72)
    assert len(set(found)) == 72 and shapes(24) == found[:24]
    octaves = [{int(math.log2(s[axis])) for s in found} for axis in range(3)]
    assert (
        octaves[0] >= {0, *range(3, 14)}
        and octaves[1] >= set(range(10, 15))
        and octaves[2] >= set(range(8, 15))
    )
    assert all(m * n * k <= 2**38 and n % 128 == 0 and k % 64 == 0 for m, n, k in found)
