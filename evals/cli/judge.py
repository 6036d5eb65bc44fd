"""`coda-agent score-judge`: mutants, right programs and diagnoses, kept."""

from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Annotated, Literal

import typer
from rich.console import Console
from rich.progress import Progress

from coda_agent.agent import execution
from coda_agent.agent.cli.options import DeviceOption
from coda_agent.agent.cli.report import quiet, reported
from coda_agent.agent.reply import REFUSED, Reply
from coda_agent.agent.workspace import find
from coda_agent.evals.judge import generated as references
from coda_agent.evals.judge import plans as planning
from coda_agent.evals.judge import report, scores, selection
from coda_agent.evals.judge.by_hand import SETS
from coda_agent.evals.judge.scores import Judge, Score, score_mutants
from coda_agent.primitives.errors import CodaError

Found = dict[str, Score]
Some = int | None
_REPEATS = 5
"""How often each program of the corpus is judged, with fresh seeds."""


@reported("contended")
def score_judge(
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
    with _judge(where) as judge:
        found = _SCORES[score](judge, count, seed)
        named: list[str] = []
        if score == "diagnosis":
            named = [f"{n}: {report.diagnosis(x.values())[0]} named" for n, x in found.items()]
        return _reply(judge, found, *named, refuse=score != "diagnosis")


def _mutants(judge: Judge, count: Some, seed: int, name: str = "mutants") -> dict[str, Found]:
    """Every fault in turn."""
    chosen = selection.mutants(find(), name, count=count, seed=seed)
    return {name: score_mutants(judge, name, chosen, seed=seed)}


def _diagnosis(judge: Judge, count: Some, seed: int) -> dict[str, Found]:
    """Mistakes that authors make, the accepted kernels', and those of the demonstrations, which the
    diagnosis was not tuned on."""
    wrong = selection.evenly(selection.authors(find()), count)
    found = {"authors": score_mutants(judge, "authors", wrong, seed=seed)}
    return found | _mutants(judge, count, seed) | _mutants(judge, count, seed, "held-out")


def _by_hand(judge: Judge, count: Some, seed: int) -> dict[str, Found]:
    sets = {f"by-hand-{n}": selection.evenly(selection.by_hand(find(), n), count) for n in SETS}
    return {name: score_mutants(judge, name, x, seed=seed) for name, x in sets.items()}


def _corpus(judge: Judge, count: Some, _: int) -> dict[str, Found]:
    right = selection.right(find(), count)
    return {"corpus": scores.score_corpus(judge, right, repeat=_REPEATS)}


def _generated(judge: Judge, count: Some, seed: int) -> dict[str, Found]:
    tried = references.tried, count or 5000
    return {"generated": references.score_batches(judge, "generated", *tried, seed=seed)}


def _plans(judge: Judge, count: Some, seed: int) -> dict[str, Found]:
    tried = planning.tried, count or 2000
    return {"plans": references.score_batches(judge, "plans", *tried, seed=seed)}


_SCORES: dict[str, Callable[[Judge, Some, int], dict[str, Found]]] = {
    "mutants": _mutants, "diagnosis": _diagnosis, "by-hand": _by_hand, "corpus": _corpus,
    "generated": _generated, "plans": _plans,
}  # fmt: skip


@contextmanager
def _judge(device: str) -> Iterator[Judge]:
    gpu = execution.usable_gpu(device)
    with Progress(console=Console(stderr=True), disable=quiet(), transient=True) as bar:
        task = bar.add_task("")

        def say(done: int, total: int, note: str) -> None:
            bar.update(task, completed=done - 1, total=total, description=note)

        yield Judge(find().root, "cuda" if gpu else "cpu", say)


def _reply(judge: Judge, found: Mapping[str, Found], *more: str, refuse: bool = True) -> Reply:
    """Write the page, and say what came of these scores; refused where something went wrong."""
    page = report.write_page(judge.root)
    results = {name: report.SUMMARIES[name](cells.values()) for name, cells in found.items()}
    lines = [f"{name}: {summary.result}" for name, summary in results.items()]
    wrong = [fault for summary in results.values() for fault in summary.faults]
    document = {"scores": {n: [*cells.values()] for n, cells in found.items()}, "page": page}
    text = "\n".join([*lines, *more, *wrong, f"wrote {page}"])
    return Reply(document, text, REFUSED if refuse and wrong else 0)
