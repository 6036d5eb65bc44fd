"""A kernel against itself: how often the clock calls the two different, which they are not."""

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from coda_agent.evals import contenders
from coda_agent.evals.judge.scores import Say
from coda_agent.evals.pages import gpu_record, today, write_record
from coda_agent.evals.workloads import make_workload
from coda_agent.generated.kernel import Kernel
from coda_agent.primitives.tiles import DEFAULT_CONFIGS

KERNEL = "gemm_residual_partial_rmsnorm"
"""Two launches, reading and writing tiles: more to vary than a bare product."""
DTYPE = "bfloat16"


def score_timing(
    root: Path, kernel: Kernel, *, clock: Any, machine: Mapping[str, Any],
    trials: int = 200, rounds: int = 50, device: str = "cuda", say: Say = lambda *_: None,
) -> Path:  # fmt: skip
    """Compare a kernel with itself, and cuBLAS's product with itself, at its smallest bench shape,
    where noise is the largest share; the record, judge-timing-<gpu>.json in evals/results/.

    `clock` is `coda_agent.agent.judge.timing`. Device "cpu" interprets instead, for tests.

    Raises:
        MachineError: the GPU is in use, or its clocks disagree.
    """
    clock.require_idle()
    sizes = min(kernel.spec.bench_shapes, key=lambda s: math.prod(s.values()))
    workload = make_workload(kernel, sizes, DTYPE, device)
    config = kernel.choose(*workload.mnk, DTYPE) or DEFAULT_CONFIGS["sm_90a"]
    calls = {"ours": contenders.ours(workload, config), "gemm": contenders.gemm(workload)}
    cells: dict[str, dict[str, Any]] = {}
    for name, call in calls.items():
        before = clock.gpu_state()

        def tell(done: int, total: int, _: str, name: str = name) -> None:
            say(done + 1, total, f"{name} against itself")

        found = clock.a_a(call, trials=trials, rounds=rounds, progress=tell)
        state = {"before": before, "after": clock.gpu_state()}
        cells[name] = {"sizes": workload.sizes, **found, "gpu": state}
    path = gpu_record(root, "judge-timing", machine, device)
    compared, different = (sum(c[k] for c in cells.values()) for k in ("trials", "different"))
    head = {"kernel": kernel.spec.name, "machine": machine, "date": today(), "compared": compared}
    write_record(path, {**head, "different": different}, cells)
    return path
