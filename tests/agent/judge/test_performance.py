"""The performance gate's decisions on made-up times: floors, launches, clocks, company, variants."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from coda_agent.agent.judge import performance, tuner
from coda_agent.agent.judge.machine import CONTENDED
from coda_agent.agent.judge.records import (
    Clock,
    Failure,
    Figures,
    Key,
    PerformanceReport,
    Timed,
    Tuned,
    Untimed,
)
from coda_agent.agent.judge.samples import Samples
from coda_agent.primitives.errors import CompileError, MachineError
from coda_agent.primitives.inspect import Ceiling
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.loading import load_kernel
from coda_agent.runtime.tuning import TunedShape
from coda_agent.specs import Spec

GENERATED = Path(__file__).parents[3] / "generated"
FIRST, SECOND = DEFAULT_CONFIGS["sm_90a"], TileConfig(128, 192, 2, 1, True)
SPLIT = TileConfig(128, 128, 1, 1, True, split_k=4)
QUIET = {"other_processes": 0, "utilization.gpu": "0"}


class Problem:
    """What the gate asks of a problem, without a GPU."""

    def __init__(
        self, spec: Spec, program: Program, binding: Any, sizes: Any, element: str
    ) -> None:
        self.spec, self.program, self.binding = spec, program, binding
        self.sizes, self.element, self.gemm_type = dict(sizes), element, element
        self.right: Callable[[TileConfig], bool] = lambda config: config != SPLIT
        self.mnk = tuple(self.sizes[dim] for dim in spec.gemm_dims)

    def is_right(self, config: TileConfig) -> bool:
        return self.right(config)

    def search(self, configs: Sequence[TileConfig]) -> list[tuple[TileConfig, float]]:
        return [(c, 100.0 + i) for i, c in enumerate(configs) if self.right(c)]

    def line(self, search: Sequence[tuple[TileConfig, float]], time_us: float) -> TunedShape:
        m, n, k = (self.sizes[dim] for dim in self.spec.gemm_dims)
        return TunedShape(m=m, n=n, k=k, config=search[0][0], median_us=time_us)


class Bench:
    """Stands in for the GPU: times by contender, in microseconds."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.times = {"gemm": 108.0, "compile": 150.0}
        self.ours = {FIRST: 110.0, SECOND: 105.0, SPLIT: 111.0}
        self.faults: dict[str, str] = {}
        self.slower = {"ours": 1.25}  # in the steady regime
        self.stalled: dict[str, str] = {}
        self.launches, self.wrong, self.after = [1], 0, QUIET
        self.ceiling = Ceiling(1e18, 1e15)
        self.asked: list[str] = []
        states: list[Any] = []

        def state() -> Any:
            states.append(0)
            return QUIET if len(states) % 2 else self.after

        monkeypatch.delenv(CONTENDED, raising=False)
        monkeypatch.setattr(performance, "_timed", self.timed)
        monkeypatch.setattr(performance, "gpu_state", state)
        monkeypatch.setattr(performance, "measured_ceiling", lambda dtype: self.ceiling)
        monkeypatch.setattr(performance, "Problem", Problem)
        monkeypatch.setattr(tuner, "Problem", Problem)
        monkeypatch.setattr(tuner, "require_idle", lambda: self.asked.append("idle"))

    def timed(
        self, cell: Any, configs: Sequence[TileConfig], stored: TileConfig | None, stream: bool
    ) -> tuple[dict[str, Samples], dict[str, Samples], int]:
        times = {c.label: self.ours[c] for c in configs} | self.times
        clock = Clock(regime="warm", method="events, host, kernels", launches=tuple(self.launches))
        samples = {
            n: Samples(() if n in self.faults else (t,) * 50, clock, self.faults.get(n, ""))
            for n, t in times.items()
        }
        sound = [self.ours[c] for c in configs if c.label not in self.faults]
        streams = {} if not stream or not sound else {
            n: Samples((t * self.slower.get(n, 1),) * 3, None, self.stalled.get(n, ""))
            for n, t in {"ours": min(sound), **self.times}.items()
        }  # fmt: skip
        return samples, streams, self.wrong


