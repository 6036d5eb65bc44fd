"""The clocks, the floor and the refusals on a real GPU."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from coda_agent.agent.judge import performance, timing
from coda_agent.agent.judge.baselines import prepare
from coda_agent.agent.judge.machine import CONTENDED, gpu_state, require_idle
from coda_agent.agent.judge.records import Figures, Timed
from coda_agent.agent.judge.samples import different, speedup
from coda_agent.agent.judge.timing import interleave, steady
from coda_agent.agent.judge.tuner import Problem
from coda_agent.primitives import Tile, epilogue
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.inspect import inspect_program, roofline
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.tiles import DEFAULT_CONFIGS, TileConfig
from coda_agent.runtime.loading import load_kernel

pytestmark = [pytest.mark.gpu, pytest.mark.alone]

GENERATED = Path(__file__).parents[2] / "generated"
SIZE = 4096
SPINNER = """
import torch
x = torch.ones(1, device="cuda")
while True:
    torch.cuda._sleep(50_000_000)
    torch.cuda.synchronize()
"""


@pytest.fixture(scope="module")
def operands() -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator("cuda").manual_seed(0)
    a, b = (
        torch.randn(SIZE, SIZE, device="cuda", dtype=torch.bfloat16, generator=generator)
        for _ in range(2)
    )
    return a, b, torch.empty_like(a)


@pytest.fixture
def product(operands: Any) -> Callable[[int], Any]:
    a, b, out = operands
    return lambda _: torch.mm(a, b.t(), out=out)


@epilogue(O=Tile)
def identity(acc):
    return {"O": acc}


def test_three_clocks_agree_on_a_product(
    product: Callable[[int], Any], operands: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    _, _, out = operands
    # After a pause the product took 176 us on an H200, from about 40 calls on 197, at the clock that
    # its power leaves it: three traced calls are faster than a measurement's median.
    monkeypatch.setattr(timing, "_TRACED", 100)

    def followed(i: int) -> None:
        product(i)
        out.relu_()

    found = interleave({"gemm": product, "followed": followed}, 40)
    assert [s.fault for s in found.values()] == ["", ""]
    clock = found["gemm"].clock
    assert clock is not None
    assert clock.method == "events, host, kernels", clock
    assert clock.persisting_l2 == "released", clock
    # cuBLAS clears a counter before its kernel.
    assert (clock.kernels or ("",))[-1].startswith("nvjet") and clock.launches in ((1,), (2,)), (
        clock
    )
    assert (after := found["followed"].clock) and after.launches == (
        (clock.launches or (0,))[0] + 1,
    )
    assert clock.traced_us == pytest.approx(clock.busy_us, abs=10)
    assert clock.busy_us == pytest.approx(found["gemm"].median_us, rel=0.1)
    assert found["followed"].median_us > found["gemm"].median_us


@pytest.mark.parametrize("trace", [True, False])
def test_work_on_a_side_stream_leaves_no_figure(product: Callable[[int], Any], trace: bool) -> None:
    side = torch.cuda.Stream()

    def hiding(i: int) -> None:
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side):
            product(i)

    found = interleave({"gemm": product, "hiding": hiding}, 20, trace=trace)
    assert found["gemm"].fault == ""
    assert "the clocks disagree: the host saw" in steady({"hiding": hiding})["hiding"].fault
    assert "the clocks disagree: the host saw" in found["hiding"].fault
    with pytest.raises(MachineError):
        _ = found["hiding"].median_us


def test_a_steady_product_takes_what_a_plain_loop_of_it_takes(
    product: Callable[[int], Any],
) -> None:
    found = steady({"gemm": product})["gemm"]
    assert found.fault == "" and len(found.times_us) == 3
    for _ in range(600):
        product(0)
    start, stop = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(600):
        product(0)
    stop.record()
    torch.cuda.synchronize()
    assert found.median_us == pytest.approx(1000 * start.elapsed_time(stop) / 600, rel=0.05)


def test_no_product_is_faster_than_the_measured_floor(product: Callable[[int], Any]) -> None:
    ceiling = performance.measured_ceiling("bfloat16")
    print(f"{ceiling}")
    assert 500e12 < ceiling.flops_s / performance._FLOPS_SLACK < 1000e12
    assert 3e12 < ceiling.bytes_s / performance._BYTES_SLACK < 4.8e12
    assert ceiling.l2_bytes > 30e6
    assert performance.measured_ceiling("float8_e4m3fn").flops_s > 1.3 * ceiling.flops_s
    median = interleave({"gemm": product}, 20)["gemm"].median_us
    floor = roofline(inspect_program(identity, (SIZE, SIZE, SIZE)), ceiling).floor_us
    assert 0.5 * median < floor < median


@pytest.mark.parametrize(
    ("name", "config", "launches"),
    [
        ("gemm_residual_partial_rmsnorm", DEFAULT_CONFIGS["sm_90a"], 2),
        ("gemm_rmsnorm_partial_cross_entropy", DEFAULT_CONFIGS["sm_90a"], 2),
        ("gemm_bias_act", TileConfig(128, 128, 1, 1, True, split_k=4), 1),
    ],
)
def test_a_kernel_is_measured_with_the_launches_it_declares(
    name: str, config: TileConfig, launches: int
) -> None:
    use_cache()
    kernel = load_kernel(GENERATED / name)
    spec = kernel.spec
    sizes = dict(zip(spec.gemm_dims, (2048, 4096, 4096), strict=True))
    problem = Problem(spec, kernel.programs[spec.variant()], spec.bindings()[0], sizes, "bfloat16")
    assert problem.is_right(config)
    record = performance._measured(problem, [config])
    assert isinstance(record, Timed), record
    ours = record.times["ours"]
    assert ours.clock and ours.clock.launches == (launches,), ours.clock
    assert launches in record.launches
    assert record.mismatches == 0
    assert 0 < record.floor_us < ours.median_us
    assert isinstance(record.steady, Figures), record.steady
    # One more where another contender lost a round to a busy host.
    assert len(record.steady.times["ours"].times_us) >= 3, record.steady
    assert record.floor_us < record.steady.times["ours"].median_us


def test_a_baseline_that_was_prepared_is_not_compiled_again() -> None:
    use_cache()
    kernel = load_kernel(GENERATED / "gemm_rmsnorm_swiglu")
    sizes = dict(zip(kernel.spec.gemm_dims, (512, 512, 512), strict=True))
    spec = kernel.spec.model_copy(update={"bench_shapes": (sizes,)})
    compiled = torch._dynamo.utils.counters["stats"]
    prepare(spec, ["bfloat16"])
    before = compiled["unique_graphs"]
    problem = Problem(spec, kernel.programs[spec.variant()], spec.bindings()[0], sizes, "bfloat16")
    record = performance._measured(problem, [DEFAULT_CONFIGS["sm_90a"]])
    assert isinstance(record, Timed), record
    assert compiled["unique_graphs"] == before > 0


def test_the_state_of_the_gpu_is_numbers() -> None:
    state = gpu_state()
    assert "error" not in state
    for field in ("clocks.sm", "clocks.mem", "temperature.gpu", "power.draw"):
        assert float(state[field]) > 0, state
    assert int(str(state["clocks_event_reasons.active"]), 16) >= 0
    assert state["other_processes"] == 0, state


def test_a_gpu_that_another_process_uses_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(CONTENDED, raising=False)
    require_idle()
    # Through a shell that ends: a child of ours would be no stranger.
    started = subprocess.run(
        ["sh", "-c", '"$0" -c "$1" >/dev/null 2>&1 & echo $!', sys.executable, SPINNER],
        capture_output=True, text=True, check=True,
    )  # fmt: skip
    try:
        until = time.monotonic() + 90
        while not gpu_state()["other_processes"] and time.monotonic() < until:
            time.sleep(0.5)
        with pytest.raises(MachineError, match="the GPU is in use: 1 other processes are on it"):
            require_idle()
        monkeypatch.setenv(CONTENDED, "1")
        require_idle()
    finally:
        os.kill(int(started.stdout), signal.SIGKILL)
    monkeypatch.delenv(CONTENDED)
    require_idle()


def test_a_product_against_itself_is_not_called_different(product: Callable[[int], Any]) -> None:
    found = [interleave({"a": product, "b": product}, 50, warmup=1) for _ in range(40)]
    # 0.08 are expected at most.
    assert sum(different(speedup(pair["a"], pair["b"])) for pair in found) <= 1
