"""The record of a kernel timed against itself; the clock is handed in, the kernel interpreted."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from coda_agent.evals.judge.scores import KERNEL, score_timing
from coda_agent.generated.kernel import load_kernel

ROOT = Path(__file__).parents[2]


class Clock:
    """Runs a contender once on either set of inputs, and says it was called different once."""

    def __init__(self) -> None:
        self.idle = 0
        self.outputs: list[set[str]] = []

    def a_a(
        self, call: Callable[[int], Any], *, trials: int, rounds: int, progress: Any
    ) -> dict[str, Any]:
        self.outputs += [set(call(i)) for i in (0, 1)]
        progress(0, trials, "")
        return {"trials": trials, "rounds": rounds, "median_us": 201.5, "different": 1,
                "excludes_1": 2, "ratios": [1.0] * trials, "widest": 0.1}  # fmt: skip

    def gpu_state(self) -> dict[str, Any]:
        return {"clocks.sm": "1980"}

    def require_idle(self) -> None:
        self.idle += 1


def test_both_contenders_are_compared_at_the_smallest_shape(tmp_path: Path) -> None:
    kernel = load_kernel(ROOT / "generated" / KERNEL)
    small, large = ({"M": m, "N": 256, "K": 64} for m in (128, 384))
    kernel.spec = kernel.spec.model_copy(update={"bench_shapes": (large, small)})
    clock = Clock()
    machine = {"gpu": {"name": "NVIDIA H200"}, "packages": {}}
    said: list[tuple[int, int, str]] = []
    path = score_timing(
        tmp_path, kernel, clock=clock, machine=machine, trials=13, device="cpu",
        say=lambda *told: said.append(told),
    )  # fmt: skip
    assert path == tmp_path / "evals" / "results" / "judge-timing-nvidia-h200.json"
    record = json.loads(path.read_text())
    assert (record["kernel"], record["compared"], record["different"]) == (KERNEL, 26, 2)
    assert said == [(1, 13, f"{n} against itself") for n in ("ours", "gemm")]
    ours = record["cells"]["ours"]
    assert (ours["trials"], len(ours["ratios"]), ours["excludes_1"]) == (13, 13, 2)
    assert (ours["median_us"], ours["widest"]) == (201.5, 0.1)
    assert set(record["cells"]) == {"ours", "gemm"}
    assert record["cells"]["ours"]["sizes"] == small
    assert record["cells"]["gemm"]["gpu"]["after"] == {"clocks.sm": "1980"}
    assert clock.idle == 1
    assert clock.outputs == [set(kernel.spec.outputs)] * 2 + [{"product"}] * 2
