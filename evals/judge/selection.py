"""What of a workspace the judge is scored on, and one kernel's verdict on the clock."""

import time
from typing import TypeVar

from coda_agent.agent import execution, judge
from coda_agent.agent.judge import GATES
from coda_agent.agent.workspace import Workspace
from coda_agent.demos import demos
from coda_agent.evals.judge.by_hand import AUTHORS, right_programs, written
from coda_agent.evals.judge.corpus import Subject, demonstrations, kernels, rewrites
from coda_agent.evals.judge.mutants import Mutant, suite
from coda_agent.generated.kernel import load_kernel
from coda_agent.primitives.errors import CodaError
from coda_agent.primitives.objects import cache_directory
from coda_agent.primitives.tiles import SM90_CONFIGS
from coda_agent.specs import load_spec

T = TypeVar("T")


def accepted(workspace: Workspace) -> list[Subject]:
    """Every program of the accepted kernels."""
    return kernels(load_kernel(kernel.folder) for kernel in workspace.kernels())


def mutants(workspace: Workspace, name: str, *, count: int | None, seed: int) -> list[Mutant]:
    """Programs with one fault each: "mutants" of accepted kernels, "held-out" of demonstrations."""
    if name == "mutants":
        right = [subject for subject in accepted(workspace) if subject.is_default]
    else:
        right, _ = demonstrations(demos())
    return suite(right, seed=seed, count=count)


def authors(workspace: Workspace) -> list[Mutant]:
    """Mistakes that authors make, with the names that are right."""
    return written(AUTHORS, right_programs(AUTHORS, workspace.root / "specs"))


def by_hand(workspace: Workspace, name: str) -> list[Mutant]:
    """The wrong programs of a set that people wrote."""
    first = {s.spec.name: s for s in accepted(workspace) if s.is_default}
    texts = {kernel.name: kernel.program.read_text("utf-8") for kernel in workspace.kernels()}
    return written(name, {kernel: (first[kernel], text) for kernel, text in texts.items()})


def right(workspace: Workspace, count: int | None) -> tuple[list[Subject], list[str]]:
    """Right programs: accepted ones, rewrites of them, demonstrations; and what is left out."""
    found: list[Subject] = []
    for subject in accepted(workspace):
        found += [subject, *(rewrites(subject) if subject.is_default else [])]
    shown, left_out = demonstrations(demos())
    return evenly([*found, *shown], count), left_out


def evenly(things: list[T], count: int | None) -> list[T]:
    """So many of them, at equal distances; all by default."""
    count = min(count or len(things), len(things))
    return [things[i * len(things) // count] for i in range(count)]


def verdict_s(workspace: Workspace, device: str, name: str) -> dict[str, float]:
    """Seconds of the judge on an accepted kernel ("whole") and of its gates, in its first element
    type.

    Without a GPU the gates are those of `check`. With one they are all gates, over three tiles,
    among which the fastest need not be.

    Raises:
        CodaError: the kernel is refused.
    """
    kernel = workspace.kernel(name)
    spec, text = load_spec(kernel.spec), kernel.program.read_text("utf-8")
    for file in cache_directory().rglob("*"):
        if file.is_file():
            file.unlink()
    gates = GATES if device == "cuda" else GATES[:-1]
    start = time.perf_counter()
    verdict = judge.judge_candidate(
        spec,
        text,
        execution.executor(),
        device=device,
        gates=gates,
        types=[spec.elements[0]],
        tiles=SM90_CONFIGS[::6],
    )
    took = round(time.perf_counter() - start, 3)
    if any(not gate.passed for gate in verdict.gates if gate.name != "performance"):
        raise CodaError(f"{name} is refused", hint=f"coda-agent check {name}")
    return {"whole": took, **{gate.name: gate.seconds for gate in verdict.gates}}