@pytest.fixture
def bench(monkeypatch: pytest.MonkeyPatch) -> Bench:
    return Bench(monkeypatch)


def judged(
    name: str = "gemm_rmsnorm_swiglu",
    tiles: Sequence[TileConfig] = (FIRST, SECOND),
    known: Tuned | None = None,
) -> tuple[list[str], PerformanceReport, Tuned]:
    kernel = load_kernel(GENERATED / name)
    admitted = {(p, "bfloat16"): tuple(tiles) for p in kernel.programs}
    outcome = performance.check_performance(
        kernel.spec, kernel.programs, admitted, known, progress=lambda *_: None
    )
    assert outcome.report is not None
    return [f.message for f in outcome.findings], outcome.report, outcome.tuned


def timed(report: PerformanceReport) -> list[Timed]:
    """The cells, which all hold times."""
    assert report.timed == [*report.cells]
    return report.timed


def test_a_fast_kernel_passes_with_its_figures(bench: Bench) -> None:
    found, data, tuned = judged()
    assert found == [] and bench.asked == ["idle"]
    cell = timed(data)[0]
    assert cell.tile == SECOND.label and cell.config == SECOND
    assert cell.of_gemm.ratio == round(108 / 105, 4)
    assert cell.over_compile.ratio == round(150 / 105, 4)
    assert cell.finalists_us == {FIRST.label: 110.0, SECOND.label: 105.0}
    clock = cell.times["ours"].clock
    assert clock and clock.launches == cell.launches == (1,)
    line = tuned["bfloat16"][0]
    assert (line.config, line.median_us) == (SECOND, 105.0)
    assert {line.m, line.n, line.k} == {*cell.sizes.values()}
    assert data.variants == ()
    assert PerformanceReport.model_validate_json(data.model_dump_json()) == data


