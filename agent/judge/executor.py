"""What the judge needs of whoever carries out its jobs, which is `agent/execution/`.

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
    """Runs the jobs of a trial; the same job gives the same answer wherever it runs."""

    def gpu(self) -> Gpu | None:
        """A Hopper GPU that jobs can have; None where there is none."""
        ...

    def start(self, *, gpu: bool, ahead: PrepareJob | None = None) -> None:
        """Get ready to compile; with `gpu` also to run kernels, and to do `ahead` by then."""
        ...

    def map(
        self, jobs: Sequence[CompileJob], progress: Callable[[int, CompileJob], None]
    ) -> list[BuiltObject | CompileError]:
        """Compile jobs, results or errors in order; `progress(done, job)` after each."""
        ...

    def grade(self, job: Job[ReportT], progress: Progress) -> Outcome[ReportT]:
        """What a gate's job found, on a GPU or, where the job says so, on a CPU.

        Raises:
            MachineError: there is no usable GPU, or a tool is missing or left no complete report.
        """
        ...

    def environment(self, device: str) -> JsonObject:
        """The machine that the last gate ran on, as evidence names it."""
        ...


def usable(executor: Executor, device: str) -> Gpu | None:
    """The GPU that kernels run on: "cuda" demands one, "cpu" takes none, "auto" what there is.

    Raises:
        MachineError: "cuda", and there is no Hopper GPU.
    """
    gpu = None if device == "cpu" else executor.gpu()
    return demanded(gpu) if device == "cuda" else gpu
