"""What of a workspace the judge is scored on."""

from typing import TypeVar

from coda_agent.agent.workspace import Workspace, kernel_names
from coda_agent.demos import demos
from coda_agent.evals.judge.by_hand import AUTHORS, right_programs, written
from coda_agent.evals.judge.corpus import Subject, demonstrations, kernels, rewrites
from coda_agent.evals.judge.mutants import Mutant, suite
from coda_agent.runtime.kernel import load_kernel

T = TypeVar("T")


def accepted(workspace: Workspace) -> list[Subject]:
    """Every program of the accepted kernels, the workspace's before the package's."""
    return kernels(load_kernel(kernel.folder) for kernel in kernel_names(workspace).values())


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
    texts = {kernel.name: kernel.text for kernel in kernel_names(workspace).values()}
    return written(name, {kernel: (first[kernel], text) for kernel, text in texts.items()})


def right(workspace: Workspace, count: int | None) -> list[Subject]:
    """List right programs: accepted ones, rewrites of them, demonstrations."""
    found: list[Subject] = []
    for subject in accepted(workspace):
        found += [subject, *(rewrites(subject) if subject.is_default else [])]
    return evenly([*found, *demonstrations(demos())[0]], count)


def evenly(things: list[T], count: int | None) -> list[T]:
    """Take so many of them, at equal distances; all by default."""
    count = min(count or len(things), len(things))
    return [things[i * len(things) // count] for i in range(count)]