def test_what_is_stored_stays_unless_another_is_surely_faster(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, data, _ = judged()
    shapes = [tuple(c.sizes[dim] for dim in "MNK") for c in timed(data)]
    stored = tuple(TunedShape(m=m, n=n, k=k, config=FIRST, median_us=99.0) for m, n, k in shapes)
    _, data, tuned = judged(known={"bfloat16": stored})
    assert {c.config for c in timed(data)} == {SECOND}  # 105 us to 110 us in every round
    assert {line.config for line in tuned["bfloat16"]} == {SECOND}

    real = bench.timed

    def noisy(*given: Any) -> Any:
        samples, *rest = real(*given)
        uneven = tuple(t * f for t in samples[SECOND.label].times_us[:25] for f in (0.9, 1.1))
        return {**samples, SECOND.label: replace(samples[SECOND.label], times_us=uneven)}, *rest

    monkeypatch.setattr(performance, "_timed", noisy)
    _, data, tuned = judged()
    assert {c.config for c in timed(data)} == {SECOND}
    _, data, tuned = judged(known={"bfloat16": stored})
    assert {c.config for c in timed(data)} == {FIRST}
    assert {line.config for line in tuned["bfloat16"]} == {FIRST}
    _, data, _ = judged(tiles=(SECOND,), known={"bfloat16": stored})  # it is refused by now
    assert {c.config for c in timed(data)} == {SECOND}


def test_the_steady_regime_is_recorded_and_decides_nothing(bench: Bench) -> None:
    bench.slower = {"ours": 2.0}
    found, data, _ = judged("gemm_bias_act")
    assert found == []
    for cell in timed(data):
        assert cell.of_gemm.ratio == round(108 / 105, 4)
        assert isinstance(cell.steady, Figures)
        assert cell.steady.of_gemm.ratio == round(108 / 210, 4)
        assert cell.steady.over_compile.ratio == round(150 / 210, 4)
        assert cell.steady.times["ours"].times_us == (210.0,) * 3
    # One figure a shape is enough.
    assert all(isinstance(v, Timed) and v.steady is None for v in data.variants)
    bench.stalled = {"compile": "the device waited for the host"}
    found, data, _ = judged()
    assert found == []
    assert timed(data)[0].steady == Failure(error="the device waited for the host")


def test_a_time_below_the_measured_floor_is_no_win(bench: Bench) -> None:
    kernel = load_kernel(GENERATED / "gemm_rmsnorm_swiglu")
    m, n, k = (kernel.spec.bench_shapes[0][d] for d in kernel.spec.gemm_dims)
    bench.ceiling = Ceiling(2 * m * n * k / 106e-6, 1e15)  # the product alone takes 106 us
    found, data, _ = judged()
    assert timed(data)[0].floor_us == 106.0
    assert found[0] == "105.0 us is below the roofline floor of 106.0 us"
    bench.ceiling = Ceiling(2 * m * n * k / 104e-6, 1e15)
    found, data, _ = judged()  # the larger shapes only, in the same time
    below = [message for message in found if "below the roofline" in message]
    assert timed(data)[0].floor_us == 104.0 and len(below) == len(data.cells) - 1


def test_other_launches_than_declared_are_refused(bench: Bench) -> None:
    bench.launches = [2]
    found, _, _ = judged()
    assert found[0] == "[2] launches were seen, the program declares 1"
    assert judged("gemm_residual_partial_rmsnorm")[0] == []  # one to fold its row sums
    bench.launches = [1, 2]
    assert judged("gemm_residual_partial_rmsnorm")[0][0].startswith("[1, 2] launches were seen")


def test_parts_of_k_take_no_further_launch(bench: Bench, monkeypatch: Any) -> None:
    monkeypatch.setattr(Problem, "is_right", lambda self, config: True)
    monkeypatch.setattr(Problem, "search", lambda self, configs: [(c, 100.0) for c in configs])
    assert judged(tiles=[SPLIT])[0] == []
    bench.launches = [2]  # the flags were cleared by a fill
    assert judged(tiles=[SPLIT])[0][0] == "[2] launches were seen, the program declares 1"


@pytest.mark.parametrize("who", ["gemm", "compile"])
def test_clocks_that_disagree_about_a_baseline_are_the_machines_fault(
    bench: Bench, who: str
) -> None:
    bench.faults = {who: "the clocks disagree: so much"}
    with pytest.raises(MachineError, match="the clocks disagree: so much"):
        judged()


def test_clocks_that_disagree_about_the_kernel_leave_a_finding_and_no_figure(bench: Bench) -> None:
    bench.faults = dict.fromkeys((FIRST.label, SECOND.label), "the clocks disagree: so much")
    found, data, tuned = judged()
    assert set(found) == {"the clocks disagree: so much"} and tuned == {}
    assert data.cells and not data.timed
    for cell in data.cells:
        assert isinstance(cell, Untimed) and cell.clocks
        assert cell.clocks[FIRST.label].method == "events, host, kernels"


def test_a_finalist_about_which_clocks_disagree_is_not_ours(bench: Bench) -> None:
    bench.faults = {SECOND.label: "the clocks disagree: so much"}
    found, data, _ = judged()
    assert found == [] and timed(data)[0].tile == FIRST.label
    bench.faults[FIRST.label] = "the clocks disagree: and here"
    assert "the clocks disagree" in judged()[0][0]


def test_company_during_the_measurement_is_refused(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.after = {**QUIET, "other_processes": 1}
    assert judged()[0][0] == "1 other processes came onto the GPU while it was timed"
    monkeypatch.setenv(CONTENDED, "1")
    assert judged()[0] == []


def test_slow_or_wrong_kernels_are_refused(bench: Bench) -> None:
    bench.times = {"gemm": 60.0, "compile": 100.0}
    bench.wrong = 3
    found, data, _ = judged()
    assert "3 timed outputs were wrong" in found
    assert "slower than torch.compile: 0.952 of its speed" in found
    targets = [f for f in found if "target" in f]
    assert len(targets) == 1 < len(data.cells)  # at the largest shape only
    assert targets[0].startswith("0.571 of the bare GEMM's speed")


def test_every_variant_is_timed_once_in_the_best_tile_that_suits_it(bench: Bench) -> None:
    found, data, _ = judged("gemm_bias_act")
    kernel = load_kernel(GENERATED / "gemm_bias_act")
    names = [kernel.spec.variant(b) for b in kernel.spec.bindings()]
    assert found == [] and len(names) == 6
    assert [v.program for v in data.variants] == names[1:]
    assert all(isinstance(v, Timed) and v.tile == SECOND.label for v in data.variants)
    largest = max(kernel.spec.bench_shapes, key=lambda s: math.prod(s.values()))
    assert all(v.sizes == dict(largest) for v in data.variants)
    assert {c.dtype for c in data.cells} == {"bfloat16"}

    admitted: dict[Key, tuple[TileConfig, ...]] = {
        (p, "bfloat16"): (FIRST,) for p in kernel.programs
    }
    admitted[names[0], "bfloat16"] = (FIRST, SECOND)
    admitted[names[2], "bfloat16"] = ()
    outcome = performance.check_performance(
        kernel.spec, kernel.programs, admitted, progress=lambda *_: None
    )
    assert outcome.report is not None
    tiles = [v.tile if isinstance(v, Timed) else None for v in outcome.report.variants]
    assert tiles == [FIRST.label, None, FIRST.label, FIRST.label, FIRST.label]
    (finding,) = outcome.findings
    assert finding.message == "no tile computes the right result at this shape"
    assert finding.where["program"] == names[2]


def test_tuning_walks_types_and_shapes_and_says_where_nothing_is_right(bench: Bench) -> None:
    kernel = load_kernel(GENERATED / "gemm_rmsnorm_swiglu")
    name, shapes = kernel.spec.variant(), kernel.spec.bench_shapes
    said: list[tuple[int, int]] = []
    tuned = tuner.tune(
        kernel.spec,
        kernel.programs,
        {(name, "float16"): (FIRST,), (name, "bfloat16"): (SECOND,)},
        progress=lambda done, total, _: said.append((done, total)),
    )
    assert [line.config for line in tuned["bfloat16"]] == [SECOND] * len(shapes)
    found = [(line.m, line.n, line.k) for line in tuned["float16"]]
    assert found == [tuple(s[dim] for dim in kernel.spec.gemm_dims) for s in shapes]
    assert said == [(i, 2 * len(shapes)) for i in range(2 * len(shapes) + 1)]
    assert bench.asked == ["idle"]
    with pytest.raises(CompileError, match="no tile computes the right result at"):
        tuner.tune(
            kernel.spec, kernel.programs, {(name, "float16"): (SPLIT,)}, progress=lambda *_: None
        )


def test_a_search_leaves_out_whom_the_clocks_disagree_about(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    samples = {
        FIRST.label: Samples((3.0,)), SECOND.label: Samples((), None, "the clocks disagree"),
    }  # fmt: skip
    monkeypatch.setattr(tuner, "interleave", lambda runs, rounds, warmup: samples)
    cell: Any = SimpleNamespace(run=lambda config: config)
    ranked = tuner.Problem._ranked
    assert ranked(cell, [FIRST, SECOND], 9) == [(FIRST, 3.0)]
    samples[FIRST.label] = Samples((), None, "the clocks disagree")
    with pytest.raises(MachineError, match="the clocks disagree"):
        ranked(cell, [FIRST, SECOND], 9)


def test_facts_count_the_bytes_of_the_specs_types() -> None:
    kernel = load_kernel(GENERATED / "gemm_fp8_swiglu_quantised")
    spec, m, n, k = kernel.spec, 256, 512, 128
    sizes = dict(zip(spec.gemm_dims, (m, n, k), strict=True))
    facts = performance.inspected(spec, kernel.programs[spec.variant()], sizes, "bfloat16")
    # 8-bit operands and gated output; two float32 scales; maxima of the rows of 128-column blocks.
    written = m * n // 2 + 4 * m * (n // 128)
    assert facts.gemm_bytes == 1
    assert facts.bytes_written == written
    assert facts.bytes_moved == (m * k + n * k) + 4 * (m + n) + written


@pytest.fixture(autouse=True)
def no_cuda(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:

    def refuse() -> None:
        raise AssertionError("a unit test reached for CUDA")

    monkeypatch.setattr(torch.cuda, "init", refuse)
    yield
