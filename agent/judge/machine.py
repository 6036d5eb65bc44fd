"""The machine that a verdict is given on: its GPU, and whether anybody else uses it."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from coda_agent.agent.judge.provenance import PACKAGES, version
from coda_agent.agent.judge.records import GpuState, JsonObject
from coda_agent.primitives.deferred import torch
from coda_agent.primitives.errors import MachineError, no_hopper

DEVICE_CHILD = "coda_agent.agent.execution.device_worker"
"""The module that runs on a GPU; whoever runs it is idle while we hold the GPU's lock."""
CONTENDED = "CODA_AGENT_CONTENDED"
"""Environment variable: set, a GPU that others use is benchmarked all the same."""
# Percent of the time, before a benchmark begins, from which on somebody is computing.
_BUSY = 10.0
_FIELDS = (
    "name", "driver_version", "clocks.sm", "clocks.mem", "temperature.gpu", "power.draw",
    "clocks_event_reasons.active", "utilization.gpu",
)  # fmt: skip


@dataclass(frozen=True)
class Gpu:
    """A GPU as nvidia-smi names it; `capability` such as 9.0."""

    uuid: str
    name: str
    capability: str
    driver: str = ""

    @property
    def arch(self) -> str:
        """As compilers spell it: sm_90."""
        return f"sm_{self.capability.replace('.', '')}"


def demanded(gpu: Gpu | None, hint: str = "`coda-agent doctor` says what there is") -> Gpu:
    """Demand that there is a GPU.

    Args:
        gpu: What was looked for.
        hint: What to do without one.

    Raises:
        MachineError: there is none.
    """
    if gpu is None:
        raise no_hopper(hint)
    return gpu


def smi(query: str, *more: str) -> list[list[str]]:
    """Ask nvidia-smi `--query-QUERY`; no rows where it does not answer."""
    ask = ["nvidia-smi", *more, f"--query-{query}", "--format=csv,noheader,nounits"]
    try:
        said = subprocess.run(ask, capture_output=True, text=True, timeout=20, check=True).stdout
    except (OSError, subprocess.SubprocessError):
        return []
    return [[cell.strip() for cell in line.split(",")] for line in said.splitlines()]


def gpu_state(uuid: str | None = None) -> GpuState:
    """Read a GPU's state, by default of the one in use."""
    visible = os.environ.get("CODA_AGENT_GPU") or os.environ.get("CUDA_VISIBLE_DEVICES") or "0"
    device = uuid or visible.split(",")[0]
    rows = smi(f"gpu={','.join(_FIELDS)}", "-i", device)
    if not rows:
        return {"error": f"nvidia-smi: no answer about GPU {device}"}
    state: GpuState = dict(zip(_FIELDS, rows[0], strict=False))
    processes = [row[0] for row in smi("compute-apps=pid", "-i", device)]
    has_context = "torch" in sys.modules and torch.cuda.is_initialized()
    state["compute_processes"] = len(processes)
    state["other_processes"] = others(processes, related, has_context=has_context)
    return state


def environment(device: str, gpu: Gpu | None = None) -> JsonObject:
    """Describe the machine and versions, as evidence does; on "cuda" a GPU, too."""
    facts: JsonObject = {
        "python": platform.python_version(),
        "system": f"{platform.system()} {platform.machine()}",
        "device": device,
        "packages": {p: version(p) for p in PACKAGES},
    }
    if device == "cuda":
        facts["gpu"] = gpu_state(gpu and gpu.uuid)
        facts["cuda"] = torch.version.cuda
    return facts


def related(pid: str) -> bool:
    """Whether a process is this one, its parent or child, or idle."""
    try:
        if DEVICE_CHILD.encode() in Path("/proc", pid, "cmdline").read_bytes():
            return True
        # The name, in brackets, may hold spaces.
        parent = Path("/proc", pid, "stat").read_text().rpartition(")")[2].split()[1]
    except (OSError, IndexError):
        return False
    own = str(os.getpid())
    return own in (pid, parent) or pid == str(os.getppid())


def others(processes: Sequence[str], ours: Callable[[str], bool], *, has_context: bool) -> int:
    """Count the compute processes on a GPU that are not `ours`.

    A container may hide or renumber ids: where none is ours although this process is on the GPU,
    one is taken to be it.
    """
    foreign = [pid for pid in processes if not ours(pid)]
    hidden = has_context and len(foreign) == len(processes)
    return max(0, len(foreign) - hidden)


def contention(state: Mapping[str, str | int]) -> str:
    """Say why a GPU is not known to be idle, if so."""
    if "error" in state:
        return f"nothing says who else uses the GPU: {state['error']}"
    if state["other_processes"]:
        return f"the GPU is in use: {state['other_processes']} other processes are on it"
    busy = str(state["utilization.gpu"])
    # A part of a GPU has no utilisation, [N/A].
    known = busy.replace(".", "").isdigit()
    return f"the GPU is in use {busy} % of the time" if known and float(busy) > _BUSY else ""


def contention_allowed() -> bool:
    """Whether the user takes figures from a GPU that others use."""
    return bool(os.environ.get(CONTENDED))


def require_idle(
    state: Callable[[], Mapping[str, str | int]] = gpu_state,
    wait: Callable[[float], None] = time.sleep,
) -> None:
    """Demand that nobody else uses the GPU, unless the user allows it.

    Waits up to 5 s until what this process ran before has left nvidia-smi's average.

    Raises:
        MachineError: somebody does, or nvidia-smi does not say.
    """
    reason = ""
    for attempt in range(11):
        if attempt:
            wait(0.5)
        reason = "" if contention_allowed() else contention(state())
        if not reason:
            return
    raise MachineError(reason, hint="wait, or take figures all the same: --contended")
