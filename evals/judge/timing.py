"""A kernel against itself: how often the clock calls the two different, which they are not."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from coda_agent.evals import contenders
from coda_agent.evals.judge.scores import Say
from coda_agent.evals.pages import gpu_record, today, write_record
from coda_agent.primitives.tiles import DEFAULT_CONFIGS

if TYPE_CHECKING:
    from coda_agent.generated.kernel import Kernel

KERNEL = "gemm_residual_partial_rmsnorm"
"""Two launches, reading and writing tiles: more to vary than a bare product."""
DTYPE = "bfloat16"
_PART = 10  # comparisons between two words about progress; 400 took over 150 s on an H200


def score_timing(
    root: Path, kernel: Kernel, *, clock: Any, machine: Mapping[str, Any],
    trials: int = 200, rounds: int = 50, device: str = "cuda", say: Say = lambda *_: None,
) -> Path:  # fmt: skip
    """Compare a kernel with itself, and cuBLAS's product with itself, at its smallest bench shape,
    where noise is the largest share.

    Args:
        root: The workspace; the record goes to its evals/results/.
        kernel: The kernel.
        clock: What times, `coda_agent.agent.judge.timing`.
        machine: `gpu` (name, driver) and `packages`, kept in the record.
        trials: Comparisons of each of the two.
        rounds: Timed rounds a comparison.
        device: "cpu" interprets instead, for tests.
        say: Told of progress.

    Returns:
        The record, judge-timing-<gpu>.json.

    Raises:
        MachineError: the GPU is in use, or its clocks disagree.
    """
    clock.require_idle()
    sizes = min(kernel.spec.bench_shapes, key=lambda s: math.prod(s.values()))
    case = contenders.make_case(kernel, sizes, DTYPE, device)
    config = kernel.choose(*case.mnk, DTYPE) or DEFAULT_CONFIGS["sm_90a"]
    calls = {"ours": contenders.ours(case, config), "gemm": contenders.gemm(case)}
    cells: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        before = clock.gpu_state()
        parts = []
        for done in range(0, trials, _PART):
            say(done + 1, trials, f"{name} against itself")
            parts.append(clock.a_a(call, trials=min(_PART, trials - done), rounds=rounds))
        state = {"before": before, "after": clock.gpu_state()}
        cells[name] = {
            "sizes": case.sizes, "trials": trials, "rounds": rounds,
            "median_us": statistics.median(p["median_us"] for p in parts),
            **{key: sum(p[key] for p in parts) for key in ("different", "excludes_1")},
            "ratios": [ratio for p in parts for ratio in p["ratios"]],
            "widest": max(p["widest"] for p in parts), "gpu": state,
        }  # fmt: skip
    path = gpu_record(root, "judge-timing", machine, device)
    compared, different = (sum(c[k] for c in cells.values()) for k in ("trials", "different"))
    head = {"kernel": kernel.spec.name, "machine": machine, "date": today(), "compared": compared}
    write_record(path, {**head, "different": different}, cells)
    return path
