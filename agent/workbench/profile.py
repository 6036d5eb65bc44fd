"""What the hardware does with a program: the roofline from its graph, Nsight Compute's counters.

Nsight Compute (`ncu`) is used where it is installed and the driver lets it read counters.
"""

import csv
import io
import json
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import torch

from coda_agent.agent.explain import compiled, program_of
from coda_agent.agent.judge.performance import inspected
from coda_agent.agent.judge.runners import run_kernel
from coda_agent.primitives import inspect
from coda_agent.primitives.errors import MachineError
from coda_agent.primitives.objects import use_cache
from coda_agent.primitives.program import Program
from coda_agent.primitives.tiles import DEFAULT_CONFIGS
from coda_agent.runtime.target import instructions
from coda_agent.specs import Spec, draw_inputs, load_spec

TIMEOUT_S = 300

_STALLS = ("barrier", "long_scoreboard", "math_pipe_throttle", "wait", "gmma")
METRICS = {
    "time": "gpu__time_duration.sum",
    "registers": "launch__registers_per_thread",
    "occupancy, % of warps": "sm__warps_active.avg.pct_of_peak_sustained_active",
    "SM throughput, %": "sm__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM throughput, %": "dram__throughput.avg.pct_of_peak_sustained_elapsed",
    "DRAM bytes read": "dram__bytes_read.sum",
    "DRAM bytes written": "dram__bytes_write.sum",
    **{
        f"stall: {name.replace('_', ' ')}":
        f"smsp__average_warps_issue_stalled_{name}_per_issue_active.ratio"
        for name in _STALLS
    },
}  # fmt: skip
"""Nsight Compute's counter by the name an author is shown; times come in us, sizes in bytes."""


def roofline(spec: Spec, text: str, name: str | None = None) -> str:
    """Flops, least bytes and the floor in microseconds at each bench shape, on an H200, in the
    spec's first element type."""
    program, element = program_of(spec, text, name), spec.elements[0]
    lines: list[str] = []
    for sizes in spec.bench_shapes:
        m, n, k = (sizes[dim] for dim in spec.gemm_dims)
        facts = inspected(spec, program, sizes, element)
        least = inspect.roofline(facts, inspect.datasheet(facts.gemm_bytes))
        lines.append(
            f"{m}x{n}x{k}: GEMM {facts.gemm_flops / 1e9:.1f} GFLOP, epilogue "
            f"{facts.epilogue_flops / 1e9:.3f} GFLOP, {facts.bytes_moved / 1e6:.1f} MB at least; "
            f"floor {least.floor_us:.1f} us "
            f"({'compute' if least.compute_us > least.memory_us else 'memory'} bound)"
        )
        if len(lines) == 1:
            about = f"launches {facts.launches}, tile-local {facts.tile_local}"
            lines.insert(0, f"{program.name}: {about}, split-K-safe {facts.split_k_safe}")
    return "\n".join(lines)


def profile(spec: Spec, text: str, incumbent: str | None) -> str:
    """The candidate's counters at the first bench shape, and how they differ from the incumbent's.

    Raises:
        MachineError: ncu is missing or may not read the counters.
    """
    if not shutil.which("ncu"):
        hint = "benchmark gives times, inspect the roofline"
        raise MachineError("Nsight Compute (ncu) is not installed here", hint=hint)
    program = program_of(spec, text)
    now = _counters(spec, program) | opcodes(spec, program)
    then: dict[str, float] = {}
    if incumbent:
        other = program_of(spec, incumbent)
        then = _counters(spec, other) | opcodes(spec, other)
    m, n, k = (spec.bench_shapes[0][dim] for dim in spec.gemm_dims)
    facts = inspected(spec, program, spec.bench_shapes[0], spec.elements[0])
    lines = [f"{program.name} at {m}x{n}x{k}; least bytes {facts.bytes_moved / 1e6:.1f} MB"]
    for label, value in now.items():
        line = f"  {label:<26} {value:>16,.2f}"
        if old := then.get(label):
            line += f"  ({(value / old - 1) * 100:+.1f} % against the accepted kernel)"
        lines.append(line)
    return "\n".join(lines)


def opcodes(spec: Spec, program: Program) -> dict[str, float]:
    """How often each instruction that says how a kernel works stands in its SASS for sm_90a."""
    found = instructions(compiled(spec, program, "sass"))
    return {f"{name} in SASS": float(count) for name, count in {"STL": 0, **found}.items()}


def _counters(spec: Spec, program: Program) -> dict[str, float]:
    """The metrics of one launch of the program, at the first bench shape."""
    job = {"spec": str(spec.path), "program": program.to_dict()}
    # The name leaves out the launches that draw inputs and poison outputs.
    command = ["ncu", "--csv", "--page", "raw", "--kernel-name", "regex:cutlass"]
    command += ["--launch-skip", "2", "--launch-count", "1"]
    command += ["--metrics", ",".join(METRICS.values())]
    command += [sys.executable, "-m", "coda_agent.agent.workbench.profile"]
    done = subprocess.run(
        command, input=json.dumps(job), text=True, capture_output=True, timeout=TIMEOUT_S
    )
    rows = [line for line in done.stdout.splitlines() if line.startswith('"')]
    if done.returncode or len(rows) < 3:
        said = (done.stdout + done.stderr).strip().splitlines() or ["no output"]
        denied = [line for line in said if "ERR_NVGPUCTRPERM" in line]
        raise MachineError(f"Nsight Compute gave no counters: {(denied or said)[-1]}")
    found = parse_counters(rows)
    return {label: found[metric] for label, metric in METRICS.items() if metric in found}


def parse_counters(rows: list[str]) -> dict[str, float]:
    """Numbers from ncu's raw page: a line of names, one of units, then one for each kernel."""
    names, units, *kernels = csv.reader(io.StringIO("\n".join(rows)))
    scale = {"ns": 1e-3, "ms": 1e3, "Kbyte": 1e3, "Mbyte": 1e6, "Gbyte": 1e9}
    found: dict[str, float] = {}
    for name, unit, value in zip(names, units, kernels[-1], strict=True):
        try:
            found[name] = float(value.replace(",", "")) * scale.get(unit, 1.0)
        except ValueError:
            continue
    return found


def _launch(job: dict[str, Any]) -> None:
    """Body of the profiled process: three launches of the kernel at its default tile."""
    use_cache()
    spec = load_spec(Path(job["spec"]))
    types = spec.default_types()
    inputs = draw_inputs(
        spec, spec.bench_shapes[0], types, seed=0, device="cuda", binding=spec.bindings()[0]
    )
    dtypes = {o: getattr(torch, spec.dtype_of(o, types)) for o in spec.outputs}
    for _ in range(3):
        run_kernel(
            spec, Program.from_dict(job["program"]), inputs, DEFAULT_CONFIGS["sm_90a"], dtypes
        )
    torch.cuda.synchronize()


if __name__ == "__main__":
    _launch(json.load(sys.stdin))
