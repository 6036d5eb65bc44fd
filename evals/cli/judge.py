"""`coda-agent eval judge`: mutants, right programs and diagnoses, kept."""

from collections.abc import Callable, Collection, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal, TypeVar

import typer
from rich.console import Console
from rich.progress import Progress

from coda_agent.agent import execution
from coda_agent.agent.cli.options import DeviceOption
from coda_agent.agent.cli.report import quiet, reported
from coda_agent.agent.judge.runners import one_thread
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workspace import Kernel, find, kernel_names
from coda_agent.demos import demos
from coda_agent.evals.judge import generated as references
from coda_agent.evals.judge import plans as planning
from coda_agent.evals.judge import report, scores
from coda_agent.evals.judge.by_hand import AUTHORS, SETS, right_programs, written
from coda_agent.evals.judge.corpus import Subject, demonstrations, kernels, rewrites
from coda_agent.evals.judge.mutants import suite
from coda_agent.evals.judge.scores import Judge, Score, score_mutants
from coda_agent.primitives.errors import CodaError
from coda_agent.runtime.loading import load_kernel

T = TypeVar("T")
Found = dict[str, Score]
Some = int | None
_REPEATS = 5
"""How often each program of the corpus is judged, with fresh seeds."""


@reported(timed=True)
def judge(
    score: Annotated[
        Literal["mutants", "diagnosis", "by-hand", "corpus", "generated", "plans"],
        typer.Argument(metavar="SCORE"),
    ],
    device: DeviceOption = "auto",
    count: Annotated[
        Some, typer.Option(min=1, help="So many; else all, or as many as are usual.")
    ] = None,
    seed: Annotated[int, typer.Option(help="Chooses what is judged, and on which inputs.")] = 1,
) -> Reply:
    """Score the judge: what it kills, passes and says; resumes.

    \b
    mutants    programs and lowerings with one fault each: all must be refused
    diagnosis  how often the fault that is named is the one that was made
    by-hand    wrong programs that people wrote
    corpus     right programs, each several times with fresh seeds
    generated  functions written at random, as the composer writes them
    plans      functions of two and three products, as they are planned
    """
    where = {"generated": "cpu", "plans": "cpu"}.get(score, device)
    if device not in ("auto", where):
        raise CodaError(f"{score} is a score of --device {where}")
    with _judge(where) as scored:
        found = _SCORES[score](scored, count, seed)
        named: list[str] = []
        if score == "diagnosis":
            named = [f"{n}: {report.diagnosis(x.values())[0]} named" for n, x in found.items()]
        return _reply(scored, found, *named, refuse=score != "diagnosis")


def _mutants(judge: Judge, count: Some, seed: int, name: str = "mutants") -> dict[str, Found]:
    """Score every fault in turn, of accepted kernels or "held-out" demonstrations."""
    right = _defaults() if name == "mutants" else demonstrations(demos())[0]
    chosen = suite(right, seed=seed, count=count)
    return {name: score_mutants(judge, name, chosen, seed=seed)}


def _diagnosis(judge: Judge, count: Some, seed: int) -> dict[str, Found]:
    """Score mistakes of authors, and mutants of kernels and demonstrations."""
    right = right_programs(AUTHORS)
    wrong = _evenly(written(AUTHORS, right), count)
    found = {"authors": score_mutants(judge, "authors", wrong, seed=seed)}
    return found | _mutants(judge, count, seed) | _mutants(judge, count, seed, "held-out")


def _by_hand(judge: Judge, count: Some, seed: int) -> dict[str, Found]:
    first = {x.spec.name: x for x in _defaults()}
    right = {kernel.name: (first[kernel.name], kernel.text) for kernel in _stored()}
    sets = {f"by-hand-{n}": _evenly(written(n, right), count) for n in SETS}
    return {name: score_mutants(judge, name, x, seed=seed) for name, x in sets.items()}


def _corpus(judge: Judge, count: Some, _: int) -> dict[str, Found]:
    """Score accepted programs, rewrites of them, and demonstrations."""
    right = list[Subject]()
    for x in _accepted():
        right += [x, *(rewrites(x) if x.is_default else [])]
    chosen = _evenly([*right, *demonstrations(demos())[0]], count)
    return {"corpus": scores.score_corpus(judge, chosen, repeat=_REPEATS)}


def _generated(judge: Judge, count: Some, seed: int) -> dict[str, Found]:
    tried = references.tried, count or 5000
    return {"generated": references.score_batches(judge, "generated", *tried, seed=seed)}


def _plans(judge: Judge, count: Some, seed: int) -> dict[str, Found]:
    tried = planning.tried, count or 2000
    return {"plans": references.score_batches(judge, "plans", *tried, seed=seed)}


def _stored() -> Collection[Kernel]:
    """List the accepted kernels, the workspace's before the package's."""
    return kernel_names(find()).values()


def _accepted() -> list[Subject]:
    """List every program of theirs."""
    return kernels(load_kernel(kernel.folder) for kernel in _stored())


def _defaults() -> list[Subject]:
    return [x for x in _accepted() if x.is_default]


def _evenly(things: list[T], count: Some) -> list[T]:
    """Take so many of them, at equal distances; all by default."""
    count = min(count or len(things), len(things))
    return [things[i * len(things) // count] for i in range(count)]


_SCORES: dict[str, Callable[[Judge, Some, int], dict[str, Found]]] = {
    "mutants": _mutants, "diagnosis": _diagnosis, "by-hand": _by_hand, "corpus": _corpus,
    "generated": _generated, "plans": _plans,
}  # fmt: skip


@contextmanager
def _judge(device: str) -> Iterator[Judge]:
    gpu = execution.usable_gpu(device)
    # With two threads, all mutants took two cores 3 minutes, and with one a core 1.5.
    bar = Progress(console=Console(stderr=True), disable=quiet(), transient=True)
    with one_thread(), bar:
        task = bar.add_task("")

        def say(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done - 1, total=total, description=note)

        yield Judge(find().root, "cuda" if gpu else "cpu", say)


def _reply(judge: Judge, found: Mapping[str, Found], *more: str, refuse: bool = True) -> Reply:
    """Write the page, and say what came of scores; refuse faults."""
    page = report.write_page(judge.root)
    results = {name: report.SUMMARIES[name](cells.values()) for name, cells in found.items()}
    lines = [f"{name}: {summary.result}" for name, summary in results.items()]
    wrong = [fault for summary in results.values() for fault in summary.faults]
    document = {"scores": {n: [*cells.values()] for n, cells in found.items()}, "page": page}
    text = "\n".join([*lines, *more, *wrong, f"wrote {page}"])
    return Reply(document, text, REFUSED if refuse and wrong else 0)
