"""What the judge needs of whoever carries out its jobs, `agent/execution/`.

Jobs are data: programs as graphs, a spec's text, tiles. A candidate's text, and the author, stay
with the command that was started; so do keys and logs.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Protocol

from coda_agent.agent.judge.job import BuiltObject, CompileJob, Job, PrepareJob
from coda_agent.agent.judge.machine import Gpu, demanded
from coda_agent.agent.judge.records import JsonObject, Outcome, Progress, ReportT
from coda_agent.primitives.errors import CompileError


class Executor(Protocol):
    """What runs a trial's jobs, with the same answer wherever it runs."""

    def gpu(self) -> Gpu | None:
        """Find a Hopper GPU that jobs can have, or None."""
        ...

    def start(self, *, gpu: bool, ahead: PrepareJob | None = None) -> None:
        """Get ready to compile; with `gpu` to run kernels and do `ahead`."""
        ...

    def map(
        self, jobs: Sequence[CompileJob], progress: Callable[[int, CompileJob], None]
    ) -> list[BuiltObject | CompileError]:
        """Compile jobs, results or errors in order; `progress(done, job)` after each."""
        ...

    def grade(self, job: Job[ReportT], progress: Progress) -> Outcome[ReportT]:
        """Carry out a gate's job, on a GPU unless it says otherwise.

        Raises:
            MachineError: there is no usable GPU, or a tool is missing or left no complete report.
        """
        ...

    def environment(self, device: str) -> JsonObject:
        """Describe the last gate's machine, as evidence names it."""
        ...


def usable(executor: Executor, device: str) -> Gpu | None:
    """Find the GPU for kernels: "cuda" demands, "cpu" takes none, "auto" asks.

    Raises:
        MachineError: "cuda", and there is no Hopper GPU.
    """
    gpu = None if device == "cpu" else executor.gpu()
    return demanded(gpu) if device == "cuda" else gpu
